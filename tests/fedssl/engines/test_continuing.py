"""A run goes on with more rounds and other options as if it had been begun so; its folder tells what was changed."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import fedkernels
import fedssl
from fedssl.engines.in_process import resume
from fedssl.errors import UserError
from fedssl.recipe.changes import consequences
from fedssl.recipe.reading import parse_recipe
from fedssl.reports.report import write_report
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import ALIGNED, AVERAGED, FEDU2, LW_FEDSSL, tiny_values
from tests.fedssl.data.data_files import random_pixels
from tests.fedssl.engines.short_runs import SMALL, StopsAfterRoundOne, everything
from tests.fedssl.killed_runs import Killed, KilledIn

KINDS = {
    "aligned": ALIGNED | SMALL,
    "fedu2": FEDU2 | SMALL,
    "two of three clients": AVERAGED | SMALL | {"clients_per_round": 2, "evaluation": {"every": 1, "neighbors": 3}},
}


@pytest.fixture
def two_rounds(finished, tiny, tmp_path) -> Path:
    """A copy of a finished run of two rounds."""
    return shutil.copytree(finished(tiny(**ALIGNED | SMALL)), tmp_path / "run")


def states(path: Path) -> dict[str, bytes]:
    """The states after the last round."""
    return {file.name: file.read_bytes() for file in (path / "checkpoints").glob("*round-00004*")}


@pytest.mark.parametrize("kind", KINDS)
def test_two_rounds_that_go_on_to_four_and_are_killed_equal_four(kind, finished, tiny, tmp_path):
    path = shutil.copytree(finished(tiny(**KINDS[kind])), tmp_path / "run")
    with pytest.raises(Killed):
        resume(path, KilledIn(4), overrides=["rounds=4"])
    assert not (path / "spectrum.csv").exists()
    assert resume(path).checkpoint.finished
    whole = finished(tiny(**KINDS[kind], rounds=4))
    assert states(path) == states(whole) != {}
    assert (path / "spectrum.csv").read_bytes() == (whole / "spectrum.csv").read_bytes()
    rows, expected = (RunDirectory.open(folder).read_metrics() for folder in (path, whole))
    assert [row for row in rows if row in expected] == expected
    assert {row[0] for row in rows if row not in expected} == {2}  # what only a last round measures
    assert read_run(path).recipe == read_run(whole).recipe


def test_a_longer_run_in_python_and_its_history(two_rounds, caplog):
    run = fedssl.resume(two_rounds, ["rounds=3", "evaluation.every=1"], clients_parallel=2)
    assert (run.last_round, run.finished, run.recipe["evaluation"]["every"]) == (3, True, 1)
    assert "equals a run of 3 rounds from the start" in caplog.text
    changes = [(c["round"], c["version"], c["option"], c["before"], c["after"]) for c in run.history]
    version = fedkernels.__version__
    expected = {("rounds", "2", "3"), ("evaluation.every", "0", "1"), ("clients_parallel", "1", "2")}
    assert {change[2:] for change in changes} == expected
    assert {change[:2] for change in changes} == {("2", version)}
    fedssl.resume(two_rounds, ["rounds=4"])
    assert [(c["round"], c["after"]) for c in read_run(two_rounds).history][3:] == [("3", "4")]
    page = write_report(two_rounds, collapse=False, images=False).read_text()
    assert "<h2>History</h2>" in page
    assert "evaluation.every" in page
    (two_rounds / "history.csv").write_text("round\n")
    with pytest.raises(UserError, match=r"history\.csv was changed"):
        fedssl.resume(two_rounds)


REFUSED: dict[str, tuple[list[str], str]] = {
    "fewer": (["rounds=1"], "rounds=1 is fewer than before: 2 rounds are done"),
    "seed": (["rounds=4", "seed=3"], "seed cannot change when a run goes on: every random number"),
    "training": (["training.learning_rate=1"], r"learning_rate cannot change .* trained with it so far \(2 rounds are"),
    "a part": (["regularizers.0.name=./evil.py"], r"regularizers\.0\.name cannot change"),
    "all of a group": (["data={name: digits}"], "data cannot change"),
    "misspelt": (["round=4"], "round cannot change .* only rounds, description"),
    "no number": (["rounds=many"], "rounds: .*many"),
    "no key": (["fedbyol"], "'fedbyol' is not key=value"),
    "finished": (["evaluation.every=1"], "is finished, so nothing would be done with another evaluation.every"),
    "other data": (["rounds=3", "data.public_path=PUBLIC"], "two sources of public images"),
    "no such device": (["rounds=3", "device=tpu"], "device: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_not_change_is_refused_by_name_and_nothing_is_lost(case, two_rounds):
    overrides, message = REFUSED[case]
    before = everything(two_rounds)
    with pytest.raises(UserError, match=message):
        fedssl.resume(two_rounds, overrides)
    assert everything(two_rounds) == before


def test_what_is_the_same_changes_nothing(two_rounds):
    before = everything(two_rounds)
    assert fedssl.resume(two_rounds, ["rounds=2"]).finished
    assert everything(two_rounds) == before
    with pytest.raises(TypeError, match="expected a list"):
        fedssl.resume(two_rounds, "rounds=3")


def test_a_layer_wise_run_has_no_more_rounds(finished, tiny, tmp_path):
    path = shutil.copytree(finished(tiny(**LW_FEDSSL)), tmp_path / "run")
    with pytest.raises(UserError, match=r"rounds=4 does not go with schedule layer_wise: .* start a new run"):
        resume(path, overrides=["rounds=4"])


def test_data_may_move_and_not_change(tiny, tmp_path):
    arrays = {"x_train": random_pixels(60, 8, 8), "y_train": np.arange(60) % 2}
    arrays |= {"x_test": random_pixels(10, 8, 8, seed=1), "y_test": np.arange(10) % 2}
    np.savez(tmp_path / "a.npz", **arrays)
    np.savez(tmp_path / "other.npz", **arrays | {"x_test": arrays["x_train"][:10]})
    own = {"data": {"name": "npz", "path": str(tmp_path / "a.npz")}, "partition": {"name": "iid", "clients": 2}}
    evaluation = {"neighbors": 3, "linear": {"epochs": 1}}
    path = tmp_path / "run"
    with pytest.raises(Killed):
        fedssl.run(tiny(**AVERAGED, **own, evaluation=evaluation), path, observers=[StopsAfterRoundOne()])
    before = everything(path)
    (tmp_path / "a.npz").rename(tmp_path / "b.npz")
    moved = f"data.path={tmp_path / 'b.npz'}"
    new = "evaluation.downstream.{}={{name: npz, path: " + str(tmp_path / "other.npz") + "}}"
    with pytest.raises(UserError, match="the test set no longer has the same images"):
        fedssl.resume(path, [f"data.path={tmp_path / 'other.npz'}"])
    assert everything(path) == before
    assert (2, "global", "downstream_more_knn") in fedssl.resume(path, [moved, new.format("more")]).values
    digests = json.loads((path / "data_digests.json").read_text())
    assert "the test set of evaluation.downstream.more" in digests
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(UserError, match=r"the test set of evaluation\.downstream\.more no longer"):
        fedssl.resume(path, ["rounds=3"])


@pytest.mark.parametrize("moment", range(1, 6))
def test_a_kill_while_options_change_leaves_the_old_ones_or_the_new(moment, two_rounds, monkeypatch):
    """The third renaming, of the manifest, decides; the fourth and fifth put the files in place."""
    real, calls = os.replace, []

    def replace(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == moment:
            raise Killed
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(Killed):
            resume(two_rounds, overrides=["rounds=3"])
    after = read_run(resume(two_rounds).path)
    assert after.finished
    assert (after.rounds, after.last_round, len(after.history)) == ((2, 2, 0) if moment <= 3 else (3, 3, 1))
    assert not list(two_rounds.glob("*.next"))


COSINE = {"training": {"learning_rate": 0.4, "learning_rate_schedule": "cosine"}}
NOISE = {"name": "fixed_clipping", "clipping_norm": 1, "noise_multiplier": 1}
PRIVATE = AVERAGED | {"engine": "flower-simulation", "flower": {"differential_privacy": NOISE}}
SENTENCES = {
    "finished": ({}, 4, 2, ["equals a run of 4 rounds from the start", "measured again after round 4"]),
    "stopped": ({}, 4, 1, ["equals a run of 4 rounds"]),
    "cosine": (COSINE, 4, 2, [r"round 3 has 0\.2 \(over 2 rounds it would be 0 there\)", "measured"]),
    "cosine stopped": (COSINE, 3, 1, [r"round 2 has 0\.3 \(over 2 rounds it would be 0\.2 there"]),
    "privacy": (PRIVATE, 4, 1, ["equals", "fixed_clipping each further round spends more"]),
    "as many": (COSINE, 2, 1, []),
    "another device": ({"device": "auto"}, 2, 1, ["rounds differently"]),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_what_more_rounds_mean_is_said(case):
    changes, rounds, done, expected = SENTENCES[case]
    before = parse_recipe(tiny_values(**changes | {"device": "cpu"}))
    after = parse_recipe(tiny_values(**changes, rounds=rounds))
    said = consequences(before, after, done)
    assert len(said) == len(expected)
    for sentence, part in zip(said, expected, strict=True):
        assert re.search(part, sentence), sentence
