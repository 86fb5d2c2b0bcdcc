import os
from contextlib import nullcontext

import pytest
import torch

from fedssl import method
from fedssl.engines import in_process, rounds
from fedssl.errors import UserError
from fedssl.randomness import deterministic_on, generator_for, seed_for, seeded
from tests.fedssl.conftest import AVERAGED

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_seeds_are_fixed_for_all_time():
    """A changed value would silently change every published run."""
    assert seed_for(0, "client", 3, "round", 7, "augmentation") == 6297883779828368072
    assert seed_for(0) != seed_for(1)
    assert seed_for(0, "client", 1) != seed_for(0, "client", 11)


def test_streams_of_different_purposes_differ_and_repeat():
    a, b, c = (torch.rand(4, generator=generator_for(0, p)) for p in ("order", "augmentation", "order"))
    assert torch.equal(a, c)
    assert not torch.equal(a, b)


def test_seeded_puts_the_global_generator_back():
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with seeded(0, "model"):
        torch.rand(100)
    assert torch.equal(torch.rand(2), expected)


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
    recipe = tiny(**AVERAGED, rounds=1, training={"local_epochs": 1, "batch_size": 8, "deterministic": True})
    in_process.run(recipe, tmp_path / "a")
    clients = ["round"] * recipe.partition.clients
    assert asked == [(where, CPU, True) for where in ("evaluation", *clients, "evaluation")]
