"""``python -m benchmarks.simulation``: the phases add up, and what cannot be timed is refused."""

import csv
import json
import math
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import simulation, simulation_peers, simulation_tables, two_at_a_time
from benchmarks.phases import PHASES, PhaseClock, Place, require_calls
from benchmarks.simulation import Simulation, Sizes, measure_rounds
from benchmarks.simulation_peers import LocalTraining, Loop
from fedssl.objectives.byol import BYOL
from fedssl.recipe.reading import load_recipe

pytestmark = pytest.mark.usefixtures("no_collections")
CPU = torch.device("cpu")
TINY = Simulation("fedbyol", ("small_convnet",), 4, 2)
TINY_TRAINING = LocalTraining("byol", "small_convnet", 4, 2, "cpu")


def test_a_call_within_a_phase_belongs_to_it() -> None:
    spent: list[float] = []
    clock, spend = PhaseClock(CPU, lambda: sum(spent)), spent.append
    inner = clock.timed(Place("augment", "x:inner"), lambda: spend(2))

    def outer() -> None:
        spend(1)
        inner()
        spend(4)

    clock.timed(Place("regularizer", "x:outer"), outer)()
    inner()
    assert clock.take() == ({"regularizer": 7.0, "augment": 2.0}, {"x:outer": 1, "x:inner": 2})
    assert clock.take() == ({}, {})


def test_a_function_that_a_round_did_not_call_is_named() -> None:
    timed = [Place("forward", "x:f"), Place("EMA", "x:g")]
    require_calls(timed, {"x:f": 1, "x:g": 2})
    with pytest.raises(LookupError, match=r"^x:g was not called in a round, so the time of 'EMA' is unknown"):
        require_calls(timed, {"x:f": 1})


@pytest.mark.parametrize("one", simulation.sizes("cpu", True).simulations, ids=lambda one: one.recipe)
def test_the_phases_of_a_round_add_up_to_its_time(one: Simulation, tmp_path: Path) -> None:
    """The run's own seconds of a round, in timings.csv, do not contain the commit, which the phases do.

    These are all recipes that are measured on any device. Each function that is timed exists and is called.
    """
    step = BYOL.step
    rounds = 8 if one.recipe == "lw_fedssl" else 3
    recipe = load_recipe(one.recipe, [*simulation._settings(one, "cpu", rounds, tmp_path), "evaluation.every=1"])
    measured = measure_rounds(recipe, tmp_path / "run", phases=True)
    assert [a_round.number for a_round in measured] == list(range(2, rounds))
    with open(tmp_path / "run" / "timings.csv") as file:
        own = {int(row["round"]): float(row["seconds"]) for row in csv.DictReader(file)}
    for a_round in measured:
        parts = a_round.phases
        assert list(parts) == list(PHASES)
        assert sum(parts.values()) == pytest.approx(a_round.seconds)
        rounded = 0.001
        assert own[a_round.number] - rounded <= sum(parts.values())
        assert sum(parts.values()) <= own[a_round.number] + parts["checkpoint"] + parts["other"] + rounded
        assert all(seconds > 0 for phase, seconds in parts.items() if phase != "regularizer")
        assert (parts["regularizer"] > 0) == bool(recipe.regularizers)
        assert a_round.images == simulation.CLIENTS * one.batch_size * one.steps
    assert BYOL.step is step  # not timed any more


@pytest.mark.parametrize("name", simulation_peers.LOOPS)
@pytest.mark.parametrize("objective", simulation_peers.RECIPES)
def test_everyone_trains_the_same_network(name: str, objective: str) -> None:
    if name != "fedssl" and find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    training = LocalTraining(objective, "small_convnet", 4, 2, "cpu")
    loop = simulation_peers.make_loop(name, training, [])
    assert loop.parameters == simulation_peers.make_loop("fedssl", training, []).parameters
    loop.run()


def test_a_peer_with_another_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = {"fedssl": Loop(int, 10), "lightly": Loop(int, 10), "kornia": Loop(int, 9)}
    monkeypatch.setattr(simulation, "missing_package", lambda name: None)
    monkeypatch.setattr(simulation, "make_loop", lambda name, *_: loops[name])
    with pytest.raises(ValueError, match="kornia must train as many parameters as fedssl, 10, got 9"):
        simulation.measure_training(TINY_TRAINING, 1, [])


