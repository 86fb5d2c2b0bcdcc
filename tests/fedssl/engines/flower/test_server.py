"""The rounds of the Flower engine, without processes: the same run as in one process; lost and broken answers."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.error import Error
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from google.protobuf.message import DecodeError
from safetensors.torch import save_file

import fedssl
from fedssl.engines.flower import messenger, simulation, wire
from fedssl.engines.flower.server import make_server_app
from fedssl.engines.flower.wire import on_disk, to_records
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.recipe.reading import load_recipe
from fedssl.recipe.recipe import Recipe
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import ALIGNED, AVERAGED, FEDU2
from tests.fedssl.data.data_files import random_pixels
from tests.fedssl.engines.every_tensor import assert_same
from tests.fedssl.engines.flower.loop_grid import (
    KINDS,
    FaultsByRound,
    LoopGrid,
    Prepare,
    after_training,
    changed,
    run_on,
    silent,
    start,
    write_sites,
)
from tests.fedssl.engines.flower.test_wire import mappings
from tests.fedssl.engines.short_runs import SMALL, contents, metric, results, stopped_before_commit
from tests.fedssl.models.test_weights import drawn


@pytest.mark.parametrize("kind", ["lw_fedssl", "hetero_ssfl, bfloat16"])
def test_simulated_the_run_is_the_one_in_this_process_bit_for_bit(kind, finished, tiny, tmp_path, monkeypatch):
    """With its answers on the server's disk, where otherwise only large ones go."""
    kept: list[Message] = []
    monkeypatch.setattr(wire, "_SMALL_ANSWER", 0)
    monkeypatch.setattr(
        "fedssl.engines.flower.server.on_disk",
        lambda message, folder: kept.append(on_disk(message, folder)) or kept[-1],
    )
    recipe = tiny(**KINDS[kind])
    run_on(recipe, *start(recipe, tmp_path / "b"))
    assert contents(tmp_path / "b") == contents(finished(recipe))
    assert len(mappings(tmp_path / "b")) == sum(bool(message.tensors) for message in kept)
    widened = [m for m in kept if all(t.dtype == torch.float32 for t in m.tensors.values() if t.is_floating_point())]
    assert len(widened) == (len(kept) / 2 if "bfloat16" in kind else len(kept)) > 0


def images_in(data: bytes, images: torch.Tensor) -> int:
    """How many of the images stand in some bytes, as they are, scaled to 0..1, or in any float type of that."""
    count = 0
    for image in images:
        forms = [image, image.float(), image.float() / 255, image.half(), (image.float() / 255).bfloat16()]
        forms += [2 * (image.float() / 255) - 1]
        count += any(form.contiguous().view(torch.uint8).numpy().tobytes() in data for form in forms)
    return count


def bytes_of(messages: list[FlowerMessage]) -> bytes:
    return b"".join(part.deflate() for message in messages for part in get_all_nested_objects(message).values())


SITES = ["hetero_ssfl", "hetero_ssfl, int8", "lw_fedssl, bfloat16", "fedu2", "one_optimizer", "personal"]


