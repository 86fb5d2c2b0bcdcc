"""Terms of one batch and of public images: by hand, and against their definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedkernels import nt_xent
from fedssl.aggregators.dictionary import DICTIONARY
from fedssl.aggregators.representation_mean import FACTOR, KERNEL
from fedssl.client import Client, LocalRound
from fedssl.data.pixels import normalize
from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.objectives.base import Step
from fedssl.objectives.fedx import FedX
from fedssl.objectives.simclr import SimCLR
from fedssl.regularizers.cka_alignment import CKAAlignment
from fedssl.regularizers.decorrelation import Decorrelation, decorrelation_loss
from fedssl.regularizers.dictionary_contrast import DictionaryContrast, added_negatives
from fedssl.regularizers.global_distillation import GlobalDistillation
from fedssl.regularizers.relational_distillation import RelationalDistillation, relational_loss
from tests.fedssl.conftest import ALIGNED
from tests.fedssl.rounds_in_memory import train_rounds
from tests.fedssl.small_models import E1, E2, FIRST_TWO, SWAPPED, THREE, flat_model, local_round, scalar_model

# The terms of FedDecorr, FedCA and FedX

SIX_IMAGES = torch.randint(0, 255, (6, 1, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


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
    term = Decorrelation(weight=0.1).start_round(local)
    assert float(term(Step(torch.tensor(0.0), (together, apart)))) == pytest.approx(0.1 * (4 / 3) / 2)
    assert local.logged()["mean_squared_correlation"] == pytest.approx(0.5)


def test_the_dictionary_adds_negatives():
    """One image, both views e1: its only other row is the positive, weight 3 at THREE. A dictionary (e1, e2) adds
    3 + 1: ln(3 + 4) - ln 3. With the objective, whose loss is 0 here, that is -ln(3 / 7).
    """
    dictionary = torch.stack([E1, E2])
    assert float(added_negatives(E1[None], E1[None], dictionary, THREE)) == pytest.approx(math.log(7 / 3))
    step = Step(torch.tensor(0.0), (), (E1[None], 4 * E1[None]))
    part, objective = DictionaryContrast(weight=0.5), SimCLR(temperature=THREE)
    term = part.start_round(local_round(scalar_model(), Message({DICTIONARY: dictionary}), objective=objective))
    assert float(term(step)) == pytest.approx(0.5 * math.log(7 / 3))
    assert float(part.start_round(local_round(scalar_model()))(step)) == 0  # the first round has no dictionary


def test_with_a_dictionary_the_sum_is_the_loss_with_all_negatives():
    torch.manual_seed(0)
    first, second, dictionary = (nn.functional.normalize(torch.randn(n, 5), dim=1) for n in (4, 4, 7))
    rows = torch.cat([first, second])
    logits = torch.cat([rows @ rows.T, rows @ dictionary.T], dim=1) / 0.3
    logits[torch.arange(8), torch.arange(8)] = -torch.inf
    expected = nn.functional.cross_entropy(logits, torch.tensor([4, 5, 6, 7, 0, 1, 2, 3]))
    total = nt_xent(first, second, 0.3) + added_negatives(first, second, dictionary, 0.3)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize(("arrived", "expected"), [(FIRST_TWO, math.log(5 / 3)), (SWAPPED, math.log(5))])
def test_global_distillation_compares_with_the_model_that_arrived(arrived, expected):
    """Two images with predictions e1, e2 and, under the arrived projector, second views e1, e2: each row has its
    positive at cosine 1 and two others at 0, so the loss is ln(3 + 1 + 1) - ln 3. The second client received the
    swapped projector: positives at 0, one other at 1: ln(1 + 3 + 1) - ln 1. Neither client's own projector matters.
    """
    views, predictions = torch.eye(4)[:2].reshape(2, 1, 2, 2), torch.stack([E1, E2])
    model = flat_model(((9.0, 8.0, 7.0, 6.0), (5.0, 4.0, 3.0, 2.0)))
    received = Message({"online.projector.weight": torch.tensor(arrived)})
    local = local_round(model, received, images=SIX_IMAGES, objective=FedX())
    term = GlobalDistillation(weight=2.0, temperature=THREE, batch_size=4).start_round(local)
    total = float(term(Step(torch.tensor(0.0), (), (), (predictions, predictions), views=(views, views))))
    assert local.logged()["global_contrastive_loss"] == pytest.approx(expected, rel=1e-5)
    assert local.logged()["global_relational_loss"] == pytest.approx(0.0, abs=1e-6)  # both predictions agree
    assert total == pytest.approx(2 * expected, rel=1e-5)
    assert model.online["projector"].weight[0, 0] == 9.0


def test_relational_loss_of_two_clients():
    """At THREE, e1 over the others (e1, e2) gives (3, 1) / 4, e2 gives (1, 3) / 4; their mixture is (1, 1) / 2.

    Client a's views are e1 and e2: 3/4 ln(3/2) + 1/4 ln(1/2). Client b's agree: 0.
    """
    others = torch.stack([5 * E1, E2])  # lengths do not matter
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(relational_loss(E1[None], 2 * E2[None], others, THREE)) == pytest.approx(expected)
    assert float(relational_loss(E1[None], 3 * E1[None], others, THREE)) == pytest.approx(0.0, abs=1e-7)
    both = relational_loss(torch.stack([E1, E1]), torch.stack([E2, E1]), others, THREE)
    assert float(both) == pytest.approx(expected / 2)


def test_relational_distillation_trains_the_network():
    model = flat_model(FIRST_TWO)
    local = local_round(model, images=SIX_IMAGES, objective=FedX())
    term = RelationalDistillation(batch_size=4).start_round(local)
    loss = term(Step(torch.tensor(0.0), (), tuple(model.online["projector"](v) for v in torch.rand(2, 3, 1, 2, 2))))
    loss.backward()
    assert local.logged()["local_relational_loss"] == pytest.approx(float(loss.detach()))
    assert model.online["projector"].weight.grad.abs().sum() > 0


# Hetero-SSFL's term and its control on public images

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