def test_loops_run_in_turn_and_a_missing_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(simulation, "missing_package", lambda name: "not installed" if name == "kornia" else None)
    monkeypatch.setattr(simulation, "make_loop", lambda name, *_: Loop(lambda: order.append(name), 1))
    close = lambda: order.append("close")  # noqa: E731
    pair = lambda name, *_: Loop(lambda: order.append(f"two of {name}"), 1, close)  # noqa: E731
    monkeypatch.setattr(simulation, "two_at_a_time", pair)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rows = simulation.measure_training(TINY_TRAINING, 2, [])["rows"]
    # the first time to warm up
    assert order == 3 * ["fedssl", "lightly", "two of fedssl", "two of lightly"] + 2 * ["close"]
    assert [len(row["times"]) for row in rows.values()] == [2, 2, 0, 2, 2]
    assert rows["kornia"]["status"] == "not installed"
    assert rows["fedssl, two at a time"]["images"] == 2 * rows["fedssl"]["images"] == 2 * TINY_TRAINING.images


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "sizes", lambda device, quick: Sizes((TINY,), (TINY_TRAINING,)))
    monkeypatch.setattr(simulation, "missing_package", lambda name: None if name == "fedssl" else "not installed")
    arguments = ["--threads", "1", "--repeats", "2", "--output", str(tmp_path)]
    assert simulation.main([*arguments, "training.learning_rate=0.01"]) == 0
    results = json.loads((tmp_path / "simulation.json").read_text())
    assert results["environment"]["threads"] == 1
    (one,), (training,) = results["simulations"], results["trainings"]
    assert len(one["seconds"]) == len(one["timed_seconds"]) == 2
    assert one["images"] == 32
    assert [row["status"] for row in training["rows"].values()] == ["ok", "not installed", "not installed"]
    text = (tmp_path / "simulation.md").read_text()
    assert text == simulation_tables.tables(results)
    assert "`training.learning_rate=0.01`" in text
    assert "|  | lightly | - | - | - | **not installed** |" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["simulation.json", "simulation.md"]


def ending(pipe: Any, *_: Any) -> None:
    """A process that ends in its first pass."""
    pipe.send(1)
    pipe.recv()


def test_a_process_that_ends_and_a_wrong_setting_are_the_statuses_of_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(two_at_a_time, "_serve", ending)
    pair = two_at_a_time.two_at_a_time("lightly", TINY_TRAINING, [])
    try:
        ended = simulation._measured("pair", pair.run, math.inf)
    finally:
        pair.close()
    assert ended == {"title": "pair", "status": "failed: two of lightly's loop at a time: a process has ended"}
    wrong = partial(simulation.measure_simulation, TINY, "cpu", 1, ["training.nothing=1"])
    assert "training.nothing" in simulation._measured("wrong", wrong, math.inf)["status"]


def test_overhead_and_bars() -> None:
    spent = dict.fromkeys(PHASES, 0.0) | {"forward": 3.0, "backward": 5.0, "optimizer": 1.0, "evaluate": 90.0}
    assert simulation_tables.overhead(spent) == pytest.approx(0.0)
    assert simulation_tables.overhead(spent | {"EMA": 0.5, "other": 0.5}) == pytest.approx(0.1)
    rows = {"fedssl": [1.0, 2.0, 3.0], "lightly": [5.0], "kornia": [8.0], "lightly, two at a time": [6.0]}
    rows["fedssl, two at a time"] = [2.0]
    training = {
        **{"title": "t", "status": "ok", "objective": "byol", "architecture": "small_resnet18", "batch_size": 50},
        "rows": {name: {"status": "ok", "images": 100, "times": times} for name, times in rows.items()},
    }
    lines = simulation_tables._training_table([training]).splitlines()
    for line in (
        "| t | fedssl | 50 | 33 to 100 |  |  |",
        "|  | lightly | 20 | 20 to 20 | 2.50 | bar: 2.5, met |",
        "|  | kornia | 12 | 12 to 12 | 4.00 |  |",
        "|  | lightly, two at a time | 17 | 17 to 17 | 3.00 | bar: 2.5, met |",
    ):
        assert line in lines
    training["rows"]["lightly"]["times"] = [4.9]
    assert "| 2.45 | bar: 2.5, missed |" in simulation_tables._training_table([training])
    assert "bar" not in simulation_tables._training_table([training | {"batch_size": 4}])
