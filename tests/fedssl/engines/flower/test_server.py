"""The rounds of the Flower engine, without processes: the same run as in one process; lost and broken answers."""

import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.error import Error
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity
from google.protobuf.message import DecodeError
from safetensors.torch import save_file

import fedssl
from fedssl.engines.flower import messenger, simulation, wire
from fedssl.engines.flower.server import make_server_app
from fedssl.engines.flower.wire import on_disk, to_records
from fedssl.errors import UserError
from fedssl.export.trained_encoder import encoder_of_run
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.recipe.reading import load_recipe
from fedssl.recipe.recipe import Recipe
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import ALIGNED, AVERAGED, FEDU2, LW_FEDSSL, METHODS
from tests.fedssl.data.data_files import random_pixels
from tests.fedssl.engines.flower.loop_grid import (
    HOSPITALS,
    LoopGrid,
    Prepare,
    after_training,
    changed,
    silent,
    write_sites,
)
from tests.fedssl.engines.flower.test_wire import mappings
from tests.fedssl.engines.short_runs import SMALL, SMALL_ALIGNED, StopsAfterRoundOne, contents, results
from tests.fedssl.killed_runs import Killed
from tests.fedssl.models.test_weights import drawn


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


KINDS: dict[str, dict[str, Any]] = {
    "hetero_ssfl, int8": ALIGNED | {"transport": "int8"},
    "lw_fedssl, bfloat16": LW_FEDSSL | {"transport": "bfloat16"},
    "fedu2": FEDU2,
    "one_optimizer": {"local_update": {"name": "keep_own", "keep_optimizer": True}},
    "personal": AVERAGED | {"local_update": "personal", "regularizers": ["distance_to_global"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_sites_keep_their_states_and_no_image_or_label_leaves_them(kind, finished, begin, tiny, tmp_path, monkeypatch):
    """The run is the one in this process, bit for bit. Small answers go to the server's disk too."""
    kept: list[Message] = []
    monkeypatch.setattr(wire, "_SMALL_ANSWER", 0)
    monkeypatch.setattr(
        "fedssl.engines.flower.server.on_disk",
        lambda message, folder: kept.append(on_disk(message, folder)) or kept[-1],
    )
    method = KINDS[kind] | SMALL
    run, alone = begin(write_sites(tmp_path), **method), finished(tiny(**method))
    assert run.go() == []
    for name in ("metrics.csv", "spectrum.csv", "partition.csv", "checkpoints/server.round-00002.safetensors"):
        assert (alone / name).read_bytes() == (run.path / name).read_bytes()
    for k in range(3):
        [*_, newest] = sorted((tmp_path / f"state{k}" / "run").glob("client-*.safetensors"))
        assert newest.read_bytes() == (alone / "checkpoints" / newest.name).read_bytes()
    assert not list((run.path / "checkpoints").glob("client*"))
    with pytest.raises(UserError, match="client 0's model is at its own site"):
        run.directory.client_state(0)
    federation = build_federation(run.recipe)
    assert len(run.grid.sent) >= 6
    assert images_in(bytes_of(run.grid.sent), federation.dataset.train_images) == 0
    labels = federation.dataset.train_labels[federation.client_rows[0]]
    assert labels.numpy().tobytes() not in bytes_of(run.grid.sent)
    assert len(mappings(run.path)) == sum(bool(message.tensors) for message in kept)
    widened = [m for m in kept if all(t.dtype == torch.float32 for t in m.tensors.values() if t.is_floating_point())]
    assert len(widened) == (len(kept) / 2 if "bfloat16" in kind else len(kept)) > 0


def test_this_search_finds_images_in_a_message():
    images = torch.from_numpy(random_pixels(5, 8, 8))
    message = FlowerMessage(to_records(Message({"batch": images.float() / 255})), dst_node_id=1, message_type="train")
    assert images_in(bytes_of([message]), images) == 5


def test_sites_keep_the_states_to_which_a_run_may_go_back(begin, tmp_path):
    """Client 1 answers the second round no more, nor after it."""
    run = begin(write_sites(tmp_path), **SMALL_ALIGNED, rounds=4)
    faults = {number: silent(12) for number in (2, 3, 4)}
    run.go(faults)
    whole = results(run.path)
    for changes, number in ((["rounds=5"], None), (["rounds=5"], 2), (["evaluation.every=1"], None)):
        with pytest.raises(UserError, match="is a run across machines: flwr run on its app continues it"):
            fedssl.resume(run.path, changes, from_round=number)
    back = fedssl.resume(run.path, from_round=2)
    assert (back.finished, back.last_round) == (False, 2)
    with pytest.raises(UserError, match=r"is not finished .*: continue it with flwr run on its app, then export"):
        encoder_of_run(run.path)
    run.go(faults)
    assert results(run.path) == whole
    kept = {
        k: sorted(int(file.name[18:23]) for file in tmp_path.glob(f"state{k}/*/client-*.safetensors")) for k in (0, 1)
    }
    assert kept[1] == [0, 1]
    assert {2, 3, 4} <= {*kept[0]} < {*range(5)}


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
]
#: an answer that is read and refused
REFUSED: tuple[Prepare, str] = (after_training(spoil), r"online\.\S+ holds NaN")


def test_an_answer_that_is_missing_or_broken_is_named_and_does_not_count(begin):
    """The first round is sound; in each of the others something else happens to client 1's answer."""

    def lose_state(grid: LoopGrid, patch: pytest.MonkeyPatch) -> None:
        for file in (run.path / "checkpoints").glob("client-0001.round-*"):
            file.unlink()

    faults = [REFUSED, *LEFT_OUT, (lose_state, ".* cannot be read as a checkpoint.*")]
    later = range(2, 2 + len(faults))
    run = begin(**AVERAGED | SMALL, rounds=later[-1], guard={"minimum_answers": 2}, clients_per_round=3)
    warnings = run.go({number: prepare for number, (prepare, _) in zip(later, faults, strict=True)})
    refused_file = (run.path / "refused.csv").read_text().replace('"', "")
    for number, (_, told), warning in zip(later, faults, warnings, strict=True):
        who, kinds = ("the answer of client 1", [1, 0]) if number == 2 else ("client 1", [0, 1])
        assert re.fullmatch(f"round {number}: {who} is left out: {told}", warning)
        assert f"{number},1,{warning.partition(' is left out: ')[2]}\n" in refused_file
        assert [len(run.metric(kind, number)) for kind in ("refused", "missing")] == kinds
        assert run.metric("answers", number) == {"global": 2.0}
        assert run.metric("bytes_up", number).keys() == {"0", "2"}
    assert [run.directory.client_rounds.get(k) for k in range(3)] == [later[-1], 1, later[-1]]
    # what it trained in those rounds is undone, for the server does not have it
    starts = {(task["client"], task["round"]): task["start"] for task in run.grid.tasks if "start" in task}
    assert [starts[1, number] for number in later] == [1] * len(faults)
    assert [starts[0, number] for number in later] == [number - 1 for number in later]


def test_what_the_servers_parts_log_of_a_client_no_client_says_itself(begin):
    run = begin(**FEDU2 | SMALL, rounds=1)
    assert run.go({1: after_training(lambda reply: reply.metrics.update(eua_weight=123.0))}) == []
    weights = run.metric("eua_weight", 1)
    assert weights.keys() == {"0", "1", "2"}
    assert sum(weights.values()) == pytest.approx(1)


# Answers that are late


@pytest.mark.parametrize(
    ("grace", "told"),
    [
        (None, r"client 1 is slow: its answer took 9\d s, where the median client's took 0 s \(flower.grace ends "),
        (3.0, "client 1 is left out: no answer within 60 s"),
    ],
)
def test_a_client_that_is_far_slower_than_the_others_is_named_and_not_waited_for_if_so_told(
    grace, told, begin, monkeypatch
):
    """It answers just before the deadline of 100 seconds."""
    run, began = begin(**AVERAGED | SMALL, rounds=1, flower={"grace": grace}), {}

    def pull(names):
        now, name = messenger.time.monotonic(), next(iter(names))
        reply = run.grid.replies.get(name)
        late = reply is not None and reply.metadata.src_node_id == 12 and "tensors" in reply.content
        return [] if late and now - began.setdefault(name, now) < 95 else LoopGrid.pull_messages(run.grid, names)

    monkeypatch.setattr(run.grid, "pull_messages", pull)
    [warning] = run.go()
    assert re.match(f"round 1: {told}", warning)
    assert run.metric("missing", 1) == ({} if grace is None else {"1": 1.0})


def test_a_client_that_was_not_waited_for_is_not_asked_alone_for_its_evaluation(begin):
    """Nobody's time would say how long to wait for it: it could take all of flower.round_seconds."""
    run = begin(**SMALL, rounds=1, flower={"grace": 3.0})
    run.grid.silent = {12}
    warnings = run.go()
    assert "round 1: client 1 is left out: no answer within 60 s" in warnings
    assert warnings[-1] == "round 1: client 1 is not evaluated: no answer within 60 s"


def test_an_evaluation_of_too_many_measures_does_not_count(begin):
    """Without weights that travel every client's own model is measured: after a round in its answer."""
    run = begin(**SMALL, rounds=1)
    measures = {f"evaluation/fine_tune_{i}": 1.0 for i in range(5_000)}
    [warning] = run.go({1: changed(lambda content: content["numbers"].update(measures))})
    assert re.fullmatch("round 1: client 1 is not evaluated: its .*more than 100.*", warning)
    assert run.metric("knn", 1).keys() == {"0", "2", "mean"}
    assert run.directory.client_rounds.get(1) == 1  # its training counts


# The apps


def serve(recipe: Recipe, folder: Path, grid) -> None:
    """The ServerApp of a deployment, as Flower calls it, for a run in the user's home folder."""
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    app = make_server_app(folder / "recipe.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        app(grid, Context(1, 1, {}, RecordDict(), {"output": "~/run"}))


def test_a_run_that_never_began_leaves_no_folder_and_one_that_began_says_who_holds_what(begin, tmp_path, capsys):
    own = {k: {"data": {"name": "digits", "train_limit": limit}} for k, limit in enumerate((30, 4, 20))}
    sites, partition = write_sites(tmp_path, own=own), {"name": "sites", "clients": 3}
    nodes = begin(sites, "nodes", **AVERAGED, partition=partition, guard={"minimum_answers": 2})
    with pytest.raises(UserError, match=r"manifest of keys .*manifest\.yaml cannot be read .* how to write it by hand"):
        serve(nodes.recipe, tmp_path, nodes.grid)
    for connected, told in ((0, "0 of 3 clients .* not connected: 0, 1, 2"), (2, "1 of 3 .*; node 12 is left out:")):
        nodes.bind(HOSPITALS[:connected])
        with pytest.raises(UserError, match=told):
            serve(nodes.recipe, tmp_path, nodes.grid)
        assert not (tmp_path / "run").exists()
    nodes.bind()
    serve(nodes.recipe, tmp_path, nodes.grid)
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


def test_a_sites_log_says_what_it_sent_and_why_the_server_left_it_out(begin, tmp_path, capsys):
    """Client 1 sends NaN in two rounds, and client 2 is silent in the second; each is told its own reasons.

    In the third round client 0 counts in part: the run's folder says why, and it is not told that it was left out.
    """
    run = begin(write_sites(tmp_path), **AVERAGED | SMALL, rounds=4)
    spoils = after_training(spoil)
    both: Prepare = lambda grid, patch: (spoils(grid, patch), silent(13)(grid, patch))  # noqa: E731
    far = after_training(lambda reply: [t.add_(5) for n, t in reply.tensors.items() if n.endswith("mean")], client=0)
    run.go({1: spoils, 2: both, 3: far})
    number, client, reason = run.directory.read_refused()[-1]
    assert (number, client) == (3, 0)
    assert reason.startswith("capped: its running statistics do not count: online.encoder.")
    lines = capsys.readouterr().out.splitlines()
    told = [line.removeprefix("fedssl: this site ") for line in lines if "was left out" in line]
    reasons = ["round 1: online", "round 1: online", "round 2: online", "round 2: no answer within 100 s"]
    assert [line.removeprefix("was left out of ").partition(".")[0] for line in told] == reasons
    sent = next(line for line in lines if " sends " in line and "weights" in line)
    size = run.metric("bytes_up", 1)["0"]
    assert sent.startswith(f"fedssl: this site sends {size / 1e6:.2f} MB: weights; the numbers samples, loss, ")
    assert f"fedssl: this site trained round 1 on 21 images: loss {run.metric('loss', 1)['0']:.4g}" in lines


def test_a_failed_run_goes_on_with_other_waits_and_another_minimum_and_with_nothing_else(begin, tmp_path, capsys):
    arrays = {f"x_{part}": random_pixels(60, 8, 8) for part in ("train", "test")}
    arrays |= {f"y_{part}": np.arange(60) % 10 for part in ("train", "test")}
    np.savez(tmp_path / "own.npz", **arrays)
    own = {"name": "npz", "path": str(tmp_path / "own.npz")}
    save_file(drawn("small_convnet").state_dict(), tmp_path / "w.safetensors")  # a run records their digest
    own = {"data": own, "model": {"weights": str(tmp_path / "w.safetensors")}, "guard": {"minimum_answers": 3}}
    nodes = begin(write_sites(tmp_path), "nodes", **AVERAGED | SMALL | own)
    recipe, grid, path = nodes.recipe, nodes.grid, tmp_path / "run"
    nodes.bind()
    grid.silent = {12}
    told = r"round 1: 2 of 2 answers .*guard.minimum_answers is 3; client 1: no answer within"
    with pytest.raises(UserError, match=told):
        serve(recipe, tmp_path, grid)
    assert RunDirectory.open(path).checkpoint.round == 0  # what was committed is kept
    before = contents(path)
    for change, told in (
        ({"rounds": 3}, r"another recipe: rounds is 2 in that run, but 3 in this app's recipe.*name another folder"),
        (
            {"guard": recipe.guard.model_copy(update={"minimum_answers": 2, "largest_share": 0.4})},
            r"guard.largest_share is \S+ in that run, but 0.4 in this",
        ),
    ):
        with pytest.raises(UserError, match=told):
            serve(recipe.model_copy(update=change), tmp_path, grid)
    np.savez(tmp_path / "own.npz", **arrays | {"x_test": 255 - arrays["x_test"]})
    with pytest.raises(UserError, match="have changed since the run began: the test set no longer has"):
        serve(recipe, tmp_path, grid)
    assert contents(path) == before
    np.savez(tmp_path / "own.npz", **arrays)
    guard = recipe.guard.model_copy(update={"minimum_answers": 2})
    flower = recipe.flower.model_copy(update={"round_seconds": 50, "connect_seconds": 5})
    recipe = recipe.model_copy(update={"guard": guard, "flower": flower})
    serve(recipe, tmp_path, grid)
    assert RunDirectory.open(path).checkpoint.finished
    kept = load_recipe(path / "recipe.yaml")
    assert (kept.guard.minimum_answers, kept.flower.round_seconds, kept.flower.connect_seconds) == (2, 50, 5)
    assert "no answer within 50 s" in (path / "refused.csv").read_text()
    serve(recipe, tmp_path, grid)
    assert capsys.readouterr().out.endswith("run is finished already\n")


def test_a_simulation_is_refused_for_a_deployment(quick, tmp_path):
    with pytest.raises(UserError, match="write its app with fedssl app"):
        simulation.run(quick(), tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.usefixtures("without_identity")
def test_a_simulation_that_stops_and_goes_on_is_the_run_of_this_process_bit_for_bit(finished, noisy, tmp_path):
    """It goes on with more rounds."""
    recipe, path = noisy(**METHODS["hetero_ssfl"], engine="flower-simulation"), tmp_path / "simulated"
    with pytest.raises(Killed):
        simulation.run(recipe, path, StopsAfterRoundOne())
    assert RunDirectory.open(path).checkpoint.round == 1
    simulation.resume(path, overrides=["rounds=3"])
    assert results(finished(noisy(**METHODS["hetero_ssfl"], rounds=3))) == results(path)


@pytest.fixture
def without_identity(monkeypatch) -> None:
    """As in a process that no SuperLink has started."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
