"""The speed and the time left that a run shows, against runs whose every second is known."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock, call

import pytest
from rich.console import Console

from fedssl.engines.in_process import resume, run
from fedssl.engines.observers import Observers
from fedssl.engines.progress import ProgressBars
from fedssl.engines.time_left import TimeLeft, format_duration, past_seconds
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.short_runs import StopsAfterRoundOne
from tests.fedssl.killed_runs import Killed


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


IMAGES = (100, 2000, 300)  # of the clients of each of six rounds, at 20 a second
ROUNDS = 6
Shown = tuple[str, float | None, float, float | None]


def follow(evaluations: Mapping[int, float], first: int = 0) -> Iterator[Shown]:
    """Each event of a run with the time left as estimated, as it is, and the images a second.

    `evaluations` has the seconds of each, by round.
    """
    clock = Clock()
    estimate = TimeLeft(clock)
    seconds = {n: sum(IMAGES) / 20 * (n > 0) + evaluations.get(n, 0.0) for n in range(ROUNDS + 1)}
    estimate.start(first, ROUNDS, list(evaluations), {number: seconds[number] for number in range(first)})
    end = clock.now + sum(seconds[number] for number in range(first, ROUNDS + 1))

    def shown(event: str) -> Shown:
        return event, estimate.seconds(), end - clock.now, estimate.images_per_second()

    yield shown("start")
    for number in range(first, ROUNDS + 1):
        if number:
            estimate.training(number, IMAGES)
            yield shown(f"training {number}")
            for position, images in enumerate(IMAGES):
                estimate.clients_done(position)
                yield shown(f"client {number}/{position}")
                clock.now += images / 20
        if number in evaluations:
            estimate.evaluating(number)
            yield shown(f"evaluating {number}")
            clock.now += evaluations[number] / 2
            estimate.clients_done(1)  # an engine may tell of clients here, too
            yield shown(f"evaluating client 1 in round {number}")
            clock.now += evaluations[number] / 2
        estimate.round_done()
        yield shown(f"done {number}")


EVERY_OTHER = {0: 50.0, 2: 7.0, 4: 7.0, 6: 50.0}
SAME = dict.fromkeys(EVERY_OTHER, 50.0)


@pytest.mark.parametrize(("evaluations", "measured"), [(SAME, "client 1/1"), (EVERY_OTHER, "done 2")])
def test_speed_and_time_are_known_from_the_first_client_on(evaluations, measured):
    """A short evaluation is taken for a long one until it was measured."""
    events = list(follow(evaluations))
    names = [name for name, *_ in events]
    known = names.index("client 1/1")
    assert all(left is None and rate is None for _, left, _, rate in events[:known])
    assert all(left >= truth - 1e-6 and rate == pytest.approx(20) for _, left, truth, rate in events[known:])
    for name, left, truth, _ in events[names.index(measured) :]:
        assert left == pytest.approx(truth), name


@pytest.mark.parametrize("every", [1, 2, 0], ids="every_{}".format)
@pytest.mark.parametrize("first", [3, 6])
def test_a_resumed_run_knows_from_its_earlier_rounds(first, every):
    """Where every round was evaluated, an evaluation cannot be told from training until one was measured."""
    evaluations = {0: 50.0} | {n: 7.0 for n in range(1, 6) if every and n % every == 0} | {6: 50.0}
    for name, left, truth, _ in follow(evaluations, first):
        assert left == pytest.approx(truth, abs=7.0 if every == 1 else 1e-6), name


@pytest.mark.parametrize(
    ("rounds", "evaluations", "done", "left", "speed"),
    [
        # a later stage that takes longer replaces what was measured
        (20, [20], [([10], 1)] * 5 + [([10], 3)] * 5, 30, 10 / 3),
        # unknown numbers of images
        (4, [], [([0, 0], 20)], 60, None),
        # nobody answers: the next round has 10 images, the mean of 20 and none
        (3, [], [([20], 1), ([], 0)], 0.5, 20),
    ],
)
def test_rounds_that_differ(rounds, evaluations, done, left, speed):
    clock = Clock()
    estimate = TimeLeft(clock)
    estimate.start(1, rounds, evaluations, {})
    for number, (images, seconds) in enumerate(done, start=1):
        estimate.training(number, images)
        clock.now += seconds
        estimate.round_done()
    assert estimate.seconds() == pytest.approx(left)
    assert estimate.images_per_second() == (speed and pytest.approx(speed))


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


def recording() -> tuple[ProgressBars, Mock]:
    """Bars, and the calls of the estimate behind them."""
    bars = ProgressBars(Console(file=io.StringIO(), width=160))
    bars._time_left = Mock(wraps=bars._time_left)
    return bars, bars._time_left


def test_a_run_and_its_continuation_tell_speed_and_time_left(tiny, tmp_path):
    """And the engine tells them of images, evaluations and earlier rounds."""
    path, speed = tmp_path / "run", r"[\d.,]+ images/s"
    training, evaluation = {"local_epochs": 2, "batch_size": 8}, {"every": 2, "neighbors": 3, "linear": {"epochs": 1}}
    recipe = tiny(**AVERAGED, rounds=3, training=training, evaluation=evaluation)
    bars, before = recording()
    with pytest.raises(Killed):
        run(recipe, path, Observers([bars, StopsAfterRoundOne()]))
    told, start, first = lines(bars)
    assert told == "models are measured on 120 of 120 training images and 60 of 60 test images"
    assert re.fullmatch(r"round 0/3  knn [\d.]+", start)
    assert re.fullmatch(rf"round 1/3  loss \S+  {speed}  \d+ (s|min) left", first)
    bars, after = recording()
    past = past_seconds(resume(path, bars))
    assert list(past) == [0, 1, 2, 3]
    second, third = lines(bars)
    assert re.fullmatch(rf"round 2/3  loss .*  {speed}  \d+ (s|min) left", second)
    assert re.fullmatch(rf"round 3/3  loss .*  {speed}", third)

    counts = [sum(map(int, line.split(",")[1:])) for line in (path / "partition.csv").read_text().splitlines()[1:]]
    images = [2 * (count // 8) * 8 for count in counts]
    assert before.training.mock_calls + after.training.mock_calls == [call(number, images) for number in (1, 2, 3)]
    assert before.evaluating.mock_calls + after.evaluating.mock_calls == [call(0), call(2), call(3)]
    assert before.start.mock_calls == [call(0, 3, [0, 2, 3], {})]
    assert after.start.mock_calls == [call(2, 3, [0, 2, 3], {number: past[number] for number in (0, 1)})]


def test_nothing_is_trained_where_the_schedule_trains_nothing(tiny, tmp_path):
    bars, recorder = recording()
    run(tiny(schedule="untrained", rounds=1), tmp_path / "run", bars)
    assert recorder.training.mock_calls == [call(1, [0, 0, 0])]


@pytest.mark.parametrize(
    "text", ["", "round,seconds\n1\n", "round,time\n1,2\n", "\xff", "round,seconds\n1,nan\n2,-1\n"]
)
def test_a_damaged_file_of_timings_counts_as_none(tmp_path, text):
    directory = RunDirectory.create(tmp_path / "run", {"recipe.yaml": ""})
    (directory.path / "timings.csv").write_bytes(text.encode("latin-1"))
    assert past_seconds(directory) == {}
