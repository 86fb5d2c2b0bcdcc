"""The rounds of the Flower engine, without processes: the same run as in one process; lost and broken answers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, MetricRecord, RecordDict

from fedssl.engines import in_process
from fedssl.engines.flower.server import make_server_app
from fedssl.engines.flower.wire import from_records, to_records
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.recipe.reading import load_recipe
from fedssl.recipe.recipe import Recipe
from fedssl.run_folder.creation import alone_in
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED, FEDU2
from tests.fedssl.data.data_files import random_pixels
from tests.fedssl.engines.flower.loop_grid import KINDS, run_on, start, write_sites
from tests.fedssl.engines.stopped_runs import contents, metric


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_is_the_one_in_this_process_bit_for_bit(kind, tiny, tmp_path):
    recipe = tiny(**KINDS[kind])
    in_process.run(recipe, tmp_path / "a")
    run_on(recipe, *start(recipe, tmp_path / "b"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("kind", ["hetero_ssfl", "fedu2", "lw_fedssl", "one_optimizer", "personal"])
def test_clients_keep_their_states_at_their_sites(kind, quick, tiny, tmp_path):
    in_process.run(tiny(**KINDS[kind]), tmp_path / "a")
    recipe = quick(**KINDS[kind])
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    assert run_on(recipe, directory, grid) == []
    for name in ("metrics.csv", "spectrum.csv", "partition.csv", "checkpoints/server.round-00002.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for k in range(3):
        [*_, newest] = sorted((tmp_path / f"state{k}" / "run").glob("client-*"))
        assert newest.read_bytes() == (tmp_path / "a" / "checkpoints" / newest.name).read_bytes()
    assert not list((tmp_path / "b" / "checkpoints").glob("client*"))
    with pytest.raises(UserError, match="client 0's model is at its own site"):
        directory.client_state(0)


def test_interrupted_between_rounds_the_run_continues_from_the_same_states(quick, tiny, tmp_path, monkeypatch):
    in_process.run(tiny(**ALIGNED, rounds=3), tmp_path / "a")
    recipe = quick(**ALIGNED, rounds=3)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    monkeypatch.setattr(RunDirectory, "commit", interrupt_after(2, RunDirectory.commit))
    with pytest.raises(KeyboardInterrupt):
        run_on(recipe, directory, grid)
    monkeypatch.undo()
    directory = RunDirectory.open(tmp_path / "b")
    assert directory.checkpoint.round == 1  # round 2 was trained at the sites, and is trained again
    directory.roll_back()
    run_on(recipe, directory, grid)
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()


def interrupt_after(commits: int, real):
    calls = []

    def commit(*arguments, **keys):
        calls.append(None)
        if len(calls) > commits:
            raise KeyboardInterrupt
        real(*arguments, **keys)

    return commit


def test_a_site_that_lost_its_state_is_left_out_and_named(quick, tmp_path):
    recipe = quick(**AVERAGED)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))

    def lose(node, reply):
        for file in (tmp_path / "state1").rglob("*.round-00001.*"):
            file.unlink()

    grid.tamper = lose
    warnings = run_on(recipe, directory, grid)
    assert len(warnings) == 1
    assert "round 2: client 1 is left out: " in warnings[0]
    assert "cannot be read as a checkpoint" in warnings[0]
    assert metric(tmp_path / "b", "missing", 2) == {"1": 1.0}


def test_stragglers_are_dropped_and_counted(quick, tmp_path):
    recipe = quick(**AVERAGED, guard={"minimum_answers": 2})
    directory, grid = start(recipe, tmp_path / "b")
    grid.silent = {12}
    warnings = run_on(recipe, directory, grid)
    assert warnings == [f"round {n}: client 1 is left out: no answer within 100 s" for n in (1, 2)]
    assert metric(tmp_path / "b", "missing", 1) == {"1": 1.0}
    assert metric(tmp_path / "b", "bytes_up", 1).keys() == {"0", "2"}
    assert "1,1,no answer within 100 s" in (tmp_path / "b" / "refused.csv").read_text()
    assert directory.client_round(1) is None
    assert directory.client_round(0) == 2


def test_under_the_minimum_the_run_ends_with_what_was_committed(quick, tmp_path):
    recipe = quick(**AVERAGED, guard={"minimum_answers": 3})
    directory, grid = start(recipe, tmp_path / "b")
    grid.silent = {12}
    with pytest.raises(UserError, match=r"round 1: 2 of 2 answers .*minimum_answers is 3; client 1: no answer within"):
        run_on(recipe, directory, grid)
    assert RunDirectory.open(tmp_path / "b").checkpoint.round == 0


def test_a_round_without_any_answer_is_under_every_minimum(quick, tmp_path):
    recipe = quick(**AVERAGED)
    directory, grid = start(recipe, tmp_path / "b")
    grid.silent = {11, 12, 13}
    with pytest.raises(
        UserError, match=r"round 1: 0 of 3 clients answered, but guard.minimum_answers is 1; client 0: no answer"
    ):
        run_on(recipe, directory, grid)
    assert RunDirectory.open(tmp_path / "b").checkpoint.round == 0


def test_a_run_is_worked_on_by_one_process_at_a_time(tmp_path):
    with (
        alone_in(tmp_path),
        pytest.raises(UserError, match="another process is at work on this run"),
        alone_in(tmp_path),
    ):
        pass
    with alone_in(tmp_path):
        pass


def test_refused_answers_are_named_and_their_clients_train_on_from_before(quick, tmp_path):
    recipe = quick(**AVERAGED, guard={"minimum_answers": 2})
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    last = next(iter(build_federation(recipe).method.initial_state().tensors))

    def poison(node, reply):
        if node == 12 and "tensors" in reply.content and reply.content["answer"]["round"] == 1:
            message = from_records(reply.content)
            message.tensors[last].fill_(float("nan"))
            reply.content["tensors"] = to_records(message)["tensors"]

    grid.tamper = poison
    warnings = run_on(recipe, directory, grid)
    assert warnings == [f"round 1: the answer of client 1 is left out: {last} holds NaN"]
    assert metric(tmp_path / "b", "refused", 1) == {"1": 1.0}
    assert directory.client_round(1) == 2


def test_an_answer_of_many_numbers_or_with_the_engines_metrics_is_refused(quick, tmp_path):
    recipe = quick(**AVERAGED, rounds=1)
    directory, grid = start(recipe, tmp_path / "b")
    extra = {12: {"bytes_up": 1.0}, 13: {f"m{i}": 1.0 for i in range(1000)}}

    def tamper(node, reply):
        if node in extra and "metrics" in reply.content:
            reply.content["metrics"] = MetricRecord(dict(reply.content["metrics"]) | extra[node])

    grid.tamper = tamper
    [shadow, many] = run_on(recipe, directory, grid)
    assert shadow.endswith("client 1 is left out: the metric bytes_up has a name that only the server may use")
    assert re.search(r"client 2 is left out: it has 100\d numbers and metrics, more than 1000", many)
    assert metric(tmp_path / "b", "bytes_up", 1).keys() == {"0"}


def test_what_the_servers_parts_log_of_a_client_no_client_says_itself(quick, tmp_path):
    recipe = quick(**FEDU2, rounds=1)
    directory, grid = start(recipe, tmp_path / "b")

    def tamper(node, reply):
        if node == 12 and "metrics" in reply.content:
            reply.content["metrics"] = MetricRecord(dict(reply.content["metrics"]) | {"eua_weight": 123.0})

    grid.tamper = tamper
    assert run_on(recipe, directory, grid) == []
    rows = [row for row in directory.read_metrics() if row[2] == "eua_weight"]
    assert [row[1] for row in rows] == ["0", "1", "2"]
    assert sum(row[3] for row in rows) == pytest.approx(1)


def test_an_evaluation_that_says_more_than_measures_is_left_out(quick, tmp_path):
    recipe = quick(rounds=1)
    directory, grid = start(recipe, tmp_path / "b")

    def tamper(node, reply):
        if node == 12 and "numbers" in reply.content:
            reply.content["numbers"] = MetricRecord(dict(reply.content["numbers"]) | {"evaluation/bytes_up": 1e9})

    grid.tamper = tamper
    warnings = run_on(recipe, directory, grid)
    assert warnings == [
        f"round {n}: client 1 is not evaluated: its evaluation holds 'bytes_up', which is not a measure of a model"
        for n in (0, 1)
    ]
    assert metric(tmp_path / "b", "knn", 1).keys() == {"0", "2", "mean"}


def serve(recipe: Recipe, folder: Path, grid) -> None:
    """The ServerApp of a deployment, as Flower calls it."""
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    app = make_server_app(folder / "recipe.yaml")
    app(grid, Context(1, 1, {}, RecordDict(), {"output": str(folder / "run")}))


def test_a_failed_run_goes_on_with_other_waits_and_another_minimum(quick, tmp_path):
    recipe = quick(**AVERAGED, guard={"minimum_answers": 3})
    _, grid = start(recipe, tmp_path / "nodes", write_sites(tmp_path))
    grid.silent = {12}
    with pytest.raises(UserError, match=r"guard.minimum_answers is 3"):
        serve(recipe, tmp_path, grid)
    stored = (tmp_path / "run" / "recipe.yaml").read_text()
    other = recipe.model_copy(update={"rounds": 3})
    with pytest.raises(
        UserError, match=r"another recipe: rounds is 2 in that run, but 3 in this app's recipe.*name another folder"
    ):
        serve(other, tmp_path, grid)
    looser = recipe.guard.model_copy(update={"minimum_answers": 2, "largest_value": 2e6})
    with pytest.raises(UserError, match=r"guard.largest_value is 1000000.0 in that run, but 2000000.0 in this"):
        serve(recipe.model_copy(update={"guard": looser}), tmp_path, grid)
    assert (tmp_path / "run" / "recipe.yaml").read_text() == stored
    changed = {
        "guard": recipe.guard.model_copy(update={"minimum_answers": 2}),
        "flower": recipe.flower.model_copy(update={"round_seconds": 50, "connect_seconds": 5}),
    }
    serve(recipe.model_copy(update=changed), tmp_path, grid)
    assert RunDirectory.open(tmp_path / "run").checkpoint.finished
    kept = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (kept.guard.minimum_answers, kept.flower.round_seconds, kept.flower.connect_seconds) == (2, 50, 5)
    assert "no answer within 50 s" in (tmp_path / "run" / "refused.csv").read_text()


def labelled(count: int) -> dict[str, np.ndarray]:
    return {"x": random_pixels(count, 8, 8), "y": np.arange(count) % 10}


def test_a_server_whose_test_images_have_changed_does_not_go_on(quick, tmp_path):
    arrays = {f"{kind}_{part}": values for part in ("train", "test") for kind, values in labelled(60).items()}
    np.savez(tmp_path / "own.npz", **arrays)
    data = {"name": "npz", "path": str(tmp_path / "own.npz")}
    recipe = quick(**AVERAGED, data=data, guard={"minimum_answers": 3})
    _, grid = start(recipe, tmp_path / "nodes", write_sites(tmp_path))
    grid.silent = {12}
    with pytest.raises(UserError, match=r"guard.minimum_answers is 3"):
        serve(recipe, tmp_path, grid)
    before = contents(tmp_path / "run")
    np.savez(tmp_path / "own.npz", **arrays | {"x_test": 255 - arrays["x_test"]})
    with pytest.raises(UserError, match="have changed since the run began: the test set no longer has"):
        serve(recipe, tmp_path, grid)
    assert contents(tmp_path / "run") == before
