"""FedDecorr's loss, by hand."""

from __future__ import annotations

import pytest
import torch

from fedssl.objectives.base import Step
from fedssl.regularizers.decorrelation import Decorrelation, decorrelation_loss
from tests.fedssl.small_models import local_round, scalar_model


def test_decorrelation_of_two_clients():
    """Three images. Client a: both columns (-1, 0, 1), standard deviation 1, so z'z off the diagonal is 2: 2^2 / 3.
    Client b: (-1, 0, 1) and (1, -2, 1) are orthogonal: 0. r = 1 in a gives the logged mean square 1.
    """
    together = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
    apart = torch.tensor([[-1.0, 1.0], [0.0, -2.0], [1.0, 1.0]])
    assert float(decorrelation_loss(together)) == pytest.approx(4 / 3)
    assert float(decorrelation_loss(5 * together + 7)) == pytest.approx(4 / 3)
    assert float(decorrelation_loss(apart)) == pytest.approx(0.0, abs=1e-6)
    assert float(decorrelation_loss(together[:, :1])) == 0
    local = local_round(scalar_model())
    term = Decorrelation(name="decorrelation", weight=0.1).start_round(local)
    step = Step(torch.tensor(0.0), (together, apart))
    assert float(term(step)) == pytest.approx(0.1 * (4 / 3) / 2)
    assert local.logged()["mean_squared_correlation"] == pytest.approx(0.5)


def test_decorrelation_pulls_a_collapsed_batch_apart():
    torch.manual_seed(0)
    z = (torch.randn(32, 1) @ torch.randn(1, 8) + 0.1 * torch.randn(32, 8)).requires_grad_()
    before = float(decorrelation_loss(z.detach()))
    for _ in range(50):
        (gradient,) = torch.autograd.grad(decorrelation_loss(z), z)
        z = (z - gradient).detach().requires_grad_()
    assert float(decorrelation_loss(z.detach())) < before / 2
