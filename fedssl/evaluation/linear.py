"""Linear evaluation: how well one linear layer on the frozen encoder separates the classes."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from ..options import Options


class LinearProtocol(NamedTuple):
    """The training of the linear layer by Adam: passes over the training images, representations a step, and rate."""

    epochs: int
    batch_size: int
    learning_rate: float


PROTOCOLS = {
    # Hetero-SSFL, section 5.1; the paper does not name the loss
    "hetero_ssfl": LinearProtocol(epochs=100, batch_size=512, learning_rate=3e-3),
    # FedU2's released code, linear_eval.py
    "fedu2": LinearProtocol(epochs=200, batch_size=512, learning_rate=3e-3),
    # EasyFL, applications/fedssl/linear_evaluation.py, the code of FedU and FedEMA. Deviation: that code takes the
    # images in the data set's order; here each epoch draws an order.
    "easyfl": LinearProtocol(epochs=200, batch_size=2048, learning_rate=3e-3),
}


class LinearOptions(Options):
    """A protocol of training the linear layer, and the values that replace its own."""

    name: Literal["hetero_ssfl", "fedu2", "easyfl"] = Field(
        "hetero_ssfl", description="whose protocol is followed; it gives each value that is not set"
    )
    epochs: int | None = Field(
        None, ge=1, description="passes over the training images; hetero_ssfl 100, fedu2 and easyfl 200"
    )
    batch_size: int | None = Field(
        None, ge=1, description="representations a step; hetero_ssfl and fedu2 512, easyfl 2048"
    )
    learning_rate: float | None = Field(None, gt=0, description="of Adam; 0.003 in each protocol")
    standardize: bool = Field(
        False, description="whether features are standardised by their mean and deviation over the training images"
    )

    def protocol(self) -> LinearProtocol:
        """Return the named protocol with the values that are set in its place."""
        given = self.model_dump(include=set(LinearProtocol._fields), exclude_none=True)
        return PROTOCOLS[self.name]._replace(**given)


def linear_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    classes: int,
    options: LinearOptions,
    generator_seed: int,
) -> float:
    """Return the test accuracy of one linear layer trained on frozen representations, in percent.

    The layer is trained by Adam; the loss is cross-entropy. This is the offline variant, as in all of `PROTOCOLS`: the
    representations are extracted once, so the classifier sees no augmentation. Figures of online variants (a classifier
    trained along with the encoder, or on augmented images) differ.

    No protocol standardises or normalises, and small representations then score lower than they could in so many steps.
    Use `standardize` to compare encoders whose representations differ in scale.

    Hetero-SSFL's "linear fully connected layer with 1000 neurons" can be read as 1000 outputs of which only `classes`
    are ever a label, or as a hidden layer; here the one layer has `classes` outputs.

    Args:
        train_features, test_features: floating point [n, d] and [m, d], finite.
        train_labels, test_labels: integer [n] and [m], 0 to classes - 1.
        generator_seed: decides the initial weights and the order of the batches. The same seed gives the same
            result; torch's global random generator is neither read nor moved.

    Raises:
        UserError: training diverged.
    """
    targets = train_labels.to(train_features.device, torch.int64)
    logits = _test_logits(train_features, targets, test_features, classes, F.cross_entropy, options, generator_seed)
    return 100.0 * int((logits.argmax(dim=1) == test_labels.to(logits.device)).sum()) / len(test_features)


def linear_auroc(
    train_features: Tensor,
    train_targets: Tensor,
    test_features: Tensor,
    test_targets: Tensor,
    options: LinearOptions,
    generator_seed: int,
) -> float | None:
    """Return the mean area under the ROC curve over several yes-or-no labels, of a linear layer trained as above.

    The protocol is that of `linear_accuracy` with one output a label and binary cross-entropy. The mean over the labels
    is the measure of ChestMNIST (Yang et al. 2023, MedMNIST v2, section "Benchmark").

    Args:
        train_features, test_features, options, generator_seed: see `linear_accuracy`.
        train_targets, test_targets: 0 or 1, [n, labels] and [m, labels].

    Returns:
        Percentage, 50 for chance and 100 for a perfect order. A label that all test images have, or none, does not
        count; None where no label counts.
    """
    from sklearn.metrics import roc_auc_score  # here, as importing it takes a second

    targets = train_targets.to(train_features.device, torch.float32)
    loss = F.binary_cross_entropy_with_logits
    logits = _test_logits(train_features, targets, test_features, targets.shape[1], loss, options, generator_seed).cpu()
    truth = test_targets.cpu()
    areas = [
        roc_auc_score(truth[:, label].numpy(), logits[:, label].numpy())
        for label in range(truth.shape[1])
        if 0 < int(truth[:, label].sum()) < len(truth)
    ]
    return 100.0 * float(sum(areas)) / len(areas) if areas else None


def _test_logits(
    train_features: Tensor,
    targets: Tensor,
    test_features: Tensor,
    outputs: int,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    options: LinearOptions,
    generator_seed: int,
) -> Tensor:
    """Return the outputs for the test images, [m, outputs], of a linear layer trained on the training images."""
    device, protocol = train_features.device, options.protocol()
    inputs, test_inputs = train_features.detach().float(), test_features.detach().to(device).float()
    if options.standardize:
        inputs, test_inputs = _standardized(inputs, test_inputs)

    generator = torch.Generator().manual_seed(generator_seed)
    width = inputs.shape[1]
    bound = width**-0.5  # the initialisation of torch.nn.Linear, which would draw from the global generator
    weight = torch.empty(outputs, width).uniform_(-bound, bound, generator=generator).to(device)
    bias = torch.empty(outputs).uniform_(-bound, bound, generator=generator).to(device)
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    optimizer = torch.optim.Adam(parameters, lr=protocol.learning_rate)

    with torch.enable_grad():
        for _ in range(protocol.epochs):
            order = torch.randperm(len(inputs), generator=generator).to(device)
            for batch in order.split(protocol.batch_size):
                loss = loss_of(F.linear(inputs[batch], weight, bias), targets[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    if not all(parameter.isfinite().all() for parameter in parameters):
        raise UserError(
            f"learning_rate: the linear evaluation diverged at {protocol.learning_rate}; choose a lower one"
        )
    with torch.no_grad():
        return F.linear(test_inputs, weight, bias)


def _standardized(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Standardise both by the mean and standard deviation of each feature in `train`; float32 [n, d] and [m, d]."""
    wide = train.double()
    mean, deviation = wide.mean(dim=0), wide.std(dim=0, correction=0)
    # The variation that rounding leaves of a constant feature must not become a feature.
    scale = torch.where(deviation > 1e-6 * mean.abs(), 1 / deviation, 0.0)
    return ((wide - mean) * scale).float(), ((test.double() - mean) * scale).float()
