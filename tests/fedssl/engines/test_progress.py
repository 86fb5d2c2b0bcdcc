"""The speed and the time left that a run shows, against runs whose every second is known."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from fedssl.engines.in_process import resume, run
from fedssl.engines.observers import Observers
from fedssl.engines.progress import ProgressBars, format_duration
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.short_runs import StopsAfterRoundOne
from tests.fedssl.killed_runs import Killed


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def test_durations():
    shown = {0.4: "0 s", 89: "89 s", 90: "2 min", 5399: "90 min", 9000: "2.5 h"}
    assert {seconds: format_duration(seconds) for seconds in shown} == shown


# What is shown


def lines(bars: ProgressBars) -> list[str]:
    return bars.console.file.getvalue().splitlines()


@pytest.fixture
def bars_on(tiny, tmp_path) -> Callable[..., ProgressBars]:
    """The bars of a run of so many rounds that begins in a new folder."""

    def begun(rounds: int, clock: Clock, **console: Any) -> ProgressBars:
        RunDirectory.create(tmp_path / "new", {"recipe.yaml": ""})
        bars = ProgressBars(Console(file=io.StringIO(), width=160, **console), clock)
        bars.run_began(tiny(rounds=rounds), tmp_path / "new", 0)
        return bars

    return begun


def test_a_line_a_round_tells_speed_and_time_left(bars_on):
    clock = Clock()
    bars = bars_on(2, clock, force_terminal=False)
    bars.evaluation_began(0)
    clock.now += 10
    bars.round_ended(0, [(0, "0", "knn", 20.0), (0, "global", "knn", 30.0)])
    bars.training_began(1, [4000, 4000])
    for position in (0, 1):
        bars.client_began(1, position, position, 2)
        clock.now += 5
    bars.round_ended(1, [(1, "mean", "loss", 0.5), (1, "1", "loss", 0.75)])
    bars.training_began(2, [4000, 4000])
    clock.now += 10
    bars.evaluation_began(2)
    clock.now += 10
    bars.round_ended(2, [(2, "mean", "loss", 0.25), (2, "global", "knn", 40.0)])
    assert lines(bars) == [
        "round 0/2  knn 30",
        "round 1/2  loss 0.5  800 images/s  20 s left",
        "round 2/2  loss 0.25  knn 40  800 images/s",
    ]


def test_later_rounds_that_take_longer_replace_the_first(bars_on):
    clock = Clock()
    bars = bars_on(20, clock, force_terminal=False)
    for number in range(1, 11):
        bars.training_began(number, [])  # of unknown numbers of images
        clock.now += 1 if number <= 5 else 3
        bars.round_ended(number, [])
    assert [lines(bars)[i] for i in (0, 9)] == ["round 1/20  19 s left", "round 10/20  30 s left"]


def test_on_a_terminal_the_time_left_counts_down_between_events(bars_on):
    clock = Clock()
    bars = bars_on(3, clock, force_terminal=True, legacy_windows=False)

    def shown(seconds: float) -> list[str]:
        clock.now += seconds
        with bars.console.capture() as text:
            bars.console.print(bars.bars.get_renderable())
        return text.get().splitlines()

    for number in (1, 2):
        bars.training_began(number, [50])
        clock.now += 60
        bars.round_ended(number, [])
    rounds, clients = shown(25)
    assert "0.8 images/s  35 s left" in rounds
    assert "left" not in clients
    assert "left" not in "".join(shown(100))  # the last round takes longer than it should


def test_a_run_and_its_continuation_tell_speed_and_time_left(tiny, tmp_path):
    path, speed = tmp_path / "run", r"[\d.,]+ images/s"
    evaluation = {"every": 2, "neighbors": 3, "linear": {"epochs": 1}}
    recipe = tiny(**AVERAGED, rounds=3, evaluation=evaluation)
    bars, after = (ProgressBars(Console(file=io.StringIO(), width=160)) for _ in range(2))
    with pytest.raises(Killed):
        run(recipe, path, Observers([bars, StopsAfterRoundOne()]))
    told, start, first = lines(bars)
    assert told == "models are measured on 120 of 120 training images and 60 of 60 test images"
    assert re.fullmatch(r"round 0/3  knn [\d.]+", start)
    assert re.fullmatch(rf"round 1/3  loss \S+  {speed}  \d+ (s|min) left", first)
    resume(path, after)
    second, third = lines(after)
    assert re.fullmatch(rf"round 2/3  loss .*  {speed}  \d+ (s|min) left", second)
    assert re.fullmatch(rf"round 3/3  loss .*  {speed}", third)
