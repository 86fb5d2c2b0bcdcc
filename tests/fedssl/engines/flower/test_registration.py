"""Which nodes take part: connected clients, their numbers and whether their data fit together."""

import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import Message as FlowerMessage
from flwr.app.error import Error
from flwr.common.constant import ErrorCode

from fedssl.engines.flower import registration
from fedssl.errors import UserError
from fedssl.federation import build_federation
from tests.fedssl.conftest import ALIGNED
from tests.fedssl.engines.flower.loop_grid import EQUAL, PRINTS, WEIGHTS, changed, write_sites
from tests.fedssl.engines.short_runs import SMALL

NOT_CONNECTED = [
    "client 2 is not connected: the run begins without it",
    "round 1: client 2 is left out: it is not connected",
]


def test_a_node_that_comes_back_is_asked_at_once(begin, tmp_path):
    """Killed, still taken to be there when it is asked, then known to be gone, then started again."""
    run = begin(write_sites(tmp_path), **WEIGHTS, rounds=1)
    node = run.grid.contexts[12]
    site, node.node_config = node.node_config, {}  # so it fails to answer
    looks = iter([{11: 0, 12: 1, 13: 2}, {11: 0, 13: 2}, {11: 0, 13: 2}])

    def look():
        nodes = next(looks, None)
        if nodes is None:
            node.node_config = site
        return nodes or {11: 0, 12: 1, 13: 2}

    run.look = look
    [warning] = run.go()
    assert warning.startswith("node 12 is left out: ")
    assert run.metric("missing", 1) == {}


def test_a_question_that_a_site_lost_is_asked_again_and_its_end_says_nothing_of_it(begin, tmp_path):
    """The site ends while it answers, and its key brings it the same node; the question expires two rounds later."""
    run = begin(write_sites(tmp_path), **WEIGHTS, rounds=3)
    push, lost = run.grid.push_messages, {}

    def push_messages(messages):
        names = push(messages)
        if not lost:
            lost[names[2]] = FlowerMessage(Error(ErrorCode.MESSAGE_UNAVAILABLE), reply_to=messages[2])
            del run.grid.replies[names[2]]
        return names

    run.grid.push_messages = push_messages
    later = lambda grid, patch: registration.time.sleep(30)  # noqa: E731
    expires = lambda grid, patch: grid.replies.update(lost)  # noqa: E731
    assert run.go({2: later, 3: expires}) == NOT_CONNECTED


def test_a_round_waits_for_a_node_that_connects_as_another_leaves(begin, tmp_path):
    """Its answer takes a moment."""
    sites = write_sites(tmp_path)
    run = begin([*sites, sites[2]], **WEIGHTS)
    run.look = lambda: {11: 0, 12: 1, 13 if run.directory.checkpoint.round < 1 else 14: 2}
    pull, delayed = run.grid.pull_messages, []

    def pull_messages(names):
        replies = [run.grid.replies[name] for name in names if name in run.grid.replies]
        if not delayed and any(reply.metadata.src_node_id == 14 for reply in replies):
            delayed.extend(names)
            return []
        return pull(names)

    run.grid.pull_messages = pull_messages
    assert run.go() == []
    assert delayed
    assert run.metric("missing", 2) == {}


# Numbers that are bound to keys


def test_a_node_whose_key_is_of_no_client_of_the_run_is_left_out(begin, tmp_path):
    """The manifest has three sites, the recipe two clients."""
    two = WEIGHTS | {"partition": {"name": "iid", "clients": 2}, "guard": {"minimum_answers": 1}}
    run = begin(write_sites(tmp_path), **two)
    run.bind(("hospital-a", "stranger", "hospital-c"))
    assert set(run.register()) == {
        f"node 12 is left out: its key {PRINTS['stranger']} is in no line of {tmp_path / 'manifest.yaml'}",
        "node 13 is left out: its key is that of client 2, but the recipe has partition.clients=2",
        "client 1 is not connected: the run begins without it",
    }


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"hospital-a": PRINTS["hospital-a"], "hospital-b": PRINTS["hospital-a"]}, "hospital-a and hospital-b have"),
        ({"hospital-a": "MD5:12"}, "sites.hospital-a: .*got 'MD5:12'"),
    ],
)
def test_a_manifest_that_becomes_wrong_is_told(keys, told, begin, tmp_path):
    run = begin(write_sites(tmp_path), **WEIGHTS, guard={"minimum_answers": 1})
    run.bind(keys=keys)
    with pytest.raises(UserError, match=told):
        run.register()


# Data that do not fit together


RENAMED = (*"012345678", "x")


def write_images(path: Path, size: int = 8, images: int = 40, classes: tuple[str, ...] = tuple("0123456789")) -> dict:
    """A site's file of images of noise, and the key of the site that names it."""
    random = np.random.default_rng(0)
    pixels = {f"x_{part}": random.integers(0, 256, (images, size, size), np.uint8) for part in ("train", "test")}
    labels = {f"y_{part}": np.arange(images) % len(classes) for part in ("train", "test")}
    np.savez(path, **pixels, **labels, class_names=np.array(classes))
    return {"data": {"name": "npz", "path": str(path)}}


