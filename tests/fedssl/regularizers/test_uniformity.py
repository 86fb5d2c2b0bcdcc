"""FUR, and why it does nothing as printed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fedkernels import unbalanced_ot, unbalanced_ot_plan
from fedssl.client import LocalRound
from fedssl.errors import UserError
from fedssl.evaluation.metrics import effective_rank
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.objectives.base import Step
from fedssl.regularizers import uniformity
from fedssl.regularizers.sliced_uniformity import SlicedUniformity
from fedssl.regularizers.uniformity import Uniformity, sphere_samples
from tests.fedssl.regularizers.terms import Local, representations, step_of

FUR = {"name": "uniformity"}
ONE_DRAW = FUR | {"draws": 1}


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
    local = Local()
    with pytest.warns(UserWarning, match="transports nothing in 1 of 2"):
        value = Uniformity(**ONE_DRAW).start_round(local)(step_of(one, two))
    value.backward()
    assert float(value.detach()) == pytest.approx(0.14875, rel=1e-4)
    torch.testing.assert_close(one.grad, torch.tensor([[0.0, -0.01875]]), rtol=1e-2, atol=1e-6)
    assert torch.equal(two.grad, torch.zeros(1, 2))
    assert local.logged["uniformity_mass"] == [pytest.approx(0.375 / 2, rel=1e-2)]
    assert local.logged["uniformity_gap"][0] <= 1e-4
    assert local.logged["uniformity_iterations"][0] >= 1


def test_fur_of_the_named_layer():
    encoded, projected = torch.randn(2, 1, 8, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    step = Step(torch.tensor(0.0), representations=(encoded[0],), projections=(projected[0],))
    for layer, taken in (("encoder", encoded), ("projector", projected)):
        term = Uniformity(**FUR, layer=layer).start_round(Local())
        found = torch.autograd.grad(term(step), [encoded, projected], allow_unused=True)
        assert [gradient is not None for gradient in found] == [taken is encoded, taken is projected]


def test_by_default_fur_is_of_the_projector_and_of_several_draws():
    """An encoder that ends in a ReLU cannot cover the sphere, and most of one draw's gradient is noise."""
    assert Uniformity(**FUR).layer == "projector"
    assert Uniformity(**FUR).draws == 8


def test_fur_of_a_layer_that_is_not_there(tiny):
    with pytest.raises(UserError, match="uniformity's layer is projector"):
        build_federation(tiny(objective={"name": "supervised"}, regularizers=[FUR]))


def test_several_draws_are_averaged(monkeypatch):
    """Value and gradient are the means of those of each draw alone."""
    z, samples = (t[:16, :8].clone() for t in representations("random"))
    draws = [F.normalize(part, dim=1) for part in (samples[:8], samples[8:])]
    z = F.normalize(z[:8], dim=1).requires_grad_()

    def term(drawn, **options):
        monkeypatch.setattr(uniformity, "sphere_samples", lambda rows, *_: drawn if len(drawn) == rows else None)
        value = Uniformity(**FUR | {"draws": 1, "tolerance": 1e-9} | options).start_round(Local())(step_of(z, -z))
        return torch.stack([value, *torch.autograd.grad(value, z)[0].flatten()])

    both = term(torch.cat(draws), draws=2)
    torch.testing.assert_close(both, (term(draws[0]) + term(draws[1])) / 2, rtol=1e-3, atol=1e-6)


def test_the_mean_over_the_batch_does_not_depend_on_its_size(monkeypatch):
    """One image and the same image four times, each with its own copy of the one sample: plan and cost repeat."""
    monkeypatch.setattr(uniformity, "sphere_samples", lambda rows, *_: torch.eye(8)[:rows])
    values = {}
    for rows in (1, 4):
        z = torch.eye(8)[:rows] + 0.1 * torch.eye(8)[4 : 4 + rows]
        for reduction in ("sum", "mean"):
            term = Uniformity(**ONE_DRAW, tolerance=1e-8, reduction=reduction).start_round(Local())
            values[rows, reduction] = float(term(step_of(z)))
    assert values[1, "mean"] == pytest.approx(values[4, "mean"], rel=1e-4) == pytest.approx(values[1, "sum"])
    assert values[4, "sum"] == pytest.approx(4 * values[4, "mean"])


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


def test_a_collapsed_batch_is_dispersed():
    """Free points, moved against the gradient alone: their mean cosine falls and their effective rank rises."""
    generator = torch.Generator().manual_seed(1)
    line = torch.randn(1, 32, generator=generator)
    z = torch.randn(1, 32, generator=generator) + 0.3 * torch.randn(24, 1, generator=generator) * line
    z = F.normalize(z, dim=1).requires_grad_()

    def mean_cosine():
        unit = F.normalize(z.detach(), dim=1)
        return float((unit @ unit.T).mean())

    before, rank_before = mean_cosine(), effective_rank(z)
    term = Uniformity(**FUR, weight=1.0).start_round(Local())
    for _ in range(60):
        z.grad = None
        term(step_of(z)).backward()
        with torch.no_grad():
            z -= 0.5 * z.grad
    assert before > 0.8
    assert mean_cosine() < 0.5
    assert rank_before < 1.5
    assert effective_rank(z) > 5


def test_the_gradient_is_that_of_unbalanced_ot():
    """The plan is solved for once and its gradient written by hand."""
    z, samples = (t[:16] for t in representations("low rank"))
    z = z.clone().requires_grad_()
    patched = SimpleNamespace(start=uniformity.sphere_samples)
    uniformity.sphere_samples = lambda *_: samples
    try:
        value = Uniformity(**ONE_DRAW, weight=1.0, tolerance=1e-8).start_round(Local())(step_of(z))
    finally:
        uniformity.sphere_samples = patched.start
    (gradient,) = torch.autograd.grad(value, z)
    truth = unbalanced_ot(1 - F.normalize(z, dim=1) @ samples.T, 1.0, 1.0, 0.8, 0.8, tol=1e-8)
    (expected,) = torch.autograd.grad(truth, z)
    torch.testing.assert_close(value, truth)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_samples_are_on_the_sphere_and_new_for_each_step():
    samples = sphere_samples(2000, 3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(samples.norm(dim=1), torch.ones(2000))
    torch.testing.assert_close(samples.T @ samples / 2000, torch.eye(3) / 3, rtol=0, atol=0.03)
    term = Uniformity(**FUR).start_round(Local())
    z, _ = representations("random")
    assert term(step_of(z[:8])) != term(step_of(z[:8]))


@pytest.mark.parametrize("term", [Uniformity(**FUR), SlicedUniformity(name="sliced_uniformity")])
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


def test_both_terms_take_the_views_that_there_are(tiny):
    """Symmetric BYOL has two online views, one-directed BYOL one."""
    for symmetric, views in ((True, 2), (False, 1)):
        objective = {"name": "byol", "hidden_features": 32, "output_features": 16, "symmetric": symmetric}
        federation = build_federation(tiny(objective=objective, regularizers=[FUR, {"name": "sliced_uniformity"}]))
        method, generator = federation.method, torch.Generator().manual_seed(0)
        images = tuple(torch.randn(4, 1, 8, 8, generator=generator) for _ in range(2))
        step = method.objective.step(federation.new_model(0), images, torch.zeros(4))
        assert len(step.representations) == views
        for regularizer in method.regularizers:
            assert regularizer.start_round(Local())(step).isfinite()
