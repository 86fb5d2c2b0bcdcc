"""torch_cka's comparison of two models, layer by layer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CKA"]

_FEWEST_SAMPLES = 4  # the unbiased estimate divides by N - 3


class CKA:
    """torch_cka's ``CKA``: CKA of all pairs of layers, from unbiased estimates of HSIC that are averaged over batches.

    Differences: a value is 0 where an estimate of a layer with itself is not positive; the original gets NaN there and
    raises an AssertionError. Rows and columns have the order of the names in ``export``; the original has that in which
    layers finish, so that a module which holds others is not where its name is. The models keep no hooks. There are no
    warnings, no progress bar and no ``plot_results``: draw ``export()["CKA"]`` with matplotlib's ``imshow``.

    Source: Nguyen et al. 2021, "Do Wide and Deep Networks Learn the Same Things?", Eq. 2 and 3.
    """

    def __init__(
        self,
        model1: nn.Module,
        model2: nn.Module,
        model1_name: str | None = None,
        model2_name: str | None = None,
        model1_layers: list[str] | None = None,
        model2_layers: list[str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.models = [model.to(device).eval() for model in (model1, model2)]
        self.names = [model1_name or type(model1).__name__, model2_name or type(model2).__name__]
        self.layers = [_layers(model1, model1_layers, "model1_layers"), _layers(model2, model2_layers, "model2_layers")]
        self.device = device
        self.hsic_matrix: Tensor | None = None
        self.datasets = ["", ""]

    def compare(self, dataloader1: Iterable[Any], dataloader2: Iterable[Any] | None = None) -> None:
        """Runs both models on the first entry of each batch of at least 4 samples; `dataloader2` is for the second."""
        loaders = [dataloader1, dataloader1 if dataloader2 is None else dataloader2]
        self.datasets = [repr(getattr(loader, "dataset", loader)).split("\n")[0] for loader in loaders]
        sums: list[Tensor] = []
        with torch.no_grad():
            for (first, *_), (second, *_) in zip(*loaders, strict=False):
                grams = [
                    _centered_grams(model, layers, batch.to(self.device))
                    for model, layers, batch in zip(self.models, self.layers, (first, second), strict=True)
                ]
                if grams[0].shape[1] != grams[1].shape[1]:
                    raise ValueError("dataloader2 must have batches of the same sizes as dataloader1")
                of_batch = grams[0] @ grams[1].T, grams[0].square().sum(1), grams[1].square().sum(1)
                # N (N - 3) of Eq. 3; it cancels out where all batches have N samples.
                samples = len(first)
                terms = [term / (samples * (samples - 3)) for term in of_batch]
                sums = [total + term for total, term in zip(sums, terms, strict=True)] if sums else terms
        if not sums:
            raise ValueError("dataloader1 must have at least one batch, got none")
        cross, of_first, of_second = sums
        scale = (of_first[:, None] * of_second).sqrt()
        self.hsic_matrix = torch.where(scale > 0, cross / scale, 0).float().cpu()

    def export(self) -> dict[str, Any]:
        """The values [layers of model1, layers of model2] under "CKA", with the names of models, layers and data."""
        if self.hsic_matrix is None:
            raise ValueError("there is nothing to export: call compare() before export()")
        return {
            "model1_name": self.names[0],
            "model2_name": self.names[1],
            "CKA": self.hsic_matrix,
            "model1_layers": self.layers[0],
            "model2_layers": self.layers[1],
            "dataset1_name": self.datasets[0],
            "dataset2_name": self.datasets[1],
        }


def _layers(model: nn.Module, wanted: list[str] | None, argument: str) -> list[str]:
    """The names of the wanted modules in the model's order; all of them for None, itself ("") included."""
    names = [name for name, _ in model.named_modules()]
    missing = set(wanted or ()) - set(names)
    if missing:
        raise ValueError(f"{argument} must be names of named_modules(), got {sorted(missing)}")
    return names if wanted is None else [name for name in names if name in wanted]


def _centered_grams(model: nn.Module, layers: list[str], batch: Tensor) -> Tensor:
    """The Gram matrices of the layers' outputs, centred for the unbiased HSIC, one a row: [layers, N * N] float64."""
    if len(batch) < _FEWEST_SAMPLES:
        raise ValueError(f"a batch must have at least {_FEWEST_SAMPLES} samples, got {len(batch)}")
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, inputs, output: outputs.update({name: output})

    modules = dict(model.named_modules())
    hooks = [modules[name].register_forward_hook(keep(name)) for name in layers]
    try:
        model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([_centered_gram(outputs[name].flatten(1).double()).flatten() for name in layers])


def _centered_gram(features: Tensor) -> Tensor:
    """The U-centred Gram matrix of Székely and Rizzo 2014: its inner products are the unbiased HSIC."""
    features = features - features.mean(0)  # changes nothing but the rounding
    gram = (features @ features.T).fill_diagonal_(0)
    samples = len(gram)
    means = gram.sum(0) / (samples - 2)
    means = means - means.sum() / (2 * (samples - 1))
    return (gram - means[:, None] - means[None, :]).fill_diagonal_(0)