#: what is wrong with client 1's site, and what its own log, the server's and refused.csv say
MISFITS = [
    (lambda path: write_images(path, size=12), r"its images are 1 x 12 x 12 \(channels x .*: set image_size: 8 under"),
    (lambda path: write_images(path, images=5), "the site has fewer training images than training.batch_size 8, which"),
    (
        lambda path: {"data": {"name": "npz", "path": str(path)}},
        "its data, settings or state cannot be used; its own log",
    ),
]


@pytest.mark.parametrize(("own", "told"), MISFITS, ids=["size", "batch", "missing"])
def test_a_site_whose_images_do_not_fit_says_so_itself_and_the_others_go_on(own, told, begin, tmp_path, capsys):
    run = begin(write_sites(tmp_path, own={1: own(tmp_path / "own.npz")}), **WEIGHTS, rounds=1)
    first, *begins, left_out = run.go()
    reason = first.removeprefix("node 12 is left out: ")
    assert re.match(told, reason)
    assert begins == ["client 1 is left out: the run begins without it"]
    assert left_out == f"round 1: client 1 is left out: {reason}"
    assert run.directory.read_refused() == [(1, 1, reason)]
    log = capsys.readouterr().out
    if number := re.search("as failure ([0-9a-f]{8})", reason):
        reason = f"there is no file {tmp_path / 'own.npz'}; set data.path="
        assert f"fedssl: this site takes no part in run run, failure {number[1]}: {reason}" in log
    else:
        assert f"fedssl: this site takes no part in run run: {reason}\n" in log
    assert run.metric("loss", 1).keys() == {"0", "2", "mean"}


OTHER_CLASSES = "its classes differ from those that the objective trains on, or their order: '9', 'x'; rename them"
OTHER_PUBLIC = "its public images differ from the server's: give all sites the same file as data.public_path"


@pytest.mark.parametrize(
    ("other", "method", "told"),
    [
        ("classes", WEIGHTS | {"objective": "supervised"}, [OTHER_CLASSES]),
        ("classes", SMALL, []),
        ("classes", WEIGHTS, []),
        ("public", ALIGNED | SMALL, [OTHER_PUBLIC]),
    ],
)
def test_other_classes_and_public_images_are_refused_where_the_method_uses_them(other, method, told, begin, tmp_path):
    own = write_images(tmp_path / "a.npz", classes=RENAMED)
    if other == "public":
        own = {"data": {"name": "digits", "public_holdout": 31}}
    warnings = begin(write_sites(tmp_path, own={1: own}), **method).register()
    assert warnings[:1] == [f"node 12 is left out: {one}" for one in told]


@pytest.mark.parametrize(
    ("method", "flower", "counted"),
    [
        (WEIGHTS | {"objective": "supervised"}, {}, True),
        (EQUAL, {"dp": {"name": "local_dp", "clipping_norm": 1, "epsilon": 0.5, "delta": 1e-5}}, False),
        (EQUAL, {"secure": {"name": "secagg_plus"}}, False),
    ],
    ids=["labels", "noise", "masks"],
)
def test_a_site_tells_of_its_images_how_many_there_are_or_nothing(method, flower, counted, begin, tmp_path):
    run = begin(write_sites(tmp_path), **method, **flower)
    run.register()
    told = [{name: dict(record) for name, record in reply.content.items()} for reply in run.grid.sent]
    images = [len(rows) if counted else 0 for rows in build_federation(run.recipe).client_rows]
    assert told == [{"answer": {"images": count}} for count in images]


def test_a_site_that_states_no_number_of_images_is_left_out(begin, monkeypatch):
    """Its answers could state any."""
    run = begin(**WEIGHTS)
    for images in (0, -1, 10**12, 40.0, True, "x"):
        changed(lambda content, images=images: content["answer"].update(images=images), kind="query")(
            run.grid, monkeypatch
        )
        told = f"node 12 is left out: it states {images} images: expected 1 to 1000000000"
        assert run.register()[0] == told


def test_a_site_that_connects_again_with_another_number_of_images_is_named(begin, tmp_path, monkeypatch):
    run = begin(write_sites(tmp_path), **WEIGHTS)
    changed(lambda content: content["answer"].update(images=50), kind="query")(run.grid, monkeypatch)
    run.grid.contexts[14] = run.grid.contexts[12]  # the site's next node, with its true one
    run.look = lambda: {11: 0, 13: 2, 12 if run.directory.checkpoint.round < 1 else 14: 1}
    [warning] = run.go()
    assert warning.startswith("client 1 states ")
    assert warning.endswith(" images, and 50 when it connected before")


def test_a_site_whose_log_cannot_be_written_takes_part(begin, tmp_path, monkeypatch):
    """Flower would send the text of the error, and the site would be missing in every round."""
    run = begin(write_sites(tmp_path), **WEIGHTS, rounds=1)
    full = Mock(**{"write.side_effect": OSError(28, "No space left on device")})
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        assert run.go() == []
    assert full.write.called
