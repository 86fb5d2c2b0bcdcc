"""Hetero-SSFL's own parts: the mean kernel on the server and the term that aligns a client to it."""

from __future__ import annotations

import pytest
import torch

from fedssl.aggregators.representation_mean import (
    FACTOR,
    KERNEL,
    RepresentationMean,
    canonical_factor,
    join_factors,
    whitening_matrix,
)
from fedssl.client import LocalRound
from fedssl.data.pixels import normalize
from fedssl.engines.in_process import run
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.objectives.base import Step
from fedssl.objectives.byol import BYOL
from fedssl.regularizers.cka_alignment import CKAAlignment
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED

NAME = {"name": "representation_mean"}
NO_STEP = Step(torch.tensor(0.0), ())


def kernels_of(server: Message) -> list[torch.Tensor]:
    names = sorted(server.tensors)
    return [server.tensors[n].double() @ server.tensors[n].double().T for n in names]


def cka(a: torch.Tensor, b: torch.Tensor) -> float:
    """Between two kernels, straight from the paper's Eq. 1."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def state_of(*sizes: tuple[int, int]) -> Message:
    torch.manual_seed(0)
    return Message({f"representation.{k}": torch.randn(size) for k, size in enumerate(sizes)})


def test_the_factor_is_a_factor_of_the_weighted_mean_kernel():
    server = state_of((20, 3), (20, 5))
    part = RepresentationMean(**NAME, weights=[1.0, 3.0])
    message = part.broadcast(server, [0, 1], [])[0]
    factor = message.tensors[FACTOR].double()
    k0, k1 = kernels_of(server)
    assert factor.shape == (20, 8)
    torch.testing.assert_close(factor @ factor.T, 0.25 * k0 + 0.75 * k1, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [((20, 3), (20, 5)), ((20, 6),)], ids=["two clients", "one has answered"])
def test_a_factor_tells_nothing_that_the_mean_kernel_does_not(sizes):
    """Clients whose representations are rotated have the same kernels: what is sent is the same."""
    part = RepresentationMean(**NAME)
    server, rotated = state_of(*sizes), Message()
    for name, a in server.tensors.items():
        rotation = torch.linalg.qr(torch.randn(a.shape[1], a.shape[1], dtype=torch.float64)).Q
        server.tensors[name], rotated.tensors[name] = a.double(), a.double() @ rotation
    sent, sent_rotated = (part.broadcast(state, [0], [])[0].tensors[FACTOR] for state in (server, rotated))
    torch.testing.assert_close(sent, sent_rotated, atol=1e-13, rtol=0)
    columns = torch.cat(list(server.tensors.values()), dim=1)
    assert torch.cdist(sent.T, columns.T).min() > 0.1  # no client's own column


@pytest.mark.parametrize("rank", [0, 1, 4, 7])
def test_the_canonical_factor_has_no_more_columns_than_the_rank(rank):
    """The others would hold rounding errors, which depend on the clients' representations."""
    torch.manual_seed(0)
    factor = torch.randn(12, rank) @ torch.randn(rank, 7)
    result = canonical_factor(factor)
    assert result.shape == factor.shape
    assert result.any(dim=0).tolist() == [True] * rank + [False] * (7 - rank)
    torch.testing.assert_close(result @ result.T, factor @ factor.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("sizes", "sent"), [(((9, 4), (9, 4)), FACTOR), (((8, 4), (8, 4)), KERNEL)])
def test_what_is_smaller_is_sent(sizes, sent):
    assert list(RepresentationMean(**NAME).broadcast(state_of(*sizes), [0], [])[0].tensors) == [sent]


def test_self_sends_the_clients_own_kernel():
    server = state_of((20, 3), (20, 5))
    sent = RepresentationMean(**NAME, target="self").broadcast(server, [0, 1], [])
    for k in (0, 1):
        assert torch.equal(sent[k].tensors[FACTOR], server.tensors[f"representation.{k}"])


def test_untrained_kernels_are_never_renewed_and_peers_are():
    old, new = state_of((6, 2)), Message({"representation.0": torch.ones(6, 2)})
    assert RepresentationMean(**NAME, target="untrained").aggregate(old, {0: new}).tensors == {}
    assert (
        RepresentationMean(**NAME, target="untrained").aggregate(Message(), {0: new}).tensors.keys()
        == new.tensors.keys()
    )
    assert RepresentationMean(**NAME).aggregate(old, {0: new}).tensors["representation.0"].sum() == 12


