"""Hetero-SSFL's mean kernel: what it is, in which form it is sent, and what each client sends for it."""

from __future__ import annotations

import pytest
import torch

from fedssl.aggregators.representation_mean import (
    FACTOR,
    KERNEL,
    RepresentationMean,
    canonical_factor,
    whitening_matrix,
)
from fedssl.client import LocalRound
from fedssl.data.pixels import normalize
from fedssl.engines.in_process import run
from fedssl.federation import build_federation
from fedssl.messages import Message
from tests.fedssl.conftest import ALIGNED


def kernel_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() @ tensor.double().T


def state_of(*sizes: tuple[int, int]) -> Message:
    torch.manual_seed(0)
    return Message({f"representation.{k}": torch.randn(size) for k, size in enumerate(sizes)})


def sent_by(part: RepresentationMean, server: Message, client: int = 0) -> dict[str, torch.Tensor]:
    return part.broadcast(server, [0, 1], [])[client].tensors


@pytest.mark.parametrize("send", ["factor", "kernel"])
def test_what_is_sent_is_the_weighted_mean_kernel_or_a_factor_of_it(send):
    server = state_of((20, 3), (20, 5))
    [(name, sent)] = sent_by(RepresentationMean(weights=[1.0, 3.0], send=send), server).items()
    k0, k1 = map(kernel_of, server.tensors.values())
    assert sent.shape == ((20, 8) if send == "factor" else (20, 20))
    mean = kernel_of(sent) if name == FACTOR else sent.double()
    torch.testing.assert_close(mean, 0.25 * k0 + 0.75 * k1, atol=1e-5, rtol=1e-5)


def test_clients_that_have_not_answered_yet_shift_nobodys_weight():
    """Clients 1 and 3 of four have answered; their weights are 3 and 1, whatever the others' are."""
    server = Message({"representation.1": torch.eye(2)[:, :1], "representation.3": torch.eye(2)[:, 1:]})
    [sent] = sent_by(RepresentationMean(weights=[100.0, 3.0, 10.0, 1.0], send="kernel"), server).values()
    torch.testing.assert_close(sent.diagonal(), torch.tensor([0.75, 0.25]))


@pytest.mark.parametrize("sizes", [((20, 3), (20, 5)), ((20, 6),)], ids=["two clients", "one has answered"])
def test_a_factor_tells_nothing_that_the_mean_kernel_does_not(sizes):
    """Clients whose representations are rotated have the same kernels: what is sent is the same."""
    server, rotated = state_of(*sizes), Message()
    for name, a in server.tensors.items():
        rotation = torch.linalg.qr(torch.randn(a.shape[1], a.shape[1], dtype=torch.float64)).Q
        server.tensors[name], rotated.tensors[name] = a.double(), a.double() @ rotation
    sent, sent_rotated = (sent_by(RepresentationMean(), state)[FACTOR] for state in (server, rotated))
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


@pytest.mark.parametrize(("rows", "sent"), [(9, FACTOR), (8, KERNEL)])
def test_what_is_smaller_is_sent(rows, sent):
    assert list(sent_by(RepresentationMean(), state_of((rows, 4), (rows, 4)))) == [sent]


def test_the_controls_are_ones_own_kernel_and_those_of_untrained_networks():
    server, new = state_of((20, 3), (20, 5)), Message({"representation.0": torch.ones(20, 3)})
    for k in (0, 1):
        own = sent_by(RepresentationMean(target="self"), server, k)
        assert torch.equal(own[FACTOR], server.tensors[f"representation.{k}"])
    assert RepresentationMean(target="untrained").aggregate(server, {0: new}).tensors == {}
    assert RepresentationMean(target="untrained").aggregate(Message(), {0: new}).tensors.keys() == new.tensors.keys()
    assert RepresentationMean().aggregate(server, {0: new}).tensors["representation.0"].sum() == 60


def test_half_whitening_gives_the_square_root_of_the_kernel():
    torch.manual_seed(0)
    a = torch.randn(30, 6, dtype=torch.float64) @ torch.diag(torch.tensor([10.0, 5, 1, 1, 0.1, 0])).double()
    kernel = kernel_of(a @ whitening_matrix(a))
    torch.testing.assert_close(kernel @ kernel, a @ a.T, atol=1e-6, rtol=1e-6)


def test_everybody_is_asked_before_training_for_representations_of_the_public_images_and_nothing_else(tiny, tmp_path):
    recipe = tiny(**ALIGNED, clients_per_round=1, rounds=1)
    server = run(recipe, tmp_path / "a").server_state()
    assert sorted(server.tensors) == [f"representation.{k}" for k in range(3)]
    federation = build_federation(recipe)
    idle = next(k for k in range(3) if k not in federation.sampled_clients(1))
    reply = federation.method.client_round(federation.client(idle, Message()), Message(), 0)
    assert reply.tensors.keys() == {f"representation.{idle}"}
    assert reply.tensors[f"representation.{idle}"].shape[0] == 30
    assert torch.equal(server.tensors[f"representation.{idle}"], reply.tensors[f"representation.{idle}"])


def test_kernels_by_the_batch_are_those_of_training_mode_and_leave_the_running_statistics(tiny):
    part = {"name": "representation_mean", "statistics": "batch"}
    federation = build_federation(tiny(**{**ALIGNED, "aggregators": [part]}))
    method, client = federation.method, federation.client(0, Message())
    before = {name: value.clone() for name, value in client.model.state_dict().items()}
    reply = method.client_round(client, Message(), 0)
    for name, value in client.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    expected = client.model.train().represent(normalize(client.public_images), "predictor").detach()
    torch.testing.assert_close(reply.tensors["representation.0"], expected)
    local = LocalRound(client, Message(), 0, 0, method.objective, method.augmentation)
    other, one_left_over = (  # 29 of 30 images
        method.aggregators[0].model_copy(update=update).collect(local, []).tensors["representation.0"]
        for update in ({"statistics": "running"}, {"batch_size": 29})
    )
    assert not torch.allclose(other, expected, atol=1e-3)
    assert one_left_over.isfinite().all()