@pytest.mark.parametrize("kind", SITES)
def test_sites_keep_their_states_and_no_image_or_label_leaves_them(kind, finished, quick, tiny, tmp_path):
    recipe, alone = quick(**KINDS[kind]), finished(tiny(**KINDS[kind]))
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    assert run_on(recipe, directory, grid) == []
    for name in ("metrics.csv", "spectrum.csv", "partition.csv", "checkpoints/server.round-00002.safetensors"):
        assert (alone / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for k in range(3):
        [*_, newest] = sorted((tmp_path / f"state{k}" / "run").glob("client-*.safetensors"))
        assert newest.read_bytes() == (alone / "checkpoints" / newest.name).read_bytes()
    assert not list((tmp_path / "b" / "checkpoints").glob("client*"))
    with pytest.raises(UserError, match="client 0's model is at its own site"):
        directory.client_state(0)
    federation = build_federation(recipe)
    assert len(grid.sent) >= 6
    assert images_in(bytes_of(grid.sent), federation.dataset.train_images) == 0
    labels = federation.dataset.train_labels[federation.client_rows[0]]
    assert labels.numpy().tobytes() not in bytes_of(grid.sent)


def test_this_search_finds_images_in_a_message():
    images = random_pixels(5, 8, 8)
    records = to_records(Message({"batch": torch.from_numpy(images).float() / 255}))
    assert (
        images_in(bytes_of([FlowerMessage(records, dst_node_id=1, message_type="train")]), torch.from_numpy(images))
        == 5
    )


def test_interrupted_between_rounds_the_run_continues_from_the_same_states(finished, quick, tiny, tmp_path):
    recipe = quick(**KINDS["hetero_ssfl"])
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    with stopped_before_commit(2):
        run_on(recipe, directory, grid)
    directory = RunDirectory.open(tmp_path / "b")
    assert directory.checkpoint.round == 1  # round 2 was trained at the sites, and is trained again
    directory.roll_back()
    run_on(recipe, directory, grid)
    alone = finished(tiny(**KINDS["hetero_ssfl"]))
    assert (alone / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()


def test_sites_keep_the_states_to_which_a_run_may_go_back(quick, tmp_path):
    """Client 1 answers the third round no more, nor after it."""
    recipe = quick(**KINDS["hetero_ssfl"], rounds=5)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    faults = {number: silent(12) for number in (3, 4, 5)}
    run_on(recipe, directory, grid, FaultsByRound(grid, faults))
    whole = results(tmp_path / "b")
    for number in (3, 4):
        run = fedssl.resume(tmp_path / "b", from_round=number)
        assert (run.finished, run.last_round) == (False, number)
        run_on(recipe, RunDirectory.open(tmp_path / "b"), grid, FaultsByRound(grid, faults))
        assert results(tmp_path / "b") == whole
    kept = {
        k: sorted(int(file.name[18:23]) for file in tmp_path.glob(f"state{k}/*/client-*.safetensors")) for k in (0, 1)
    }
    assert kept[1] == [0, 1, 2]
    assert {3, 4, 5} <= {*kept[0]} < {*range(6)}


# Answers that do not count


def with_error(code: int) -> Prepare:
    """The SuperLink answers in client 1's place."""

    def prepare(grid: LoopGrid, patch: pytest.MonkeyPatch) -> None:
        real = grid.app

        def app(message, context):
            if (message.metadata.dst_node_id, message.metadata.message_type) == (12, "train"):
                return FlowerMessage(Error(code, "odd"), reply_to=message)
            return real(message, context)

        patch.setattr(grid, "app", app)

    return prepare


def crash(reply: Message) -> None:
    raise RuntimeError("no such\nkernel")


def hang(reply: Message) -> None:
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
    signal.raise_signal(signal.SIGALRM)  # as the timer does when the time is over


def unreadable(grid: LoopGrid, patch: pytest.MonkeyPatch) -> None:
    pull = grid.pull_messages

    def pull_messages(names):
        replies = pull(names)
        if any((r.metadata.message_type, r.metadata.src_node_id) == ("train", 12) for r in replies):
            raise DecodeError("Error parsing message")
        return replies

    patch.setattr(grid, "pull_messages", pull_messages)


def spoil(reply: Message) -> None:
    next(iter(reply.tensors.values())).fill_(float("nan"))


ANOTHERS = r"its answer belongs to another round or client: expected client 1, round \d+, got .*"
#: what happens to client 1's answer in a round, and what is told, as a pattern
LEFT_OUT: list[tuple[Prepare, str]] = [
    (silent(12), "no answer within 100 s"),
    (after_training(crash), "its app failed: no such kernel"),
    (after_training(hang), "its work was stopped after 100 s, the round's deadline .*round_seconds.*"),
    (with_error(ErrorCode.NODE_UNAVAILABLE), "its node is no longer connected"),
    (with_error(ErrorCode.MESSAGE_UNAVAILABLE), "no answer in time"),
    (with_error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE), "no answer in time"),
    (with_error(ErrorCode.UNKNOWN), "its app failed: odd"),
    (unreadable, "its answer cannot be read: Error parsing message"),
    (changed(lambda content: content.pop("answer")), ANOTHERS),
    (changed(lambda content: content["answer"].pop("client")), ANOTHERS),
    (changed(lambda content: content["answer"].pop("round")), ANOTHERS),
    (changed(lambda content: content["answer"].update(client=1.5)), ANOTHERS),
]
#: of an answer that is read and refused
REFUSED: list[tuple[Prepare, str]] = [
    (after_training(spoil), r"online\.\S+ holds NaN"),
    (
        after_training(lambda reply: reply.metrics.update(bytes_up=1.0)),
        "the metric bytes_up has a name that only the .*",
    ),
    (
        after_training(lambda reply: reply.metrics.update({f"m{i}": 1.0 for i in range(1000)})),
        "it has 100. numbers and metrics, more .*",
    ),
]


def test_an_answer_that_is_missing_or_broken_is_named_and_does_not_count(quick, tmp_path):
    """The first round is sound; in each of the others something else happens to client 1's answer."""

    def lose_state(grid: LoopGrid, patch: pytest.MonkeyPatch) -> None:
        for file in (tmp_path / "b" / "checkpoints").glob("client-0001.round-*"):
            file.unlink()

    faults = [*REFUSED, *LEFT_OUT, (lose_state, ".* cannot be read as a checkpoint.*")]
    recipe = quick(**AVERAGED | SMALL, rounds=1 + len(faults), guard={"minimum_answers": 2}, clients_per_round=3)
    directory, grid = start(recipe, tmp_path / "b")
    by_round = {number: prepare for number, (prepare, _) in enumerate(faults, start=2)}
    warnings = run_on(recipe, directory, grid, FaultsByRound(grid, by_round))
    assert len(warnings) == len(faults)
    refused_file = (tmp_path / "b" / "refused.csv").read_text().replace('"', "")
    for number, ((_, told), warning) in enumerate(zip(faults, warnings, strict=True), start=2):
        refused = number < 2 + len(REFUSED)
        who, kinds = ("the answer of client 1", [1, 0]) if refused else ("client 1", [0, 1])
        assert re.fullmatch(f"round {number}: {who} is left out: {told}", warning)
        assert f"{number},1,{warning.partition(' is left out: ')[2]}\n" in refused_file
        assert [len(metric(tmp_path / "b", kind, number)) for kind in ("refused", "missing")] == kinds
        assert metric(tmp_path / "b", "answers", number) == {"global": 2.0}
        assert metric(tmp_path / "b", "bytes_up", number).keys() == {"0", "2"}
    assert [directory.client_rounds.get(k) for k in range(3)] == [recipe.rounds, 1, recipe.rounds]
    # what it trained in those rounds is undone, for the server does not have it
    starts = {(task["client"], task["round"]): task["start"] for task in grid.tasks if "start" in task}
    assert [starts[1, number] for number in range(2, recipe.rounds + 1)] == [1] * len(faults)
    assert [starts[0, number] for number in range(2, recipe.rounds + 1)] == [*range(1, recipe.rounds)]


def test_what_the_servers_parts_log_of_a_client_no_client_says_itself(quick, tmp_path, monkeypatch):
    recipe = quick(**FEDU2 | SMALL, rounds=1)
    directory, grid = start(recipe, tmp_path / "b")
    after_training(lambda reply: reply.metrics.update(eua_weight=123.0))(grid, monkeypatch)
    assert run_on(recipe, directory, grid) == []
    rows = [row for row in directory.read_metrics() if row[2] == "eua_weight"]
    assert [row[1] for row in rows] == ["0", "1", "2"]
    assert sum(row[3] for row in rows) == pytest.approx(1)


# An answer to another round, or of another client, counts nowhere


CLIENT, OTHER = 1, 0
Key = tuple[int, int]  # client and round


def swap_answers(grid: LoopGrid, kind: str, place: Key, taken: Key) -> list[dict]:
    """Let the server get, in place of one client's answers in one round, those that `taken` gave before.

    Returns the records that came in their place, filled while the run goes on. Messages of other kinds pass.
    """
    given: list[dict] = []
    replaced: list[dict] = []

    def tamper(node: int, reply: FlowerMessage) -> None:
        if reply.metadata.message_type != kind:
            return
        key = reply.content["answer"]["client"], reply.content["answer"]["round"]
        if key == taken:
            given.append(dict(reply.content))
        elif key == place:
            replaced.append(given[len(replaced)])
            reply.content.clear()
            reply.content.update(replaced[-1])

    grid.tamper = tamper
    return replaced


@pytest.mark.parametrize(
    ("method", "place", "taken"),
    [
        (AVERAGED, (CLIENT, 2), (CLIENT, 1)),  # late, from the round before
        (FEDU2, (CLIENT, 2), (OTHER, 2)),  # another client's, twice in the mean
        (ALIGNED, (CLIENT, 0), (OTHER, 0)),  # in the opening round
    ],
    ids=["late", "another's", "opening"],
)
def test_the_round_goes_on_as_if_no_answer_had_come(method, place, taken, quick, tmp_path):
    client, number = place
    recipe = quick(**method | SMALL)
    directory, grid = start(recipe, tmp_path / "swapped")
    replaced = swap_answers(grid, "train", place, taken)
    [warning] = run_on(recipe, directory, grid)
    assert len(replaced) == 1
    assert warning.startswith(f"round {number}: client {client} is left out: ")
    assert metric(tmp_path / "swapped", "missing", number) == {str(client): 1.0}
    without, grid = start(recipe, tmp_path / "without")
    run_on(recipe, without, grid, FaultsByRound(grid, {number: silent(11 + client)}))
    assert_same(directory.server_state(), without.server_state())
    assert [directory.client_rounds.get(k) for k in range(3)] == [without.client_rounds.get(k) for k in range(3)]


@pytest.mark.parametrize(
    ("grace", "told"),
    [
        (None, r"client 1 is slow: its answer took 9\d s, where the median client's took 0 s \(flower.grace ends "),
        (3.0, "client 1 is left out: no answer within 60 s"),
    ],
)
def test_a_client_that_is_far_slower_than_the_others_is_named_and_not_waited_for_if_so_told(
    grace, told, quick, tmp_path, monkeypatch
):
    """It answers just before the deadline of 100 seconds."""
    recipe = quick(**AVERAGED | SMALL, rounds=1)
    recipe = recipe.model_copy(update={"flower": recipe.flower.model_copy(update={"grace": grace})})
    directory, grid = start(recipe, tmp_path / "b")
    began = {}

    def pull(names):
        now = messenger.time.monotonic()
        name = next(iter(names))
        late = (
            name in grid.replies
            and grid.replies[name].metadata.src_node_id == 12
            and "tensors" in str(list(grid.replies[name].content))
        )
        return [] if late and now - began.setdefault(name, now) < 95 else LoopGrid.pull_messages(grid, names)

    monkeypatch.setattr(grid, "pull_messages", pull)
    [warning] = run_on(recipe, directory, grid)
    assert re.match(f"round 1: {told}", warning)
    assert metric(tmp_path / "b", "missing", 1) == ({} if grace is None else {"1": 1.0})


def test_a_client_that_was_not_waited_for_is_not_asked_alone_for_its_evaluation(quick, tmp_path, monkeypatch):
    """Nobody's time would say how long to wait for it: it could take all of flower.round_seconds."""
    recipe = quick(**SMALL, rounds=1)
    recipe = recipe.model_copy(update={"flower": recipe.flower.model_copy(update={"grace": 3.0})})
    directory, grid = start(recipe, tmp_path / "b")
    monkeypatch.setattr(grid, "silent", {12})
    warnings = run_on(recipe, directory, grid)
    assert "round 1: client 1 is left out: no answer within 60 s" in warnings
    assert warnings[-1] == "round 1: client 1 is not evaluated: no answer within 60 s"


def test_an_evaluation_of_another_client_or_of_too_many_measures_does_not_count(quick, tmp_path):
    """Without weights that travel every client's own model is measured: before the first round, and in its answer."""
    recipe = quick(**SMALL, rounds=1)
    directory, grid = start(recipe, tmp_path / "run")
    swap_answers(grid, "evaluate", (CLIENT, 0), (OTHER, 0))
    note = grid.tamper

    def tamper(node: int, reply: FlowerMessage) -> None:
        note(node, reply)
        if (node, reply.metadata.message_type) == (11 + CLIENT, "train"):
            reply.content["numbers"].update({f"evaluation/fine_tune_{i}": 1.0 for i in range(5_000)})

    grid.tamper = tamper
    warnings = run_on(recipe, directory, grid)
    assert [warning.partition(": its ")[0] for warning in warnings] == [
        f"round {number}: client {CLIENT} is not evaluated" for number in (0, 1)
    ]
    assert "more than 100" in warnings[1]
    for number in (0, 1):
        assert metric(tmp_path / "run", "knn", number).keys() == {"0", "2", "mean"}
    assert directory.client_rounds.get(CLIENT) == 1  # its training counts


# The apps


def serve(recipe: Recipe, folder: Path, grid) -> None:
    """The ServerApp of a deployment, as Flower calls it."""
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    app = make_server_app(folder / "recipe.yaml")
    app(grid, Context(1, 1, {}, RecordDict(), {"output": str(folder / "run")}))


def test_a_run_that_never_began_leaves_no_folder_and_one_that_began_says_who_holds_what(quick, tmp_path, capsys):
    recipe = quick(**AVERAGED, partition={"name": "sites", "clients": 3}, guard={"minimum_answers": 2})
    own = {k: {"data": {"name": "digits", "train_limit": limit}} for k, limit in enumerate((30, 4, 20))}
    _, grid = start(recipe, tmp_path / "nodes", write_sites(tmp_path, own=own))
    looks = grid.get_node_ids
    for nodes, told in (
        ([], "0 of 3 clients .* not connected: 0, 1, 2"),
        ([11, 12], "1 of 3 .*; node 12 is left out:"),
    ):
        grid.get_node_ids = lambda nodes=nodes: nodes
        with pytest.raises(UserError, match=told):
            serve(recipe, tmp_path, grid)
        assert not (tmp_path / "run").exists()
    grid.get_node_ids = looks
    serve(recipe, tmp_path, grid)
    run = read_run(tmp_path / "run")
    assert run.finished
    assert (run.class_names, run.class_counts) == (["images"], [[30], [0], [20]])
    assert {(number, k) for number, k, _ in run.refused} == {(1, 1), (2, 1)}
    with open(tmp_path / "run" / "refused.csv", "a") as file:
        file.write("3,0,of a round that was not committed\n")
    assert read_run(tmp_path / "run").refused == run.refused
    printed = " ".join(capsys.readouterr().out.split())
    assert "connected: client 0 with 30 images, client 2 with 20 images" in printed
    assert f"Next: fedssl report {tmp_path / 'run'}" in printed


def test_a_sites_log_says_what_it_sent_and_why_the_server_left_it_out(quick, tmp_path, capsys, monkeypatch):
    """Client 1 sends NaN in two rounds, and client 2 is silent in the second; each is told its own reasons.

    In the third round client 0 counts in part: the run's folder says why, and it is not told that it was left out.
    """
    recipe = quick(**AVERAGED | SMALL, rounds=4)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    spoils = after_training(spoil)
    both: Prepare = lambda grid, patch: (spoils(grid, patch), silent(13)(grid, patch))  # noqa: E731
    far = after_training(lambda reply: [t.add_(5) for n, t in reply.tensors.items() if n.endswith("mean")], client=0)
    run_on(recipe, directory, grid, FaultsByRound(grid, {1: spoils, 2: both, 3: far}))
    number, client, reason = directory.read_refused()[-1]
    assert (number, client) == (3, 0)
    assert reason.startswith("capped: its running statistics do not count: online.encoder.")
    lines = capsys.readouterr().out.splitlines()
    told = [line.removeprefix("fedssl: this site ") for line in lines if "was left out" in line]
    reasons = ["round 1: online", "round 1: online", "round 2: online", "round 2: no answer within 100 s"]
    assert [line.removeprefix("was left out of ").partition(".")[0] for line in told] == reasons
    sent = next(line for line in lines if " sends " in line and "weights" in line)
    size = metric(tmp_path / "b", "bytes_up", 1)["0"]
    assert sent.startswith(f"fedssl: this site sends {size / 1e6:.2f} MB: weights; the numbers samples, loss, ")
    loss = metric(tmp_path / "b", "loss", 1)["0"]
    assert f"fedssl: this site trained round 1 on 21 images: loss {loss:.4g}" in lines


def test_a_failed_run_goes_on_with_other_waits_and_another_minimum_and_with_nothing_else(quick, tmp_path, capsys):
    arrays = {f"x_{part}": random_pixels(60, 8, 8) for part in ("train", "test")}
    arrays |= {f"y_{part}": np.arange(60) % 10 for part in ("train", "test")}
    np.savez(tmp_path / "own.npz", **arrays)
    own = {"name": "npz", "path": str(tmp_path / "own.npz")}
    save_file(drawn("small_convnet").state_dict(), tmp_path / "w.safetensors")  # a run records their digest
    model = {"weights": str(tmp_path / "w.safetensors")}
    recipe = quick(**AVERAGED | SMALL | {"data": own}, model=model, guard={"minimum_answers": 3})
    _, grid = start(recipe, tmp_path / "nodes", write_sites(tmp_path))
    grid.silent = {12}
    told = r"round 1: 2 of 2 answers .*guard.minimum_answers is 3; client 1: no answer within"
    with pytest.raises(UserError, match=told):
        serve(recipe, tmp_path, grid)
    assert RunDirectory.open(tmp_path / "run").checkpoint.round == 0  # what was committed is kept
    before = contents(tmp_path / "run")
    for change, told in (
        ({"rounds": 3}, r"another recipe: rounds is 2 in that run, but 3 in this app's recipe.*name another folder"),
        (
            {"guard": recipe.guard.model_copy(update={"minimum_answers": 2, "largest_value": 2e6})},
            r"guard.largest_value is 1000000.0 in that run, but 2000000.0 in this",
        ),
    ):
        with pytest.raises(UserError, match=told):
            serve(recipe.model_copy(update=change), tmp_path, grid)
    np.savez(tmp_path / "own.npz", **arrays | {"x_test": 255 - arrays["x_test"]})
    with pytest.raises(UserError, match="have changed since the run began: the test set no longer has"):
        serve(recipe, tmp_path, grid)
    assert contents(tmp_path / "run") == before
    np.savez(tmp_path / "own.npz", **arrays)
    changed = {
        "guard": recipe.guard.model_copy(update={"minimum_answers": 2}),
        "flower": recipe.flower.model_copy(update={"round_seconds": 50, "connect_seconds": 5}),
    }
    serve(recipe.model_copy(update=changed), tmp_path, grid)
    assert RunDirectory.open(tmp_path / "run").checkpoint.finished
    kept = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (kept.guard.minimum_answers, kept.flower.round_seconds, kept.flower.connect_seconds) == (2, 50, 5)
    assert "no answer within 50 s" in (tmp_path / "run" / "refused.csv").read_text()
    serve(recipe.model_copy(update=changed), tmp_path, grid)
    assert capsys.readouterr().out.endswith("run is finished already\n")


def test_a_simulation_is_refused_for_a_deployment(quick, tmp_path):
    with pytest.raises(UserError, match="write its app with fedssl app"):
        simulation.run(quick(), tmp_path / "a")
    assert not (tmp_path / "a").exists()
