"""Seeds and generators, and what a client draws in a round: its own, and the same if that round is run again."""

import dataclasses
import itertools
import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from fedssl import method
from fedssl.client import LocalRound
from fedssl.data.datasets import Dataset
from fedssl.engines import in_process, rounds
from fedssl.errors import UserError
from fedssl.federation import Federation
from fedssl.messages import Message
from fedssl.objectives.simsiam import SimSiam
from fedssl.randomness import deterministic_on, seed_for
from fedssl.training import train_locally
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.short_runs import SMALL
from tests.fedssl.test_combinations import federation_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
IMAGES, BATCH_SIZE, EPOCHS = 12, 4, 2
DRAWS = ("order", "views", "network")
ROUNDS_OF_CLIENTS = list(itertools.product((0, 1), (1, 2)))  # client, round


def test_seeds_are_fixed_for_all_time():
    """A changed value would silently change every published run."""
    assert seed_for(0, "client", 3, "round", 7, "augmentation") == 6297883779828368072
    assert seed_for(0) != seed_for(1)
    assert seed_for(0, "client", 1) != seed_for(0, "client", 11)


@pytest.mark.parametrize("before", [False, True])
def test_deterministic_algorithms_are_asked_for_on_cuda_alone(before, monkeypatch):
    """torch keeps the setting without a GPU too; where it only warned before, it warns again."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "of this machine")  # so that it comes back
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    torch.use_deterministic_algorithms(before, warn_only=True)
    try:
        for device, enabled in ((CPU, True), (CUDA, False), (CUDA, True)):
            asked = enabled and device == CUDA
            with deterministic_on(device, enabled):
                assert torch.are_deterministic_algorithms_enabled() == (before or asked)
                assert torch.is_deterministic_algorithms_warn_only_enabled() != asked
            assert torch.are_deterministic_algorithms_enabled() == before
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if asked else None)
        with pytest.raises(UserError, match="is true, but pool has no deterministic"), deterministic_on(CUDA, True):
            raise RuntimeError("pool has no deterministic implementation")
        with pytest.raises(RuntimeError, match="out of memory"), deterministic_on(CUDA, True):
            raise RuntimeError("out of memory")
        assert torch.are_deterministic_algorithms_enabled() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_rounds_and_evaluations_of_a_run_are_deterministic_if_asked_for(tiny, tmp_path, monkeypatch):
    asked = []

    def noting(where):
        return lambda *options: asked.append((where, *options)) or nullcontext()

    monkeypatch.setattr(method, "deterministic_on", noting("round"))
    monkeypatch.setattr(rounds, "deterministic_on", noting("evaluation"))
    training = {"local_epochs": 1, "batch_size": 8, "deterministic": True}
    recipe = tiny(**AVERAGED | SMALL, rounds=1, training=training)
    in_process.run(recipe, tmp_path / "a")
    clients = ["round"] * recipe.partition.clients
    assert asked == [(where, CPU, True) for where in ("evaluation", *clients, "evaluation")]


# What a client draws in a round


def twins() -> Federation:
    """Two clients with the same images, all alike, whose labels are their places: only what is drawn can differ."""
    images = torch.randint(256, (1, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    images = images.expand(IMAGES, -1, -1, -1).contiguous()
    places = torch.arange(IMAGES)
    dataset = Dataset("twins", images, places, images, places, tuple(map(str, range(IMAGES))), None)
    partition, training = {"name": "iid", "clients": 2}, {"local_epochs": EPOCHS, "batch_size": BATCH_SIZE}
    parts = "simsiam", [], ["weighted_mean"], "replace"
    federation = federation_of(*parts, dataset, partition=partition, training=training)
    return dataclasses.replace(federation, client_rows=[places, places])


@pytest.fixture(scope="module")
def steps() -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """Each step's places, views and a number from the generator that dropout draws from; a test clears the list."""
    noted: list[tuple[Tensor, Tensor, Tensor]] = []
    real = SimSiam.step

    def step(objective: SimSiam, model: Any, views: tuple[Tensor, ...], labels: Tensor) -> Any:
        noted.append((labels, torch.stack(views), torch.rand(())))
        return real(objective, model, views, labels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimSiam, "step", step)
        yield noted