def test_half_whitening_gives_the_square_root_of_the_kernel():
    torch.manual_seed(0)
    a = torch.randn(30, 6, dtype=torch.float64) @ torch.diag(torch.tensor([10.0, 5, 1, 1, 0.1, 0])).double()
    root = a @ whitening_matrix(a)
    kernel = root @ root.T
    torch.testing.assert_close(kernel @ kernel, a @ a.T, atol=1e-6, rtol=1e-6)


def test_join_factors_with_a_weight_of_zero_leaves_that_client_out():
    a, b = torch.randn(5, 2), torch.randn(5, 3)
    f = join_factors([a, b], [0.0, 1.0])
    torch.testing.assert_close(f @ f.T, b @ b.T)


@pytest.mark.parametrize("kernel", ["linear", "frobenius", "half_whitened"])
@pytest.mark.parametrize("layer", ["encoder", "predictor"])
@pytest.mark.parametrize("centered", [False, True])
def test_factor_and_kernel_give_the_same_term_and_gradient(kernel, layer, centered, tiny):
    """What travels must not change what is learned."""
    terms, gradients = [], []
    for send in ("factor", "kernel"):
        part = {**NAME, "kernel": kernel, "layer": layer, "centered": centered, "send": send}
        federation = build_federation(tiny(**{**ALIGNED, "aggregators": [part]}))
        method = federation.method
        clients = [federation.client(k, Message()) for k in range(3)]
        replies = {c.index: method.client_round(c, Message(), 0) for c in clients}
        server = method.aggregate(method.initial_state(), replies, 0)
        received = method.broadcast(server, [0, 1, 2], 1)[1]
        assert list(received.tensors) == [FACTOR if send == "factor" else KERNEL]
        local = LocalRound(clients[1], received, 1, 0, method.objective, method.augmentation)
        clients[1].model.train()
        term = method.regularizers[0].start_round(local)(NO_STEP)
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
    part = {**NAME, "layer": "encoder", "centered": centered}
    federation = build_federation(tiny(**{**ALIGNED, "aggregators": [part]}))
    method = federation.method
    clients = [federation.client(k, Message()) for k in range(3)]
    replies = {c.index: method.client_round(c, Message(), 0) for c in clients}
    server = method.aggregate(method.initial_state(), replies, 0)
    local = LocalRound(clients[0], method.broadcast(server, [0], 1)[0], 1, 0, method.objective, method.augmentation)
    term = CKAAlignment(name="cka_alignment", weight=0.7, batch_size=30).start_round(local)(NO_STEP)
    own = clients[0].model.represent(normalize(clients[0].public_images), "encoder").double().detach()
    if centered:
        own = own - own.mean(dim=0)
    target = sum(kernels_of(server)) / 3
    assert float(term.detach()) == pytest.approx(0.7 * (1 - cka(own @ own.T, target)), abs=1e-5)
    assert local.logged()["cka"] == pytest.approx(cka(own @ own.T, target), abs=1e-5)


def test_alignment_raises_cka_and_the_printed_sign_would_not(tiny, tmp_path):
    """The paper prints + mu CKA; a client that minimises our term ends closer to the mean kernel than without."""
    values = {}
    for weight in (0.0, 20.0):
        regularizer = {"name": "cka_alignment", "weight": weight, "batch_size": 30}
        recipe = tiny(**{**ALIGNED, "regularizers": [regularizer], "rounds": 6})
        path = tmp_path / str(weight)
        run(recipe, path)
        rows = RunDirectory.open(path).read_metrics()
        values[weight] = next(v for r, who, m, v in rows if m == "cka" and who == "mean" and r == 6)
    assert values[20.0] > values[0.0] + 0.02


def test_the_opening_round_collects_from_everybody_before_training(tiny, tmp_path):
    recipe = tiny(**ALIGNED, clients_per_round=1, rounds=1)
    run(recipe, tmp_path / "a")
    server = RunDirectory.open(tmp_path / "a").server_state()
    assert sorted(server.tensors) == [f"representation.{k}" for k in range(3)]
    federation = build_federation(recipe)
    idle = next(k for k in range(3) if k not in federation.sampled_clients(1))
    expected = federation.method.client_round(federation.client(idle, Message()), Message(), 0)
    assert torch.equal(server.tensors[f"representation.{idle}"], expected.tensors[f"representation.{idle}"])


def test_no_image_and_no_label_leaves_a_client(tiny):
    federation = build_federation(tiny(**ALIGNED))
    client = federation.client(0, Message())
    reply = federation.method.client_round(client, Message(), 0)
    assert reply.tensors.keys() == {"representation.0"}
    assert reply.tensors["representation.0"].shape == (30, 16)


