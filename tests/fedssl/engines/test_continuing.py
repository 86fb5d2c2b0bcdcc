"""A run goes on with more rounds and other options as if it had been begun so; its folder tells what was changed."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import DEFAULT, patch

import numpy as np
import pytest
import torch
import yaml

import fedkernels
import fedssl
from fedssl.engines import in_process, rounds
from fedssl.engines.continuing import Engine
from fedssl.engines.in_process import resume
from fedssl.errors import UserError
from fedssl.export.trained_encoder import encoder_of_run
from fedssl.messages import Message
from fedssl.recipe.changes import changed_recipe, consequences
from fedssl.recipe.reading import load_stored_recipe, parse_recipe
from fedssl.reports.report import write_report
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import ALIGNED, AVERAGED, tiny_values
from tests.fedssl.engines.short_runs import SMALL, SMALL_ALIGNED, StopsAfterRoundOne, contents, everything
from tests.fedssl.killed_runs import Killed, KilledIn

ONE = SMALL_ALIGNED
SAMPLED = AVERAGED | SMALL | {"clients_per_round": 2}


@pytest.fixture
def two_rounds(finished, tiny, tmp_path) -> Path:
    """A copy of a finished run of two rounds."""
    return shutil.copytree(finished(tiny(**ONE)), tmp_path / "run")


@pytest.mark.parametrize("kind", [ONE, SAMPLED], ids=["aligned", "two of three clients"])
def test_two_rounds_that_go_on_to_four_and_are_killed_equal_four(kind, finished, tiny, tmp_path):
    path = shutil.copytree(finished(tiny(**kind)), tmp_path / "run")
    with pytest.raises(Killed):
        resume(path, KilledIn(4), overrides=["rounds=4"])
    assert not (path / "spectrum.csv").exists()
    assert resume(path).checkpoint.finished
    whole = finished(tiny(**kind, rounds=4))
    for file in (*whole.glob("checkpoints/*round-00004*"), whole / "spectrum.csv", whole / "recipe.yaml"):
        assert (path / file.relative_to(whole)).read_bytes() == file.read_bytes()
    rows, expected = (RunDirectory.open(folder).read_metrics() for folder in (path, whole))
    assert [row for row in rows if row in expected] == expected
    assert {row[0] for row in rows if row not in expected} == {2}  # what only a last round measures


def test_the_history_is_kept_and_shown(two_rounds):
    more = ["rounds=3", "evaluation.every=1", "clients_parallel=2", "training.stop_at_collapse=true"]
    run = fedssl.resume(two_rounds, more)
    assert (run.last_round, run.recipe["evaluation"]["every"]) == (3, 1)
    run = fedssl.resume(two_rounds, ["rounds=4"])
    changes = {(c["round"], c["version"], c["option"], c["before"], c["after"]) for c in run.history}
    expected = [("2", "rounds", "2", "3"), ("2", "evaluation.every", "0", "1"), ("2", "clients_parallel", "1", "2")]
    expected.append(("2", "training.stop_at_collapse", "False", "True"))
    assert changes == {(n, fedkernels.__version__, *rest) for n, *rest in (*expected, ("3", "rounds", "3", "4"))}
    assert "<h2>History</h2>" in write_report(two_rounds, images=False).read_text()
    (two_rounds / "history.csv").write_text("round\n")
    with pytest.raises(UserError, match=r"history\.csv was changed"):
        fedssl.resume(two_rounds)


REFUSED: dict[str, tuple[list[str], str]] = {
    "fewer": (["rounds=1"], "rounds=1 is fewer than before: 2 rounds are done"),
    "seed": (["rounds=4", "seed=3"], r"seed cannot change when a run goes on \(2 rounds are done\)"),
    "training": (["training.learning_rate=1"], r"learning_rate cannot change when a run goes on \(2 rounds are"),
    "images": (
        ["rounds=4", "evaluation.images=20"],
        "evaluation.images cannot change when a run goes on: fedssl evaluate",
    ),
    "a part": (["regularizers.0.name=./evil.py"], r"regularizers\.0\.name cannot change"),
    "no key": (["fedbyol"], "'fedbyol' is not key=value"),
    "finished": (["evaluation.every=1"], "is finished, so nothing would be done with another evaluation.every"),
    "nothing": (["rounds=2"], ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_not_change_is_refused_by_name_and_nothing_is_lost(case, two_rounds):
    overrides, message = REFUSED[case]
    before = everything(two_rounds)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        fedssl.resume(two_rounds, overrides)
    assert everything(two_rounds) == before


def test_data_may_move_and_not_change(noisy, tmp_path):
    recipe, path, other = noisy(**AVERAGED, evaluation=SMALL["evaluation"]), tmp_path / "run", tmp_path / "other.npz"
    with pytest.raises(Killed):
        fedssl.run(recipe, path, observers=[StopsAfterRoundOne()])
    before, arrays = everything(path), dict(np.load(recipe.data.path))
    np.savez(other, **arrays | {"x_test": arrays["x_test"][::-1]})
    with pytest.raises(UserError, match="the test set no longer has the same images"):
        fedssl.resume(path, [f"data.path={other}"])
    assert everything(path) == before
    moved = shutil.copy(recipe.data.path, tmp_path / "moved.npz")
    changes = [f"data.path={moved}", f"evaluation.downstream.more={{name: npz, path: {other}}}"]
    assert (2, "global", "downstream_more_knn") in fedssl.resume(path, changes).values
    np.savez(other, **arrays)  # held from then on
    with pytest.raises(UserError, match=r"the test set of evaluation\.downstream\.more no longer"):
        fedssl.resume(path, ["rounds=3"])


@contextmanager
def killed_at_renaming(moment: int) -> Iterator[None]:
    outcomes = [*[DEFAULT] * (moment - 1), Killed]
    with patch.object(os, "replace", wraps=os.replace, side_effect=outcomes), pytest.raises(Killed):
        yield


@pytest.mark.parametrize("moment", range(1, 6))
def test_a_kill_while_options_change_leaves_the_old_ones_or_the_new(moment, two_rounds):
    """The third renaming, of the manifest, decides."""
    with killed_at_renaming(moment):
        resume(two_rounds, overrides=["rounds=3"])
    after = read_run(resume(two_rounds).path)
    assert (after.rounds, after.last_round, len(after.history)) == ((2, 2, 0) if moment <= 3 else (3, 3, 1))


# The best round


@pytest.mark.parametrize("kind", [ONE, SAMPLED], ids=["own models", "a global model"])
def test_a_run_that_gets_no_better_ends_and_its_best_round_is_exported(kind, tiny, tmp_path, monkeypatch):
    """It is the same when it was killed, or has gone back; the states of no other round are kept for it."""
    found = [9.2, 9.0, 2.0, 2.0, 9.5]
    measures = lambda federation, model, number: ({"view_retrieval": found[number]}, torch.ones(1))  # noqa: E731
    monkeypatch.setattr(rounds, "evaluate_after", measures)
    recipe = tiny(**kind | {"evaluation": {"every": 1, "patience": 2}}, rounds=4)
    whole = in_process.run(recipe, tmp_path / "whole")
    assert (whole.checkpoint.round, whole.checkpoint.finished, whole.checkpoint.best.round) == (3, False, 1)
    with pytest.raises(Killed):
        in_process.run(recipe, tmp_path / "killed", KilledIn(3))
    resume(tmp_path / "killed")
    assert contents(resume(tmp_path / "killed").path) == contents(whole.path)
    first = in_process.run(tiny(**kind, rounds=1), tmp_path / "one")
    best = encoder_of_run(whole.path, client=None if kind is SAMPLED else 0, best=True)
    last = encoder_of_run(first.path, client=None if kind is SAMPLED else 0)
    assert best.round == last.round == 1
    for name, tensor in last.encoder.network.state_dict().items():
        assert torch.equal(best.encoder.network.state_dict()[name], tensor), name
    end = resume(whole.path, overrides=["evaluation.patience=null", "evaluation.keep_best=true", "checkpoints=2"])
    assert (end.checkpoint.finished, end.checkpoint.best.round) == (True, 4)
    back = resume(whole.path, from_round=3, overrides=["evaluation.patience=2"])
    assert (back.checkpoint.round, back.checkpoint.best.round) == (3, 1)
    rounds_kept = {int(file.name.split(".")[1][6:]) for file in whole.path.glob("checkpoints/*.safetensors")}
    assert {1, 3} <= rounds_kept <= {1, 2, 3}
    for file in whole.path.glob("checkpoints/*round-00001*"):
        file.write_bytes(b"x")
    with pytest.raises(UserError, match="was changed since the run wrote it"):
        encoder_of_run(whole.path, client=None if kind is SAMPLED else 0, best=True)
    with pytest.raises(UserError, match=r"keeps no best round: .* evaluation\.keep_best=true and evaluation\.every"):
        encoder_of_run(first.path, best=True)
    with pytest.raises(UserError, match="set every as well"):
        tiny(evaluation={"patience": 1})


def test_only_evaluations_that_took_place_try_the_patience(tiny, tmp_path, monkeypatch):
    measures = lambda federation, model, number: ({"view_retrieval": 9.0 - number}, torch.ones(1))  # noqa: E731
    monkeypatch.setattr(rounds, "evaluate_after", measures)
    recipe = tiny(**SAMPLED | {"evaluation": {"every": 2, "patience": 1}}, rounds=6)
    with pytest.raises(Killed):
        in_process.run(recipe, tmp_path / "run", KilledIn(4))
    real, reads = RunDirectory.read_metrics, []
    monkeypatch.setattr(RunDirectory, "read_metrics", lambda directory: reads.append(directory) or real(directory))
    assert resume(tmp_path / "run", overrides=["evaluation.every=1"]).checkpoint.round == 4
    assert len(reads) == 1  # and not once a round, as the file grows with the rounds


# Back to an earlier round


@pytest.mark.parametrize("kind", [ONE, SAMPLED], ids=["aligned", "sampled"])
def test_back_at_a_round_the_run_is_one_that_never_went_on(kind, finished, tiny, tmp_path):
    """It is killed there once more; its folder keeps the last three rounds and tells what was done."""
    recipe = tiny(**kind, rounds=5)
    whole, path = finished(recipe), tmp_path / "run"
    shutil.copytree(whole, path)
    with pytest.raises(Killed):
        resume(path, KilledIn(4), from_round=3)
    assert {row[0] for row in RunDirectory.open(path).read_metrics()} == {0, 1, 2, 3}
    assert not (path / "spectrum.csv").exists()
    assert not [*path.glob("checkpoints/*round-00005*")]
    run = fedssl.resume(path)
    assert [(row["round"], row["option"], row["before"], row["after"]) for row in run.history] == [
        ("3", "from_round", "5", "3")
    ]
    ours, theirs = contents(path), contents(whole)
    for name in ("history.csv", "checkpoints/manifest.json"):  # the manifest has the history's digest
        ours.pop(name, None), theirs.pop(name, None)
    assert ours == theirs
    assert [one.round for one in RunDirectory.open(path).checkpoint.earlier] == [3, 4]


def test_a_kill_while_it_goes_back_leaves_the_old_round_or_the_earlier_one(finished, tiny, tmp_path):
    whole = finished(tiny(**ONE, rounds=5))
    for moment in (3, 4):  # the third renaming, of the manifest, decides
        path = shutil.copytree(whole, tmp_path / f"run{moment}")
        with killed_at_renaming(moment):
            resume(path, from_round=3)
        directory = RunDirectory.open(path)
        assert directory.checkpoint.round == (5 if moment == 3 else 3)
        assert resume(path).checkpoint.finished
        assert (path / "spectrum.csv").read_bytes() == (whole / "spectrum.csv").read_bytes()


def test_where_a_run_cannot_go_back_to_nothing_is_lost(finished, tiny, tmp_path):
    path = shutil.copytree(finished(tiny(**ONE, rounds=5)), tmp_path / "run")
    before = everything(path)
    for number in (0, 2, 6):
        with pytest.raises(UserError, match=f"from round 5 to round {number}: .* whose states are kept are 3, 4 "):
            fedssl.resume(path, from_round=number)
    with pytest.raises(UserError, match=r"learning_rate cannot change .* \(3 rounds are done\)"):
        fedssl.resume(path, ["training.learning_rate=1"], from_round=3)
    fedssl.resume(path, from_round=5)  # it is there already
    assert everything(path) == before
    state = path / "checkpoints" / "server.round-00003.safetensors"
    state.write_bytes(b"x" * len(state.read_bytes()))
    with pytest.raises(UserError, match=r"server\.round-00003\.safetensors was changed since the run wrote it"):
        fedssl.resume(path, from_round=3)
    assert fedssl.resume(path, ["checkpoints=1", "rounds=6"], from_round=4).last_round == 6
    assert RunDirectory.open(path).checkpoint.earlier == []
    assert len([*path.glob("checkpoints/server.*")]) == 1


def test_with_differential_privacy_no_run_goes_back(tiny, tmp_path):
    recipe = tiny(**AVERAGED | SMALL, engine="flower-simulation", flower=NOISE)
    directory = RunDirectory.create(tmp_path / "run", {"recipe.yaml": recipe.to_yaml()})
    for number in (0, 1):
        directory.commit(number, Message(), finished=False, keep=2)
    with pytest.raises(UserError, match="cannot go back to round 0: with differential privacy"):
        Engine(None, None).resume(tmp_path / "run", from_round=0)


COSINE = {"training": {"learning_rate": 0.4, "learning_rate_schedule": "cosine"}}
NOISE = {"differential_privacy": {"name": "fixed_clipping", "clipping_norm": 1, "noise_multiplier": 1}}


@pytest.mark.parametrize(
    ("changes", "rounds", "done", "expected"),
    [
        (COSINE, 4, 2, [r"round 3 has 0\.2 \(over 2 rounds it would be 0 there\)"]),
        (COSINE, 3, 1, [r"round 2 has 0\.3 \(over 2 rounds it would be 0\.2 there"]),
        (AVERAGED | {"engine": "flower", "flower": NOISE}, 4, 1, ["each further round spends more"]),
        (COSINE | {"device": "auto"}, 2, 1, ["rounds differently"]),
    ],
)
def test_what_more_rounds_mean_is_said(changes, rounds, done, expected):
    recipes = (parse_recipe(tiny_values(**changes | more)) for more in ({"device": "cpu"}, {"rounds": rounds}))
    for part, sentence in zip(expected, consequences(*recipes, done), strict=True):
        assert re.search(part, sentence)


@pytest.mark.parametrize(
    ("section", "option", "still", "other"),
    [
        ("training", "processes", 1, 2),
        ("flower", "client_cpus", 1, 2),
        ("guard", "largest_value", 1e6, 1e7),
        ("regularizers.0", "statistics", "batch", "running"),
        ("aggregators.0", "weights", None, [1.0, 2.0]),
        ("evaluation.semi_supervised_protocol", "weight_decay", None, 0.1),
    ],
)
def test_a_stored_option_that_is_gone_is_left_out_or_refused_by_its_name(section, option, still, other, tiny, tmp_path):
    """Every run before stored it. The run goes on where what it had is what now always holds."""
    recipe = tiny(**ALIGNED)
    for number, value in enumerate((still, other)):
        values = recipe.model_dump(mode="json") | {"client_states": "memory"}
        mapping = values
        for key in section.split("."):
            mapping = mapping[int(key) if isinstance(mapping, list) else key]
        mapping[option] = value
        directory = RunDirectory.create(tmp_path / str(number), {"recipe.yaml": yaml.safe_dump(values)})
        if value == still:
            assert load_stored_recipe(directory) == recipe
            assert changed_recipe(directory.path / "recipe.yaml", recipe, ["rounds=9"], done=1)[0].rounds == 9
        else:
            with pytest.raises(UserError, match=rf"{section}\.{option}: unknown key"):
                load_stored_recipe(directory)
