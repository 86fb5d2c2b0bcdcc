"""Observers of a run: they receive each round once it is committed, and cannot lose one."""

import re
import sys
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import fedssl
from fedssl.engines.in_process import resume, run
from fedssl.engines.observers import Observer, Observers, load_observer
from fedssl.errors import UserError
from fedssl.recipe.recipe import Recipe
from fedssl.run_folder.directory import MetricRow, RunDirectory
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.short_runs import SMALL, contents
from website.repository_files import ROOT

PAGE = ROOT / "docs" / "log_elsewhere.md"


class Recorder(Observer):
    """Keeps its calls; raises after the round `fails_after`, or in the call of the name `fails_in`."""

    def __init__(self, fails_after: int | None = None, fails_in: str = ""):
        self.fails_after, self.fails_in = fails_after, fails_in
        self.began: list[tuple[str, Path, int]] = []
        self.rows: list[MetricRow] = []
        self.rounds: list[int] = []
        self.committed: list[int] = []
        self.ended: list[bool] = []

    def run_began(self, recipe: Recipe, path: Path, first_round: int) -> None:
        self.began.append((recipe.name, path, first_round))
        self.fail(self.fails_in == "run_began")

    def round_ended(self, number: int, rows: list[MetricRow]) -> None:
        self.rounds.append(number)
        self.rows += rows
        self.committed.append(RunDirectory.open(self.began[-1][1]).checkpoint.round)
        self.fail(number == self.fails_after)

    def run_ended(self, finished: bool) -> None:
        self.ended.append(finished)
        self.fail(self.fails_in == "run_ended")

    def fail(self, when: bool) -> None:
        if when:
            raise ConnectionError("the server of the logs is down")


@pytest.fixture(scope="module")
def recipe(tiny) -> Recipe:
    return tiny(**AVERAGED | SMALL, rounds=3)


@pytest.mark.parametrize("fails_after", [1, 3])
def test_a_failing_observer_loses_no_round_and_a_resumed_run_tells_where_it_continues(
    fails_after, recipe, finished, tmp_path
):
    """By the library's functions; after its last round a run is finished, and its observers are told so.

    A round is committed before it is told, with the rows of metrics.csv.
    """
    path, failing, after = tmp_path / "run", Recorder(fails_after), Recorder()
    with pytest.raises(ConnectionError, match="the server of the logs is down"):
        fedssl.run(recipe, path, observers=[failing, after])
    assert RunDirectory.open(path).checkpoint.round == fails_after
    assert failing.began == [(recipe.name, path, 0)]
    assert failing.committed == failing.rounds
    assert failing.ended == after.ended == [fails_after == 3]
    assert failing.rounds == [*after.rounds, fails_after] == list(range(fails_after + 1))
    resumed = Recorder()
    fedssl.resume(path, observers=[resumed])
    rows = RunDirectory.open(path).read_metrics()
    assert resumed.began == [(recipe.name, path, 2)] * (fails_after == 1)
    assert resumed.rounds == list(range(fails_after + 1, 4))
    assert failing.rows + resumed.rows == rows
    assert contents(path) == contents(finished(recipe))
    assert scalars(path) == [(number, f"{metric}/{who}", value) for number, who, metric, value in rows]


def scalars(path: Path) -> list[tuple[int, str, float]]:
    """The values in TensorBoard's events in the order of the files."""
    events = [event for file in sorted((path / "tensorboard").iterdir()) for event in EventFileLoader(str(file)).Load()]
    return [(event.step, v.tag, pytest.approx(v.tensor.float_val[0])) for event in events for v in event.summary.value]


def test_all_that_have_begun_are_ended(recipe, tmp_path):
    first, second, third = Recorder(fails_in="run_ended"), Recorder(), Recorder(fails_in="run_began")
    with pytest.raises(ConnectionError):
        run(recipe, tmp_path / "run", Observers([first, second, third]))
    assert first.ended == second.ended == [False]
    assert third.ended == []
    assert RunDirectory.open(tmp_path / "run").checkpoint.round == -1


