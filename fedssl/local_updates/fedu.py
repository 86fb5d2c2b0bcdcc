"""FedU: take the global predictor only if local training moved the encoder little."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..models.model import Model
from .base import AfterTraining, LocalUpdate
from .replace import Replace

DIVERGENCE = "fedu.divergence"


def encoder_weights(model: Model) -> dict[str, Tensor]:
    """Return copies of the encoder's weights that train and have two or more dimensions: a ResNet's convolutions."""
    trained = {name: p for name, p in model.encoder.named_parameters() if p.dim() > 1 and p.requires_grad}
    return {name: p.detach().clone() for name, p in trained.items()}


def divergence(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """Return the mean over the tensors of |after - before|_2."""
    distances = [float(torch.linalg.vector_norm(after[name] - tensor)) for name, tensor in before.items()]
    return sum(distances) / len(distances)


class FedU(LocalUpdate):
    """Divergence-aware predictor update (Zhuang et al. 2021, Collaborative Unsupervised Visual Representation Learning
    from Decentralized Data, section 3.2).

    A client takes the global encoder and projector. It takes the global predictor only if its divergence is below
    `threshold`; otherwise it keeps its own. In its first round a client takes everything. Encoder, projector and
    predictor travel up and down in every round, whether a client uses them or not.

    This follows the authors' released code (EasyFL, applications/fedssl): the divergence is that of the client's
    previous local training, the mean L2 distance between the encoder's convolution weights before and after it, and the
    threshold is 0.4. Deviation: the shortcut convolutions of residual blocks count too, which the code misses, as it
    finds convolutions by name. In other encoders every weight with two or more dimensions counts. Logs `divergence` and
    `global_predictor` (1 where the client took it).
    """

    whole_models: ClassVar[bool] = True
    needs_head: ClassVar[str | None] = "predictor"

    threshold: float = Field(0.4, gt=0, description="mu; from this divergence on a client keeps its own predictor")

    def receive(self, local: LocalRound) -> AfterTraining:
        model, numbers = local.client.model, local.client.memory.numbers
        keep = numbers.get(DIVERGENCE, 0.0) >= self.threshold
        own = {name: t.clone() for name, t in model.state_dict().items() if name.startswith("online.predictor.")}
        Replace().receive(local)
        if keep:
            model.load_state_dict(own, strict=False)
        local.log("global_predictor", float(not keep))
        before = encoder_weights(model)

        def after_training() -> None:
            numbers[DIVERGENCE] = divergence(before, encoder_weights(model))
            local.log("divergence", numbers[DIVERGENCE])

        return after_training
