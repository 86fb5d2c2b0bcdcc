"""A client's training against its steps written out, its rate in each round, what it begins with and gives away."""

import dataclasses
import functools
import itertools
import math
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedssl.client import Client, LocalRound
from fedssl.data.batches import epoch_batches, round_batches
from fedssl.engines import rounds
from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.method import Method
from fedssl.models.model import Model
from fedssl.objectives.base import Step
from fedssl.objectives.byol import BYOL
from fedssl.regularizers.base import Regularizer, StepLoss
from fedssl.regularizers.representation_alignment import RepresentationAlignment
from fedssl.run_folder.directory import RunDirectory
from fedssl.training import _log_rank_kept, steps_of_round, train_before_rounds, train_locally
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.short_runs import SMALL
from tests.fedssl.models.test_weights import same
from tests.fedssl.rounds_in_memory import train_rounds

EPOCHS, BATCH_SIZE, NUMBER = 2, 8, 3
RATE, MOMENTUM, DECAY, TARGET_MOMENTUM = 0.05, 0.8, 0.01, 0.9
State = dict[str, Tensor]


class DoubleByol(BYOL):
    """In float64, so that the order of a step's sums does not matter."""

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        return super().step(model, tuple(view.double() for view in views), labels)


class Length(Regularizer):
    """The mean length of the first view's projections, times a weight."""

    weight: float

    def start_round(self, local: LocalRound) -> StepLoss:
        return lambda step: self.weight * step.projections[0].norm(dim=1).mean()


def local_round(federation: Federation) -> LocalRound:
    client, recipe = federation.client(0, Message()), federation.recipe
    client.model.train().double()
    objective = DoubleByol(**recipe.objective.model_dump())
    return LocalRound(client, Message(), NUMBER, recipe.seed, objective, recipe.augmentation)


RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, momentum=MOMENTUM),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def train_step_by_step(local: LocalRound, optimizer: str, terms: list[StepLoss]) -> list[tuple[float, float]]:
    """The round, written out; the losses of its steps, without and with the terms."""
    client: Client = local.client
    order = local.generator("order")
    rule = RULES[optimizer](client.model.online.parameters(), lr=RATE, weight_decay=DECAY, foreach=False)
    losses = []
    for epoch in range(EPOCHS):
        for rows in epoch_batches(len(client.images), BATCH_SIZE, order):
            views = local.views(client.images[rows], rows, "training", epoch)
            step: Step = local.objective.step(client.model, views, client.labels[rows])
            loss = step.loss + sum(term(step) for term in terms)
            rule.zero_grad()
            loss.backward()
            rule.step()
            with torch.no_grad():
                for part, target in client.model.target.items():
                    for old, new in zip(target.parameters(), client.model.online[part].parameters(), strict=True):
                        old.copy_(TARGET_MOMENTUM * old + (1 - TARGET_MOMENTUM) * new)
            losses.append((float(step.loss.detach()), float(loss.detach())))
    return losses