@pytest.fixture(scope="module")
def draws(steps) -> list[dict[tuple[int, int], dict[str, Tensor]]]:
    """What clients draw in rounds, by client and round: once, and again in the other order.

    `order` [steps, BATCH_SIZE] are the images' places, `views` [steps, views, BATCH_SIZE, C, H, W] what the steps were
    given, and `network` [steps] numbers from the generator that dropout draws from.
    """
    federation = twins()

    def drawn(client: int, number: int) -> dict[str, Tensor]:
        steps.clear()
        sent = federation.method.broadcast(federation.method.initial_state(), [client], number)
        federation.method.client_round(federation.client(client, Message()), sent[client], number)
        assert len(steps) == EPOCHS * IMAGES // BATCH_SIZE
        return {name: torch.stack(parts) for name, parts in zip(DRAWS, zip(*steps, strict=True), strict=True)}

    return [{key: drawn(*key) for key in keys} for keys in (ROUNDS_OF_CLIENTS, ROUNDS_OF_CLIENTS[::-1])]


@pytest.mark.parametrize("what", DRAWS)
def test_clients_and_rounds_draw_differently_and_a_round_that_is_run_again_alike(what, draws):
    for one, other in itertools.combinations(ROUNDS_OF_CLIENTS, 2):
        assert not torch.equal(draws[0][one][what], draws[0][other][what]), (one, other)
    for key in ROUNDS_OF_CLIENTS:
        assert torch.equal(draws[1][key][what], draws[0][key][what]), key


def test_every_epoch_has_its_own_order_of_all_images_and_every_view_is_augmented_on_its_own(draws):
    """The images are all alike, so two equal views would have been augmented alike."""
    for key, drawn in draws[0].items():
        epochs = drawn["order"].reshape(EPOCHS, IMAGES)
        assert not torch.equal(epochs[0], epochs[1]), key
        assert torch.equal(epochs.sort(dim=1)[0], torch.arange(IMAGES).expand(EPOCHS, -1)), key
        views = drawn["views"].flatten(0, 2).flatten(1)
        assert len(views.unique(dim=0)) == len(views), key


def test_a_views_number_is_its_place_and_its_epoch_and_not_its_batch(steps):
    """Seven steps of four of twelve images begin a third epoch; in it the epoch is 2."""
    federation = twins()
    method, client = federation.method, federation.client(1, Message())
    steps.clear()
    local = LocalRound(client, Message(), 2, method.seed, method.objective, method.augmentation)
    train_locally(local, method.training.model_copy(update={"local_steps": 7}), [], rounds=3)
    assert len(steps) == 7
    for number, (places, views, _) in enumerate(steps):
        for index, place in enumerate(places):
            row = place[None]
            alone = local.views(client.images[row], row, "training", number // (IMAGES // BATCH_SIZE))
            assert all(torch.equal(view[index], one[0]) for view, one in zip(views, alone, strict=True))


def test_a_parts_generator_is_of_the_seed_the_client_the_round_and_the_purpose():
    federation = twins()
    numbers: dict[tuple[int, int, int, str], Tensor] = {}
    for seed, k, number, purpose in itertools.product((0, 1), (0, 1), (1, 2), ("dictionary", "public")):
        client, recipe = federation.client(k, Message()), federation.recipe
        local = LocalRound(client, Message(), number, seed, recipe.objective, recipe.augmentation)
        numbers[seed, k, number, purpose] = torch.rand(4, generator=local.generator(purpose))
        assert torch.equal(torch.rand(4, generator=local.generator(purpose)), numbers[seed, k, number, purpose])
    for one, other in itertools.combinations(numbers, 2):
        assert not torch.equal(numbers[one], numbers[other]), (one, other)
