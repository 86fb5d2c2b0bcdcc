"""Learn which public images are similar from the mean kernel, by softmaxed cosine similarities."""

from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..teacher import cosines, similarity_loss
from .base import Regularizer, StepLoss
from .cka_alignment import term_of_public_images


class SimilarityDistillation(Regularizer):
    """mu * KL between the distributions of similarities to other public images, K-bar's as the target.

    Source: similarity distillation of SEED (Fang et al. 2021), with the step's other public images in
    place of its queue, towards the clients' joined similarities as in FLESD (Shi et al. 2021), which teaches one global
    model by them. Here each client learns from them beside its own objective. A softmax looks at the nearest images,
    and so the many small similarities of a kernel of high rank count for less than in `cka_alignment`.
    docs/how_much_can_peers_give.md has what both reach.

    The aggregator `representation_mean` determines what is learned from. The client's representations are whitened as
    those that it sends, and centred by the batch where those are. BatchNorm takes the statistics of the batch and
    leaves the running ones alone. Logs `similarity_divergence`, the mean over the round's steps.
    """

    needs_public_images = True
    needs_aggregator = "representation_mean"

    weight: float = Field(1.0, ge=0, description="mu, the factor of the term")
    batch_size: int = Field(100, ge=2, description="public images a step")
    temperature: float = Field(0.1, gt=0, description="temperature of both softmaxes")

    def start_round(self, local: LocalRound) -> StepLoss:
        centered = bool(local.received.config["alignment.centered"])

        def compare(x: Tensor, target: Tensor, factored: bool) -> Tensor:
            if centered:
                x = x - x.mean(dim=0)
            if factored:
                target = cosines(target)
            else:
                scale = target.diagonal().clamp_min(1e-30).rsqrt()
                target = target * scale * scale[:, None]
            divergence = similarity_loss(cosines(x), target, self.temperature)
            local.log("similarity_divergence", divergence.detach())
            return self.weight * divergence

        return term_of_public_images(local, self.batch_size, "similarity_distillation", compare)
