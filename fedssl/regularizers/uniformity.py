"""FedU2's flexible uniform regularizer (FUR): unbalanced optimal transport to random points of the sphere."""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedkernels import unbalanced_ot_plan

from ..client import LocalRound
from ..errors import UserError
from ..models.model import Model
from ..objectives.base import Step
from .base import Regularizer, StepLoss


def sphere_samples(rows: int, features: int, generator: torch.Generator) -> Tensor:
    """Draw uniform samples of the unit sphere, float32 [rows, features] on the generator's device."""
    return F.normalize(torch.randn(rows, features, generator=generator, device=generator.device), dim=1)


class Uniformity(Regularizer):
    """weight * (l_u(Z^1) + l_u(Z^2)) (Liao et al. 2024, Eq. 2 to 4), Z^v [B, d] the l2-normalised outputs of `layer`.

        l_u(Z) = min over plan >= 0 of <C, plan> + tau_a/2 |plan 1 - a|^2 + tau_b/2 |plan' 1 - b|^2

    C_ij is the cost between z_i and the sample s_j of the unit sphere. Each step draws `draws` sets of B new samples,
    the same for both views; l_u is its mean over them. By the envelope theorem the gradient of C_ij is the plan's
    entry: each representation is drawn towards the samples that it is matched with. Where only one view passes through
    the online network (BYOL's `symmetric: false`), the term is of that view alone.

    Deviation from the paper in cost and masses: C_ij = 1 - <z_i, s_j> and a_i = b_j = 1. As printed, with C_ij = |z_i -
    s_j|^2, the term has no effect. An entry of the plan is positive only where C_ij < tau_a a_i + tau_b b_j, which is
    1.6 for unit masses and 1.6 / B for masses 1 / B. But in 512 dimensions the cost from any point of the sphere to a
    random one is 2 +- 0.09, so 1.6 is 4.5 standard deviations away. This was measured with B = 128 for random, low-rank
    and collapsed representations: with either masses nothing is transported and the gradient is exactly 0, whereas 1 -
    cos, half of the printed cost, moves 0.44, 0.43 and 0.37 of the mass (tests/fedssl/regularizers/test_uniformity.py).
    The printed cost is `cost: squared_distance`. It moves a little in fewer dimensions: of random representations 0.07
    % with 256 (B = 64), 1.4 % with 128 (B = 50).

    Deviation in the layer: the paper's Z^v is the output of "the feature extractor" F_theta. An encoder that ends in a
    ReLU has no negative outputs, so its representations cannot cover the sphere, whatever the weight. The projector's
    outputs can, and the authors' released code has its term there, so that is the default. The paper's form is
    `layer: encoder`. benchmarks/results/fedu2_cifar10_small tells what each of them did.

    Deviation in the draws: with the paper's one set of samples a step, only 14 to 20 % of the term's gradient is
    signal; the rest tells which samples were drawn. The mean over eight sets follows it better (same page). They are
    drawn on the model's device: a GPU draws others than the CPU.

    With unit masses the value is a sum over the batch while the objective is a mean over it. The paper's lambda_U = 0.1
    stands beside the sum and batches of 128: for B images, 12.8 / B has the same effect.
    Deviation in the solver: it stops at a relative duality gap, not after a number of steps of Eq. 6. Those have no
    guarantee: their length knows nothing of the projection, so a step may increase the value, and is undefined where
    the gradient has no row and column sums. On seven problems of FUR (B = 128; random, low-rank, collapsed and
    non-negative representations) they converged, but slowly: 2.5e-3 to 5.3e-3 of the optimum above it after 1000 steps
    from 0, and 7e-4 to 1e-3 after 4000. Only with collapsed representations the rest was below 1e-4.

    Logs the share of the mass that is transported (`uniformity_mass`, at most 1; at 0 the term has no effect, and
    `unbalanced_ot` warns), `uniformity_iterations` and `uniformity_gap`.
    """

    weight: float = Field(0.1, ge=0, description="lambda_U, the factor of the term")
    tau_a: float = Field(0.8, gt=0, description="price of the representations' unmatched mass")
    tau_b: float = Field(0.8, gt=0, description="price of the samples' unmatched mass")
    tolerance: float = Field(1e-4, gt=0, description="relative duality gap at which the solver stops")
    cost: Literal["cosine", "squared_distance"] = Field(
        "cosine", description="cosine: 1 - cos; squared_distance: the paper's, which is twice that"
    )
    layer: Literal["encoder", "projector"] = Field(
        "projector", description="layer whose outputs are spread over the sphere; the paper has encoder"
    )
    draws: int = Field(8, ge=1, description="sets of samples a step, over which the term is averaged; the paper has 1")

    def check_model(self, model: Model) -> None:
        if self.layer not in model.online:
            raise UserError(f"uniformity's layer is {self.layer}, which this objective's model does not have")

    def start_round(self, local: LocalRound) -> StepLoss:
        generator = local.generator("uniformity", local.client.model.device)

        def term(step: Step) -> Tensor:
            outputs = step.representations if self.layer == "encoder" else step.projections
            z = F.normalize(torch.stack(outputs).float(), dim=-1)
            views, rows, features = z.shape
            samples = sphere_samples(self.draws * rows, features, generator)
            # [views, rows, draws * rows] -> a problem for each view and draw
            cost = (1.0 - z @ samples.T).view(views, rows, self.draws, rows).transpose(1, 2)
            if self.cost == "squared_distance":
                cost = 2.0 * cost
            plan, info = unbalanced_ot_plan(cost.detach(), 1.0, 1.0, self.tau_a, self.tau_b, tol=self.tolerance)
            local.log("uniformity_mass", info.transported_mass.mean().double() / rows)
            local.log("uniformity_iterations", info.iterations.double().mean())
            local.log("uniformity_gap", info.gap.mean())
            unmatched = self.tau_a * (1 - plan.sum(-1)).square().sum() + self.tau_b * (1 - plan.sum(-2)).square().sum()
            value = ((plan * cost).sum() + unmatched / 2) / self.draws
            return self.weight * value

        return term