def test_byol_by_hand():
    """Two images, identity networks: the loss is the mean of 2 - 2 cos over both directions."""
    objective = BYOL(name="byol", hidden_features=4, output_features=2)

    class Flat(torch.nn.Module):
        num_features = 2

        def forward(self, x):
            return x.flatten(1)

    model = objective.build(Flat(), 2)
    for network in (model.online, model.target):
        for name in list(network):
            network[name] = Flat()
    view1 = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).reshape(2, 1, 1, 2)
    view2 = torch.tensor([[0.0, 3.0], [0.0, 1.0]]).reshape(2, 1, 1, 2)
    # cosines of the two pairs: 0 and 1, so the losses are 2 and 0 in either direction
    step = objective.step(model, (view1, view2), torch.zeros(2))
    assert float(step.loss) == pytest.approx(1.0)
    one_way = BYOL(name="byol", symmetric=False).step(model, (view1, view2), torch.zeros(2))
    assert float(one_way.loss) == pytest.approx(1.0)
    assert len(one_way.predictions) == 1


def test_the_byol_target_moves_by_its_momentum_and_takes_no_gradient():
    class Linear(torch.nn.Linear):
        num_features = 3

    objective = BYOL(name="byol", hidden_features=4, output_features=2, target_momentum=0.9)
    model = objective.build(Linear(4, 3), 2)
    before = {n: p.clone() for n, p in model.target.named_parameters()}
    with torch.no_grad():
        for p in model.online.parameters():
            p.add_(1.0)
    objective.after_step(model)
    for name, p in model.target.named_parameters():
        torch.testing.assert_close(p, before[name] + 0.1)
        assert not p.requires_grad


@pytest.mark.parametrize("kernel", ["linear", "half_whitened"])
@pytest.mark.parametrize("centered", [False, True])
def test_with_running_statistics_the_cka_with_ones_own_kernel_is_one(kernel, centered, tiny):
    """With unchanged weights, in training mode, on a mini-batch of the public images."""
    part = {**NAME, "layer": "encoder", "target": "self", "kernel": kernel, "centered": centered}
    federation = build_federation(tiny(**{**ALIGNED, "aggregators": [part]}))
    method, client = federation.method, federation.client(0, Message())
    server = method.aggregate(method.initial_state(), {0: method.client_round(client, Message(), 0)}, 0)
    local = LocalRound(client, method.broadcast(server, [0], 1)[0], 1, 0, method.objective, method.augmentation)
    values = {}
    for statistics in ("running", "batch"):
        client.model.train()
        size = 30 if centered else 12  # columns are centred over all 30 images
        term = CKAAlignment(name="cka_alignment", batch_size=size, statistics=statistics).start_round(local)
        values[statistics] = 1 - float(term(NO_STEP).detach()) / 0.5
        assert client.model.training
        assert all(module.training for module in client.model.modules())
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
        method, client = federation.method, federation.client(0, Message())
        server = method.aggregate(method.initial_state(), {0: method.client_round(client, Message(), 0)}, 0)
        method.client_round(client, method.broadcast(server, [0], 1)[0], 1)
        ends.append(client.model.state_dict())
    assert any("running_mean" in entry for entry in ends[0])
    for entry, value in ends[0].items():
        assert torch.equal(value, ends[1][entry]), entry


def test_kernels_by_the_batch_are_those_of_training_mode_and_leave_the_running_statistics(tiny):
    federation = build_federation(tiny(**{**ALIGNED, "aggregators": [NAME | {"statistics": "batch"}]}))
    client = federation.client(0, Message())
    before = {name: value.clone() for name, value in client.model.state_dict().items()}
    reply = federation.method.client_round(client, Message(), 0)
    for name, value in client.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    expected = client.model.train().represent(normalize(client.public_images), "predictor")
    torch.testing.assert_close(reply.tensors["representation.0"], expected.detach())
    part = federation.method.aggregators[0]
    other = part.model_copy(update={"statistics": "running"})
    local = LocalRound(client, Message(), 0, 0, federation.method.objective, federation.method.augmentation)
    assert not torch.allclose(other.collect(local, []).tensors["representation.0"], expected.detach(), atol=1e-3)
    one_left_over = part.model_copy(update={"batch_size": 29})  # of 30 images
    assert one_left_over.collect(local, []).tensors["representation.0"].isfinite().all()
