"""FUR, why it does nothing as printed, and the sliced distance that FedU2's authors released in its place."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fedkernels import unbalanced_ot, unbalanced_ot_plan
from fedssl.client import LocalRound
from fedssl.messages import Message
from fedssl.objectives.base import Step
from fedssl.regularizers import sliced_uniformity, uniformity
from fedssl.regularizers.sliced_uniformity import SlicedUniformity, sliced_distance
from fedssl.regularizers.uniformity import Uniformity, sphere_samples
from tests.fedssl.small_models import local_round, scalar_model, step_of


def representations(kind):
    """B = 128 unit vectors of 512 entries, and as many samples of the sphere."""
    generator = torch.Generator().manual_seed(0)
    if kind == "random":
        z = torch.randn(128, 512, generator=generator)
    elif kind == "low rank":
        z = torch.randn(128, 5, generator=generator) @ torch.randn(5, 512, generator=generator)
    else:
        z = torch.randn(1, 512, generator=generator) + 1e-3 * torch.randn(128, 512, generator=generator)
    return F.normalize(z, dim=1), sphere_samples(128, 512, generator)


def test_fur_by_hand(monkeypatch):
    """One image, the sample s = (0, 1), tau_a = tau_b = 0.8: the plan is one number p >= 0 and the value
    C p + 0.8 (p - 1)^2, least at p = 1 - C / 1.6.

    View 1 is (2, 0), normalised (1, 0): C = 1, p = 0.375, value 0.375 + 0.8 * 0.625^2 = 0.6875. View 2 is (0, -3):
    C = 2 is beyond 1.6, p = 0, value 0.8. Weight 0.1: 0.1 * (0.6875 + 0.8) = 0.14875.
    Gradient in view 1: -0.1 * 0.375 * (s - <s, z> z) / |(2, 0)| = (0, -0.01875), in view 2 it is 0.
    """
    monkeypatch.setattr(uniformity, "sphere_samples", lambda *_: torch.tensor([[0.0, 1.0]]))
    one = torch.tensor([[2.0, 0.0]], requires_grad=True)
    two = torch.tensor([[0.0, -3.0]], requires_grad=True)
    local = local_round(scalar_model())
    with pytest.warns(UserWarning, match="transports nothing in 1 of 2"):
        value = Uniformity(draws=1).start_round(local)(step_of(one, two))
    value.backward()
    assert float(value.detach()) == pytest.approx(0.14875, rel=1e-4)
    torch.testing.assert_close(one.grad, torch.tensor([[0.0, -0.01875]]), rtol=1e-2, atol=1e-6)
    assert torch.equal(two.grad, torch.zeros(1, 2))
    logged = local.logged()
    assert logged["uniformity_mass"] == pytest.approx(0.375 / 2, rel=1e-2)
    assert logged["uniformity_gap"] <= 1e-4
    assert logged["uniformity_iterations"] >= 1


@pytest.mark.parametrize(("cost", "tau"), [("cosine", 0.8), ("squared_distance", 2.0)])
def test_value_and_gradient_are_those_of_unbalanced_ot(cost, tau, monkeypatch):
    """The plan is solved for once and its gradient written by hand; at tau = 0.8 the printed cost moves no mass."""
    z, samples = (t[:16].clone() for t in representations("low rank"))
    z.requires_grad_()
    monkeypatch.setattr(uniformity, "sphere_samples", lambda *_: samples)
    part = Uniformity(cost=cost, draws=1, weight=1.0, tau_a=tau, tau_b=tau, tolerance=1e-8)
    value = part.start_round(local_round(scalar_model()))(step_of(z))
    unit = F.normalize(z, dim=1)
    costs = 1 - unit @ samples.T if cost == "cosine" else (unit.unsqueeze(1) - samples).square().sum(dim=2)
    truth = unbalanced_ot(costs, 1.0, 1.0, tau, tau, tol=1e-8)
    torch.testing.assert_close(value, truth)
    (gradient,), (expected,) = torch.autograd.grad(value, z), torch.autograd.grad(truth, z)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_fur_of_the_named_layer():
    encoded, projected = torch.randn(2, 1, 8, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    step = Step(torch.tensor(0.0), representations=(encoded[0],), projections=(projected[0],))
    for options, taken in (({"layer": "encoder"}, encoded), ({}, projected)):
        term = Uniformity(**options).start_round(local_round(scalar_model()))
        found = torch.autograd.grad(term(step), [encoded, projected], allow_unused=True)
        assert [gradient is not None for gradient in found] == [taken is encoded, taken is projected]


def test_several_draws_are_averaged(monkeypatch):
    """Value and gradient are the means of those of each draw alone."""
    z, samples = (t[:16, :8].clone() for t in representations("random"))
    draws = [F.normalize(part, dim=1) for part in (samples[:8], samples[8:])]
    z = F.normalize(z[:8], dim=1).requires_grad_()

    def term(drawn, draws):
        monkeypatch.setattr(uniformity, "sphere_samples", lambda rows, *_: drawn if len(drawn) == rows else None)
        value = Uniformity(draws=draws, tolerance=1e-9).start_round(local_round(scalar_model()))(step_of(z, -z))
        return torch.stack([value, *torch.autograd.grad(value, z)[0].flatten()])

    both = term(torch.cat(draws), draws=2)
    torch.testing.assert_close(both, (term(draws[0], 1) + term(draws[1], 1)) / 2, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("kind", "moved"), [("random", 0.44), ("low rank", 0.43), ("collapsed", 0.37)])
def test_as_printed_it_does_nothing_and_as_it_is_here_it_moves_mass(kind, moved):
    z, samples = representations(kind)
    z.requires_grad_()
    printed = torch.cdist(z, samples).square()
    assert float(printed.detach().mean()) == pytest.approx(2, abs=0.05)
    assert float(printed.detach().std()) == pytest.approx(0.088, abs=0.008)  # 2 / sqrt(512)
    for mass in (1.0, 1 / 128):
        with pytest.warns(UserWarning, match="transports nothing"):
            value = unbalanced_ot(printed, mass, mass, 0.8, 0.8)
        assert float(value.detach()) == pytest.approx(0.8 * 128 * mass**2)  # only what stays unmatched
        (gradient,) = torch.autograd.grad(value, z, retain_graph=True)
        assert torch.equal(gradient, torch.zeros_like(gradient))
    _, info = unbalanced_ot_plan((1 - z @ samples.T).detach(), 1.0, 1.0, 0.8, 0.8)
    assert float(info.transported_mass) / 128 == pytest.approx(moved, abs=0.01)


def test_samples_are_on_the_sphere_and_new_for_each_step():
    samples = sphere_samples(2000, 3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(samples.norm(dim=1), torch.ones(2000))
    torch.testing.assert_close(samples.T @ samples / 2000, torch.eye(3) / 3, rtol=0, atol=0.03)
    z, _ = representations("random")
    for term in (
        Uniformity().start_round(local_round(scalar_model())),
        SlicedUniformity().start_round(local_round(scalar_model())),
    ):
        assert term(step_of(z[:8])) != term(step_of(z[:8]))


@pytest.mark.parametrize("term", [Uniformity(), SlicedUniformity()])
def test_samples_are_drawn_on_the_models_device(term, monkeypatch):
    """On a GPU that is not here; what is drawn there is noted, and drawn on the CPU."""
    gpu, drawn, draw = torch.device("cuda", 1), [], torch.randn
    client = SimpleNamespace(index=0, model=SimpleNamespace(device=gpu))
    local = LocalRound(client, Message(), 1, 0, None, None)
    generator = lambda device: SimpleNamespace(manual_seed=lambda _: SimpleNamespace(device=device))  # noqa: E731
    monkeypatch.setattr(torch, "Generator", generator)
    monkeypatch.setattr(torch, "randn", lambda *size, generator, device: drawn.append(device) or draw(*size))
    assert term.start_round(local)(step_of(draw(8, 6))).isfinite()
    assert set(drawn) == {gpu}


def released_term(points, samples, base, direction):
    """The released term in float64, one tangent space after the other.

    The logarithms of samples and points are (angle / |u|) u with u = z - <z, t> t. Their products with Gaussian
    directions are sorted; the sum over the tangent spaces of the mean squared differences is divided by 6.
    """
    total = 0.0
    for t, directions in zip(base.double(), direction.double(), strict=True):
        values = []
        for z in (points.double(), samples.double()):
            cosine = (z @ t).unsqueeze(1)
            logarithm = torch.acos(cosine) * F.normalize(z - cosine * t, dim=1)
            values.append((logarithm @ directions.T).sort(dim=0).values)
        total += float((values[0] - values[1]).square().mean())
    return total / 6


def test_the_sliced_term_is_the_released_one(monkeypatch):
    """Two views of 5 images in 4 dimensions, weight 0.01, beside the released formula in float64."""
    generator = torch.Generator().manual_seed(3)
    samples, base = (F.normalize(torch.randn(5, 4, generator=generator), dim=1) for _ in range(2))
    direction = torch.randn(5, 6, 4, generator=generator)
    views = [torch.randn(5, 4, generator=generator) for _ in range(2)]
    drawn = iter([samples, base])
    monkeypatch.setattr(sliced_uniformity, "sphere_samples", lambda *_: next(drawn))
    monkeypatch.setattr(torch, "randn", lambda *size, generator, device: direction if size == (5, 6, 4) else None)
    local = local_round(scalar_model())
    value = SlicedUniformity().start_round(local)(step_of(*views))
    expected = [released_term(F.normalize(view, dim=1), samples, base, direction) for view in views]
    assert float(value) == pytest.approx(0.01 * sum(expected), rel=1e-5)
    assert local.logged() == {"sliced_distance": pytest.approx(sum(expected) / 2, rel=1e-5)}


def test_the_gradient_of_the_sliced_distance_is_finite_at_the_base_and_opposite_to_it():
    base = torch.tensor([[1.0, 0.0, 0.0]])
    z = torch.cat([base, -base]).requires_grad_()
    distance = sliced_distance(z, F.normalize(torch.ones(2, 3), dim=1), base, torch.tensor([[[0.0, 1.0, 0.0]]]))
    distance.sum().backward()
    assert z.grad.isfinite().all()