MINE = "from fedssl import Observer\nclass Mine(Observer):\n    pass\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.py", None, r"an observer is an existing \.py file with one subclass of fedssl\.Observer, got "),
        ("mine.txt", MINE, r"an observer is an existing \.py file "),
        ("mine.py", "x = 1\n", r"mine\.py must define exactly one subclass of Observer, got 0"),
        ("two.py", f"{MINE}class Other(Observer): pass\n", "two.py must define exactly one subclass .*, got 2"),
        ("broken.py", "import nothing_of_that_name\n", r"broken\.py could not be imported: ModuleNotFoundError"),
        ("ends.py", "raise SystemExit(3)\n", r"ends\.py could not be imported: SystemExit: 3"),
        ("asks.py", MINE.replace("pass", "def __init__(self, key): ..."), r"asks\.py: Mine\(\) failed: TypeError"),
    ],
)
def test_a_file_without_one_usable_observer_is_refused(name, text, message, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load_observer(tmp_path / name)


def test_a_failure_in_a_method_that_the_class_of_the_file_inherits_is_named_too(tmp_path):
    (tmp_path / "mine.py").write_text(f"from {__name__} import Recorder\n\n\nclass Mine(Recorder):\n    pass\n")
    with pytest.raises(UserError, match=r"mine\.py, round_ended failed: IndexError: .*; finished rounds are kept"):
        load_observer(tmp_path / "mine.py").round_ended(0, ())


def test_any_failure_of_an_observer_is_one_line_that_names_it_and_its_line(tmp_path):
    """mlflow's errors are of types of its own, and take several lines."""
    body = "def warn(self, text):\n        raise KeyError('not\\nallowed')"
    frozen = "from dataclasses import dataclass\n" + MINE.replace("class ", "@dataclass(frozen=True)\nclass ")
    (tmp_path / "mine.py").write_text(frozen.replace("pass", body))
    observer = load_observer(tmp_path / "mine.py")
    with pytest.raises(UserError) as caught:
        observer.warn("slow")
    with pytest.raises(UserError, match=r"mine\.py, warn failed: TypeError: .* unexpected keyword argument 'x'"):
        observer.warn(x=1)
    assert str(caught.value) == (
        f"the observer {tmp_path / 'mine.py'}, warn failed in line 6: KeyError: 'not\\nallowed'; finished rounds "
        "are kept: correct the observer or leave it out, and continue with fedssl run --resume RUN"
    )


# The page


def with_the_pages_example(title: str, recipe: Recipe, folder: Path, stops_after: int) -> list[MetricRow]:
    """Log a run that is stopped after a round and resumed with one round more; gives its metrics."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "example.py").write_text(next(block for block in blocks if f"class {title}" in block))
    stops = Recorder(fails_after=stops_after)
    with pytest.raises(ConnectionError):
        run(recipe, folder / "run", Observers([load_observer(folder / "example.py"), stops]))
    more = [f"rounds={recipe.rounds + 1}"]
    return resume(folder / "run", load_observer(folder / "example.py"), overrides=more).read_metrics()


def test_the_example_for_mlflow_logs_a_run_that_is_stopped_and_goes_on_with_more_rounds(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # later releases ask for it
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    rows = with_the_pages_example("MLflowLogger", recipe, tmp_path, stops_after=1)
    client = mlflow.MlflowClient()
    (logged,) = client.search_runs(["0"])
    assert (logged.info.run_name, logged.info.status) == ("run", "FINISHED")
    assert logged.data.params == {"recipe": recipe.name, "seed": str(recipe.seed)}
    assert logged.data.tags["rounds"] == "4"
    history = [m for key in logged.data.metrics for m in client.get_metric_history(logged.info.run_id, key)]
    expected = {(number, f"{metric}/{who}", value) for number, who, metric, value in rows}
    assert {(m.step, m.key, m.value) for m in history} == expected


def test_the_example_for_weights_and_biases_calls_it_so(recipe, tmp_path, monkeypatch):
    """Against a module that records the calls: the real one needs an account or a server."""
    wandb = Mock()
    wandb.init.return_value.id = "abc"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    rows = with_the_pages_example("WandbLogger", recipe, tmp_path, stops_after=2)
    settings = {"project": "fedssl", "resume": "allow", "name": "run", "allow_val_change": True}
    config = recipe.model_dump(mode="json")
    logs = [call.init().log({f"{m}/{who}": v for number, who, m, v in rows if number == n}, step=n) for n in range(5)]
    begin = call.init(**settings, config=config, id=None)
    again = call.init(**settings, config=config | {"rounds": 4}, id="abc")
    ends = [call.init().finish(exit_code=code) for code in (1, 0)]
    assert wandb.mock_calls == [begin, *logs[:3], ends[0], again, *logs[3:], ends[1]]
