"""FedDecorr: keep the dimensions of the representation uncorrelated."""

from pydantic import Field
from torch import Tensor

from ..client import LocalRound
from ..objectives.base import Step
from .base import Regularizer, StepLoss


def decorrelation_loss(representation: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Return the mean over i != j of (z'z)_ij^2, divided by n; z is [n, d] with columns standardised over the batch.

    This is (n - 1)^2 / n times the mean of r_ij^2, r_ij the batch's correlations; a scalar, 0 for d = 1.
    """
    n, d = representation.shape
    if d < 2:
        return representation.sum() * 0.0
    z = representation - representation.mean(dim=0)
    z = z / (representation.var(dim=0) + epsilon).sqrt()
    products = z.T @ z
    off_diagonal = products.square().sum() - products.diagonal().square().sum()
    return off_diagonal / (d * (d - 1)) / n


class Decorrelation(Regularizer):
    """FedDecorr (Shi et al. 2023, Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
    Learning): weight * `decorrelation_loss` of the encoder's output, the mean over the views.

    The paper's term is |K|_F^2 / d^2 with the correlation matrix K and weight 0.1. This follows the authors' released
    code, which takes the off-diagonal of z'z instead of K and divides by the batch size n: about n times the paper's
    term, with the same weight. For the paper's strength set weight to 0.1 n (1 - 1/d) / (n - 1)^2; the paper's diagonal
    is a constant. The method is for labelled data; here it is added to any objective, as in FedU2's comparison. Logs
    `mean_squared_correlation`, the mean of r_ij^2 over i != j, which does not depend on the batch size.
    """

    weight: float = Field(0.1, ge=0, description="beta, the factor of the term")

    def start_round(self, local: LocalRound) -> StepLoss:
        def term(step: Step) -> Tensor:
            losses = [decorrelation_loss(view) for view in step.representations]
            n = len(step.representations[0])
            loss = sum(losses[1:], losses[0]) / len(losses)
            local.log("mean_squared_correlation", loss.detach().double() * n / (n - 1) ** 2)
            return self.weight * loss

        return term
