"""Hetero-SSFL's term, which aligns a client to the mean kernel, and its control on public images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedssl.aggregators.representation_mean import FACTOR, KERNEL
from fedssl.client import Client, LocalRound
from fedssl.data.pixels import normalize
from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.objectives.base import Step
from fedssl.regularizers.cka_alignment import CKAAlignment
from tests.fedssl.conftest import ALIGNED
from tests.fedssl.rounds_in_memory import train_rounds

NO_STEP = Step(torch.tensor(0.0), ())


def federation_of(tiny: Any, **options: Any) -> Federation:
    return build_federation(tiny(**{**ALIGNED, "aggregators": [{"name": "representation_mean"} | options]}))


def opened(federation: Federation) -> tuple[list[Client], Message, list[LocalRound]]:
    """The clients after the opening round, the server's state, and what each of them has when round 1 begins."""
    method = federation.method
    clients = [federation.client(k, Message()) for k in range(3)]
    server = method.aggregate(
        method.initial_state(), {c.index: method.client_round(c, Message(), 0) for c in clients}, 0
    )
    sent = method.broadcast(server, [0, 1, 2], 1)
    locals_ = [LocalRound(c, sent[c.index], 1, 0, method.objective, method.augmentation) for c in clients]
    return clients, server, locals_


@pytest.mark.parametrize(
    ("kernel", "layer", "centered"),
    [
        ("linear", "encoder", True),
        ("frobenius", "predictor", False),
        ("half_whitened", "encoder", False),
        ("half_whitened", "predictor", True),
    ],
)
def test_factor_and_kernel_give_the_same_term_and_gradient(kernel, layer, centered, tiny):
    """What travels must not change what is learned."""
    terms, gradients = [], []
    for send in ("factor", "kernel"):
        federation = federation_of(tiny, kernel=kernel, layer=layer, centered=centered, send=send)
        clients, _, locals_ = opened(federation)
        assert list(locals_[1].received.tensors) == [FACTOR if send == "factor" else KERNEL]
        clients[1].model.train()
        term = federation.method.regularizers[0].start_round(locals_[1])(NO_STEP)
        term.backward()
        terms.append(term.detach())
        gradients.append([p.grad for p in clients[1].model.parameters() if p.grad is not None])
    torch.testing.assert_close(terms[0], terms[1], atol=1e-5, rtol=1e-5)
    assert len(gradients[0]) == len(gradients[1]) > 0
    scale = max(float(g.abs().max()) for g in gradients[0])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one / scale, other / scale, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("centered", [False, True])
def test_the_term_is_mu_times_one_minus_eq_1(centered, tiny):
    """All 30 public images in one batch, a network in evaluation mode: the term by hand from the definition."""
    clients, server, locals_ = opened(federation_of(tiny, layer="encoder", centered=centered))
    term = CKAAlignment(weight=0.7, batch_size=30).start_round(locals_[0])(NO_STEP)
    own = clients[0].model.represent(normalize(clients[0].public_images), "encoder").double().detach()
    if centered:
        own = own - own.mean(dim=0)
    a, b = own @ own.T, sum(t.double() @ t.double().T for t in server.tensors.values()) / 3
    cka = float((a * b).sum() / (a.norm() * b.norm()))
    assert float(term.detach()) == pytest.approx(0.7 * (1 - cka), abs=1e-5)
    assert locals_[0].logged()["cka"] == pytest.approx(cka, abs=1e-5)


def test_alignment_raises_cka_and_the_printed_sign_would_not(tiny):
    """The paper prints + mu CKA; a client that minimises our term ends closer to the mean kernel than without."""
    reached = {}
    for weight in (0.0, 20.0):
        regularizer = {"name": "cka_alignment", "weight": weight, "batch_size": 30}
        replies = train_rounds(build_federation(tiny(**{**ALIGNED, "regularizers": [regularizer]})), 4).replies[4]
        reached[weight] = sum(reply.metrics["cka"] for reply in replies.values()) / 3
    assert reached[20.0] > reached[0.0] + 0.02


@pytest.mark.parametrize(("kernel", "centered"), [("linear", True), ("half_whitened", False)])
def test_with_running_statistics_the_cka_with_ones_own_kernel_is_one(kernel, centered, tiny):
    """With unchanged weights, in training mode, on a mini-batch of the public images."""
    clients, _, locals_ = opened(federation_of(tiny, layer="encoder", target="self", kernel=kernel, centered=centered))
    values = {}
    for statistics in ("running", "batch"):
        clients[0].model.train()
        size = 30 if centered else 12  # columns are centred over all 30 images
        term = CKAAlignment(batch_size=size, statistics=statistics).start_round(locals_[0])
        values[statistics] = 1 - float(term(NO_STEP).detach()) / 0.5
        assert all(module.training for module in clients[0].model.modules())
    assert values["running"] == pytest.approx(1.0, abs=1e-5)
    assert values["batch"] < 1 - 1e-4  # the kernel is computed with running statistics


@pytest.mark.parametrize(
    "part",
    [
        {"name": "cka_alignment", "statistics": "batch"},
        {"name": "cka_alignment", "statistics": "running"},
        {"name": "public_objective"},
    ],
)
def test_public_images_leave_no_trace_in_the_running_statistics(part, tiny):
    """With weight 0 a client ends with the very model, buffers included, of a round without the term."""
    ends = []
    for regularizers in ([part | {"weight": 0.0, "batch_size": 12}], []):
        aggregators = ALIGNED["aggregators"] if regularizers and "statistics" in part else []
        federation = build_federation(tiny(**{**ALIGNED, "regularizers": regularizers, "aggregators": aggregators}))
        ends.append(train_rounds(federation, 1, clients=[0]).clients[0].tensors)
    names = [name for name in ends[1] if name.startswith("model/")]
    assert any("running_mean" in name for name in names)
    for name in names:
        assert torch.equal(ends[0][name], ends[1][name]), name