@pytest.mark.parametrize("optimizer", RULES)
def test_a_round_is_these_steps(optimizer, tiny):
    objective = {"name": "byol", "hidden_features": 16, "output_features": 8, "target_momentum": TARGET_MOMENTUM}
    training = {"local_epochs": EPOCHS, "batch_size": BATCH_SIZE, "optimizer": optimizer, "learning_rate": RATE}
    training |= {"momentum": MOMENTUM, "weight_decay": DECAY}
    federation = build_federation(tiny(**AVERAGED | SMALL, objective=objective, training=training))
    terms = [Length(weight=0.3), Length(weight=-0.1)]
    one, other = local_round(federation), local_round(federation)
    before = {name: tensor.clone() for name, tensor in one.client.model.state_dict().items()}
    cost = train_locally(one, federation.recipe.training, terms, rounds=5)
    losses = train_step_by_step(other, optimizer, [term.start_round(other) for term in terms])
    expected = other.client.model.state_dict()
    for name, tensor in one.client.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-8, rtol=1e-8)
        if tensor.is_floating_point():
            assert (tensor - before[name]).abs().max() > 1e-4, name
    steps = EPOCHS * (len(one.client.images) // BATCH_SIZE)
    assert len(losses) == steps > EPOCHS
    logged = one.logged()
    assert logged["loss"] == pytest.approx(sum(loss for loss, _ in losses) / steps)
    assert logged["total_loss"] == pytest.approx(sum(total for _, total in losses) / steps)
    assert (logged["flops"], logged["memory"]) == (cost.flops * steps, cost.memory)


def test_equal_steps_whatever_the_number_of_images(tiny):
    """Clients of 41 and 19 images with batches of 8: seven steps are one and a half and three and a half passes."""
    recipe = tiny(**AVERAGED, training={"local_epochs": 9, "local_steps": 7, "batch_size": 8})
    federation = build_federation(recipe)
    federation = dataclasses.replace(federation, client_rows=[torch.arange(41), torch.arange(41, 60)])
    for k in (0, 1):
        client = federation.client(k, Message())
        local = LocalRound(client, Message(), 1, recipe.seed, recipe.objective, recipe.augmentation)
        cost = train_locally(local, recipe.training, [], rounds=1)
        assert steps_of_round(recipe.training, len(client.images)) == 7
        assert local.logged()["flops"] == 7 * cost.flops
    # training before the rounds still goes by epochs: 16 images in batches of 8 are two steps in each of three
    server = Client(-1, client.images[:16], client.labels[:16], None, client.model)
    local = LocalRound(server, Message(), 0, recipe.seed, recipe.objective, recipe.augmentation)
    train_before_rounds(local, recipe.training, epochs=3)
    assert local.logged()["flops"] == pytest.approx(3 * 2 * cost.flops)
    # an empty batch would train on nothing and end in a loss of nan
    client = dataclasses.replace(client, images=client.images[:7], labels=client.labels[:7])
    local = LocalRound(client, Message(), 1, recipe.seed, recipe.objective, recipe.augmentation)
    with pytest.raises(UserError, match=r"7 images, fewer than training\.batch_size 8"):
        train_locally(local, recipe.training, [], rounds=1)


def test_equal_steps_go_through_the_images_in_new_orders():
    """Ten images in batches of four: a pass has two batches; the other two images are left out."""
    found = [list(round_batches(10, 4, 1, steps, torch.Generator().manual_seed(0))) for steps in (5, 1)]
    generator = torch.Generator().manual_seed(0)
    expected = [batch.tolist() for _ in range(3) for batch in epoch_batches(10, 4, generator)]
    assert [[batch.tolist() for batch in batches] for batches in found] == [expected[:5], expected[:1]]
    assert expected[0] != expected[2]


class Explodes(Regularizer):
    """Not a number from a step on, and an error of its own two steps later."""

    step: int
    fails: bool = False

    def start_round(self, local: LocalRound) -> StepLoss:
        numbers = itertools.count(1)

        def term(step: Step) -> Tensor:
            number = next(numbers)
            if self.fails and number == self.step + 2:
                raise ValueError("the cost holds NaN")
            return step.loss.new_tensor(float("nan") if number >= self.step else 0.0)

        return term


@pytest.mark.parametrize(("epochs", "step", "fails"), [(1, 2, False), (2, 7, False), (2, 5, True)])
def test_a_diverged_client_is_named_with_its_first_such_step(epochs, step, fails, tiny):
    """The loss is looked at once an epoch, or when a step fails."""
    federation = build_federation(tiny(training={"local_epochs": epochs, "batch_size": 8}))
    method, client = federation.method, federation.client(1, Message())
    local = LocalRound(client, Message(), 1, 0, method.objective, method.augmentation)
    regularizer = Explodes(name="explodes", step=step, fails=fails)
    with pytest.raises(UserError, match=rf"client 1's loss became nan in round 1, step {step};"):
        train_locally(local, method.training, [regularizer], rounds=1)


def test_a_diverged_client_is_named_also_where_its_rank_is_looked_at(tiny):
    training = {"local_epochs": 1, "batch_size": 8, "learning_rate": 1e30, "stop_at_collapse": True}
    federation = build_federation(tiny(training=training))
    with pytest.raises(UserError, match=r"client 1's loss became \S+ in round 1, step 2; .* objective byol"):
        federation.method.client_round(federation.client(1, Message()), Message(), 1)


@pytest.mark.parametrize("most_steps", [None, 2])
def test_the_gradient_norm_is_that_of_the_last_step(most_steps, tiny, monkeypatch):
    federation, norms = build_federation(tiny(training={"local_epochs": 2, "batch_size": 8})), []

    def step(optimizer):  # which takes none
        gradients = [p.grad.double() for p in optimizer.param_groups[0]["params"] if p.grad is not None]
        norms.append(sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    reply, _ = federation.method.counted_round(federation.client(0, Message()), Message(), 1, most_steps)
    assert reply.metrics["gradient_norm"] == pytest.approx(norms[-1], rel=1e-5)
    assert len(set(norms)) == len(norms) > 1


# The learning rate in each round

#: cos^2(pi (r - 1) / 8), r the round: full at first, half in the middle, and not yet 0 in the last
COSINE_OF_FOUR_ROUNDS = [RATE, RATE * (2 + math.sqrt(2)) / 4, RATE / 2, RATE * (2 - math.sqrt(2)) / 4]
COSINE = {"local_epochs": 1, "batch_size": 8, "learning_rate": RATE, "learning_rate_schedule": "cosine"}
SETTINGS: dict[str, Any] = AVERAGED | {
    "rounds": 4,
    "objective": {"name": "simsiam", "output_features": 8, "bottleneck_features": 4},
    "data": {"name": "digits", "train_limit": 48, "test_limit": 20, "public_holdout": 16},
    "partition": {"name": "iid", "clients": 2},
    "training": COSINE,
}


@pytest.fixture
def rates(monkeypatch) -> Iterator[dict[int, set[float]]]:
    """The rates of all optimiser steps: in each round of the clients, and as those of -1 in between."""
    found: dict[int, set[float]] = {}
    now, real = [-1], Method.client_round

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found.setdefault(now[0], set()).update(float(group["lr"]) for group in optimizer.param_groups)

    def client_round(method: Method, client: Any, received: Any, number: int) -> Any:
        now[0] = number
        reply = real(method, client, received, number)
        now[0] = -1
        return reply

    monkeypatch.setattr(Method, "client_round", client_round)
    handle = register_optimizer_step_pre_hook(note)
    yield found
    handle.remove()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_round_counts_and_not_how_often_a_client_took_part(optimizer, tiny, tmp_path, rates):
    """One of two clients a round: all groups of the optimiser have the rate of the round's number."""
    recipe = tiny(**SETTINGS | {"training": COSINE | {"optimizer": optimizer}}, clients_per_round=1)
    run(recipe, tmp_path / "run")
    federation = build_federation(recipe)
    assert len({tuple(federation.sampled_clients(number)) for number in (1, 2, 3, 4)}) == 2
    assert all(len(rates[number]) == 1 for number in (1, 2, 3, 4))
    assert [next(iter(rates[number])) for number in (1, 2, 3, 4)] == pytest.approx(COSINE_OF_FOUR_ROUNDS, rel=1e-12)


def test_a_constant_rate_and_that_of_what_the_server_trains_before_the_rounds_is_the_full_one(tiny, rates):
    simclr = {"name": "simclr", "hidden_features": 16, "output_features": 8}
    aggregators = ["weighted_mean", {"name": "base_model", "epochs": 1}]
    recipe = tiny(**SETTINGS | {"objective": simclr, "aggregators": aggregators})
    build_federation(recipe).method.initial_state()
    assert rates == {-1: {RATE}}
    too_high = recipe.model_copy(update={"training": recipe.training.model_copy(update={"learning_rate": 1e30})})
    with pytest.raises(UserError, match=r"^the server's loss became nan in round 0, step 2;"):
        build_federation(too_high).method.initial_state()
    rates.clear()
    constant = {"training": COSINE | {"learning_rate_schedule": "constant"}}
    train_rounds(build_federation(tiny(**SETTINGS | constant)), rounds=2)
    assert rates == {1: {RATE}, 2: {RATE}}


def test_warmup_cosine_changes_from_step_to_step(tiny, rates):
    """12 steps, of which the first 0.6 warm up: the middle of each step counts, and the last is not 0."""
    training = COSINE | {"learning_rate_schedule": "warmup_cosine", "local_steps": 3}
    train_rounds(build_federation(tiny(**SETTINGS | {"training": training})), 4, clients=[0])
    middles = [(step + 0.5) / 12 for step in range(12)]
    expected = [RATE * (t / 0.05 if t < 0.05 else (1 + math.cos(math.pi * (t - 0.05) / 0.95)) / 2) for t in middles]
    assert expected[0] < expected[1] > expected[2]
    for number in (1, 2, 3, 4):
        assert sorted(rates[number]) == pytest.approx(sorted(expected[3 * number - 3 : 3 * number]), rel=1e-12)


def test_an_encoder_that_starts_from_weights_waits_for_its_heads_and_then_trains_slowly(tiny, monkeypatch):
    """The encoder's weights stay bit for bit as they were through the warm-up; its rate is a share of the heads'."""
    training = COSINE | {"learning_rate_schedule": "warmup_cosine", "local_steps": 3, "encoder_rate": 0.25}
    federation = build_federation(tiny(**SETTINGS | {"training": training, "rounds": 10}))
    seen: list[tuple[list[float], State]] = []
    model = federation.new_model(0)
    monkeypatch.setattr(type(federation), "new_model", lambda *_: model)

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append(([float(group["lr"]) for group in optimizer.param_groups], copied(dict(model.named_parameters()))))

    handle = register_optimizer_step_pre_hook(note)
    try:
        train_rounds(federation, 10, clients=[0])
    finally:
        handle.remove()
    warm = [step for step, ((encoder, _), _) in enumerate(seen) if encoder == 0.0]
    assert warm == [0]  # the middle of the second of 30 steps is where the warm-up ends
    assert all(encoder == pytest.approx(0.25 * heads) for (encoder, heads), _ in seen[1:])
    before, moved, last = seen[0][1], seen[1][1], seen[-1][1]
    in_encoder = {f"online.encoder.{name}" for name, _ in model.encoder.named_parameters()}
    assert all(torch.equal(before[name], moved[name]) for name in in_encoder)
    assert not all(torch.equal(before[name], last[name]) for name in in_encoder)
    of_heads = [name for name in before if name.endswith("weight") and name not in in_encoder]
    assert of_heads
    assert not any(torch.equal(before[name], moved[name]) for name in of_heads)


@pytest.mark.parametrize("length", [{"local_epochs": 4}, {"local_epochs": 12}, {"local_steps": 1, "batch_size": 48}])
def test_a_collapse_ends_the_run_and_is_named(length, tiny, tmp_path):
    """SimSiam without its stop-gradient collapses, over rounds and within one, and goes on where it shall."""
    objective = {"name": "simsiam", "output_features": 16, "bottleneck_features": 8, "stop_gradient": False}
    training = {"batch_size": 16, "learning_rate": 2.0, "stop_at_collapse": True} | length
    changes = SETTINGS | {"objective": objective, "training": training, "partition": {"name": "iid", "clients": 1}}
    with pytest.raises(UserError, match=r"round \d+: the representations collapse: at its end a batch has \d+ % of"):
        run(tiny(**changes | {"rounds": 20}), tmp_path / "collapses")
    until = RunDirectory.open(tmp_path / "collapses").checkpoint.round + 1
    goes_on = {"training": training | {"stop_at_collapse": False}, "rounds": until}
    assert run(tiny(**changes | goes_on), tmp_path / "goes on").checkpoint.finished
    healthy = {"objective": objective | {"stop_gradient": True}, "training": training | {"learning_rate": 0.05}}
    replies = train_rounds(build_federation(tiny(**changes | healthy)), until).replies
    assert min(reply[0].metrics["rank_kept"] for reply in replies.values()) > 0.25


@pytest.mark.parametrize(("noise", "kept"), [(0.01, 1.0), (3.0, 0.13)], ids=["few kinds of images", "collapsed"])
@pytest.mark.parametrize("online_views", [1, 2])
def test_a_low_rank_is_a_collapse_where_views_no_longer_find_one_another(online_views, noise, kept):
    """At first 64 views in 32 dimensions of which half find one another, then views in few dimensions."""
    generator, logged = torch.Generator().manual_seed(0), {}
    client = SimpleNamespace(memory=SimpleNamespace(numbers={}), model=Model({"encoder": torch.nn.Identity()}))
    local = SimpleNamespace(client=client, log=logged.__setitem__)
    for directions, share, begins in ((32, 1.5, True), (4, noise, False)):
        images = torch.randn(64, directions, generator=generator)
        views = tuple(images + share * torch.randn(64, directions, generator=generator) for _ in range(2))
        _log_rank_kept(Step(images.mean(), views[:online_views], views=views), local, begins, not begins)
    assert logged == {"rank_kept": pytest.approx(kept, abs=0.05)}


@pytest.mark.parametrize(
    ("kept", "ends"),
    [([0.1, 0.9, 0.9], False), ([0.1, 0.2, 0.9], True), ([0.0, 0.9], False), ([0.2], True), ([], False)],
)
def test_a_single_client_whose_batches_lose_their_rank_does_not_end_a_run(kept, ends):
    for objective, instead in (("byol", "objective simclr"), ("simclr", "larger batches")):
        with pytest.raises(UserError, match=rf"round 3: .* has 20 % of .* {instead} \(") if ends else nullcontext():
            rounds._require_rank(3, kept, objective)


# What a round begins with and what it gives away: its target, its previous model, its answer

BYOL_OF_EIGHT = {"name": "byol", "hidden_features": 16, "output_features": 8}
MOCO_V3 = BYOL_OF_EIGHT | {"name": "moco_v3"}
KEPT_TARGET = MOCO_V3 | {"fresh_target_each_round": False}


def small_federation(tiny: Any, **changes: Any) -> Federation:
    return build_federation(tiny(**AVERAGED | SMALL | {"objective": BYOL_OF_EIGHT} | changes))


def copied(state: State) -> State:
    return {name: tensor.clone() for name, tensor in state.items()}


def target_as_online(state: State) -> State:
    """The target network's entries, under the names that they have in the online one."""
    return {"online." + name[7:]: tensor for name, tensor in state.items() if name.startswith("target.")}


@pytest.fixture
def at_first_step(monkeypatch) -> list[State]:
    """The model's state when each client begins to train."""
    states: list[State] = []
    real = RepresentationAlignment.start_round

    def start_round(part, local):
        states.append(copied(local.client.model.state_dict()))
        states[-1] |= {"previous." + name: tensor.clone() for name, tensor in local.previous.items()}
        return real(part, local)

    monkeypatch.setattr(RepresentationAlignment, "start_round", start_round)
    return states


@pytest.mark.parametrize(("objective", "fresh"), [(BYOL_OF_EIGHT, False), (MOCO_V3, True), (KEPT_TARGET, False)])
def test_a_target_goes_on_unless_it_is_fresh_and_the_previous_model_is_its_own(objective, fresh, tiny, at_first_step):
    """The first target is the first online network; the mean moves between the two rounds, as if by others."""
    federation = small_federation(tiny, objective=objective, regularizers=["representation_alignment"])
    method, client = federation.method, federation.client(0, Message())
    server, own = method.initial_state(), client.model.online_state()
    assert not same(own, server.tensors)  # a client does not start from the server's numbers
    reply = method.client_round(client, method.broadcast(server, [0], 1)[0], 1)
    between, moved = copied(client.model.state_dict()), method.aggregate(server, {0: reply}, 1)
    moved.tensors = {n: t + 0.01 if t.is_floating_point() else t for n, t in moved.tensors.items()}
    received = method.broadcast(moved, [0], 2)[0]
    method.client_round(client, received, 2)
    targets = [target_as_online(state) for state in at_first_step]
    expected = received.tensors if fresh else target_as_online(between)
    for target, source in zip(targets, (server.tensors, expected), strict=True):
        assert same(target, {name: source[name] for name in target})
    for state, before in zip(at_first_step, (own, between), strict=True):
        previous = {name[9:]: tensor for name, tensor in state.items() if name.startswith("previous.")}
        assert same(previous, {name: tensor for name, tensor in before.items() if name.startswith("online.")})
    assert not same(previous, received.tensors)


def test_an_answer_and_a_state_do_not_change_when_the_client_trains_on(tiny):
    federation = small_federation(tiny, aggregators=["weighted_mean", "representation_mean"])
    method = federation.method
    server, client = method.initial_state(), federation.client(0, Message())
    sent = method.broadcast(server, [0], 1)[0]
    reply, state = method.client_round(client, sent, 1), federation.client_state(client, 1)
    answered, given, kept = copied(reply.tensors), copied(sent.tensors), copied(state.tensors)
    with torch.no_grad():
        for tensor in client.model.state_dict().values():
            tensor.zero_()
    assert same(reply.tensors, answered)
    assert same(state.tensors, kept)
    assert same(sent.tensors, given)  # nor what the server sent, which all clients share
    assert same(method.broadcast(server, [0], 1)[0].tensors, given)


# Freed memory

STEP = """
import ctypes
import os
from fedssl.training import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
keep_freed_memory()
before = resident()
blocks = [libc.malloc(800 * 1024) for _ in range(70)]  # not tensors, whose small blocks may hold the memory below them
for block in blocks:
    libc.memset(block, 1, 800 * 1024)
for block in reversed(blocks):
    libc.free(block)
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc decides otherwise")
def test_what_a_step_has_freed_is_there_for_the_next_one(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 50e6  # of 57 MB; without it less than 1 MB
