"""Which nodes take part: connected clients, their numbers and whether their data fit together."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord
from flwr.app import Message as FlowerMessage
from flwr.app.error import Error
from flwr.common.constant import ErrorCode
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedssl.engines.flower import registration, site_keys
from fedssl.errors import UserError
from fedssl.federation import build_federation
from tests.fedssl.conftest import ALIGNED
from tests.fedssl.engines.flower.loop_grid import (
    EQUAL,
    KINDS,
    WEIGHTS,
    FaultsByRound,
    LoopGrid,
    changed,
    run_on,
    start,
    write_sites,
)
from tests.fedssl.engines.short_runs import SMALL, metric


def test_a_node_that_comes_back_is_asked_at_once(quick, tmp_path):
    """Killed, still taken to be there when it is asked, then known to be gone, then started again."""
    recipe = quick(**WEIGHTS, rounds=1)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    site, grid.contexts[12].node_config = grid.contexts[12].node_config, {}  # so it fails to answer
    looks = iter([[11, 12, 13], [11, 13], [11, 13]])

    def look():
        nodes = next(looks, None)
        if nodes is None:
            grid.contexts[12].node_config = site
        return nodes or [11, 12, 13]

    grid.get_node_ids = look
    [warning] = run_on(recipe, directory, grid)
    assert warning.startswith("node 12 is left out: ")
    assert metric(tmp_path / "b", "missing", 1) == {}


def test_a_question_that_a_site_lost_is_asked_again_and_its_end_says_nothing_of_it(quick, tmp_path):
    """The site ends while it answers, and its key brings it the same node; the question expires two rounds later."""
    recipe = quick(**WEIGHTS, rounds=3)
    directory, grid = start(recipe, tmp_path / "b")
    push, lost = grid.push_messages, {}

    def push_messages(messages):
        names = push(messages)
        if not lost:
            lost[names[2]] = FlowerMessage(Error(ErrorCode.MESSAGE_UNAVAILABLE), reply_to=messages[2])
            del grid.replies[names[2]]
        return names

    grid.push_messages = push_messages
    later = lambda grid, patch: registration.time.sleep(30)  # noqa: E731
    expires = lambda grid, patch: grid.replies.update(lost)  # noqa: E731
    warnings = run_on(recipe, directory, grid, FaultsByRound(grid, {2: later, 3: expires}))
    assert warnings == [
        "client 2 is not connected: the run begins without it",
        "round 1: client 2 is left out: it is not connected",
    ]


def test_a_round_waits_for_a_node_that_connects_as_another_leaves(quick, tmp_path):
    """A site that is started again without a key has a new node, whose answer takes a moment."""
    recipe = quick(**WEIGHTS)
    sites = write_sites(tmp_path)
    directory, grid = start(recipe, tmp_path / "b", [*sites, sites[2]])
    grid.get_node_ids = lambda: [11, 12, 13 if directory.checkpoint.round < 1 else 14]
    pull, delayed = grid.pull_messages, []

    def pull_messages(names):
        if not delayed and any(grid.replies[name].metadata.src_node_id == 14 for name in names if name in grid.replies):
            delayed.extend(names)
            return []
        return pull(names)

    grid.pull_messages = pull_messages
    assert run_on(recipe, directory, grid) == []
    assert delayed
    assert metric(tmp_path / "b", "missing", 2) == {}


def test_a_client_that_is_not_connected_is_told_and_two_nodes_are_not_one_client(quick, tmp_path):
    recipe = quick(**WEIGHTS, rounds=1)
    sites = write_sites(tmp_path)[:2]
    directory, grid = start(recipe, tmp_path / "b", [*sites, sites[0]])
    [twice, *absent] = run_on(recipe, directory, grid)
    assert absent == [
        "client 2 is not connected: the run begins without it",
        "round 1: client 2 is left out: it is not connected",
    ]
    assert twice == (
        "node 13 is left out: its site file names client 0, but node 11 is already client 0: "
        "give each site a client number of its own"
    )


def test_too_few_clients_are_connected(quick, tmp_path):
    recipe = quick(**WEIGHTS, guard={"minimum_answers": 3})
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path)[:2])
    with pytest.raises(UserError, match=r"2 of 3 clients are connected after 10 s .* is 3; not connected: 2; start"):
        run_on(recipe, directory, grid, rounds=False)


# Numbers that are bound to keys


SITES = ("hospital-a", "hospital-b", "hospital-c")
KEYS = {name: ec.generate_private_key(ec.SECP384R1()).public_key() for name in (*SITES, "stranger")}
PRINTS = {name: site_keys.key_fingerprint(key) for name, key in KEYS.items()}


@pytest.fixture
def bind(tmp_path, monkeypatch) -> Callable[..., None]:
    """Let a grid's nodes from 11 on have the keys of sites, and write the server's manifest of all three."""
    manifest = tmp_path / site_keys.MANIFEST
    monkeypatch.setenv(site_keys.VARIABLE, str(manifest))

    def write(grid: LoopGrid, owners: Iterable[str], keys: dict | None = None) -> None:
        nodes = [SimpleNamespace(node_id=11 + i, public_key=public_key_to_bytes(KEYS[o])) for i, o in enumerate(owners)]
        grid.get_nodes = lambda: nodes
        manifest.write_text(yaml.safe_dump({"sites": keys or {s: PRINTS[s] for s in SITES}}, sort_keys=False))

    return write


def test_a_site_with_the_number_of_another_is_refused_and_the_others_key_has_it(bind, quick, tmp_path, capfd):
    """hospital-c names client 0, and is there before hospital-a."""
    recipe = quick(**WEIGHTS, rounds=1)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path, own={0: {"client": 0}, 2: {"client": 0}}))
    grid.get_node_ids = lambda: [13, 12, 11]
    bind(grid, SITES)
    told = "its site file names client 0, but the server has registered its key for client 2"
    first, *others = run_on(recipe, directory, grid)
    assert first.startswith(f"node 13 is left out: {told}: set client: 2")
    assert others[0] == "client 2 is left out: the run begins without it"
    assert metric(tmp_path / "b", "missing", 1) == {"2": 1.0}
    assert f"fedssl: this site takes no part in run run: {told}" in capfd.readouterr().out


def test_a_site_that_lies_about_its_number_or_has_no_bound_key_is_left_out(bind, quick, tmp_path, monkeypatch):
    """Its own check is switched off; the second has a key that the SuperLink knows and the manifest does not."""
    recipe = quick(**WEIGHTS, guard={"minimum_answers": 1})
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    changed(lambda content: content["answer"].update(client=0), client=2, kind="query")(grid, monkeypatch)
    bind(grid, ("hospital-a", "stranger", "hospital-c"))
    warnings = set(run_on(recipe, directory, grid, rounds=False))
    assert warnings == {
        f"node 12 is left out: its key {PRINTS['stranger']} is in no line of {tmp_path / 'manifest.yaml'}",
        "node 13 is left out: it answers as client 0, but its key is registered for client 2",
        *(f"client {k} is not connected: the run begins without it" for k in (1, 2)),
    }


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (None, r"the manifest of keys .*manifest\.yaml cannot be read .* docs/deploy.md says how to write it by hand"),
        ({"hospital-a": PRINTS["hospital-a"], "hospital-b": PRINTS["hospital-a"]}, "hospital-a and hospital-b have"),
        ({"hospital-a": "MD5:12"}, "sites.hospital-a: .*got 'MD5:12'"),
    ],
)
def test_a_manifest_that_is_missing_or_wrong_is_refused(keys, told, bind, quick, tmp_path):
    recipe = quick(**WEIGHTS)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    bind(grid, SITES, keys)
    if keys is None:
        (tmp_path / "manifest.yaml").unlink()
    with pytest.raises(UserError, match=told):
        run_on(recipe, directory, grid, rounds=False)


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
def test_a_site_whose_images_do_not_fit_says_so_itself_and_the_others_go_on(own, told, quick, tmp_path, capsys):
    recipe = quick(**WEIGHTS, rounds=1)
    sites = write_sites(tmp_path, own={1: own(tmp_path / "own.npz")})
    directory, grid = start(recipe, tmp_path / "b", sites)
    first, *begins, left_out = run_on(recipe, directory, grid)
    reason = first.removeprefix("node 12 is left out: ")
    assert re.match(told, reason)
    assert begins == ["client 1 is left out: the run begins without it"]
    assert left_out == f"round 1: client 1 is left out: {reason}"
    assert directory.read_refused() == [(1, 1, reason)]
    log = capsys.readouterr().out
    if number := re.search("as failure ([0-9a-f]{8})", reason):
        reason = f"there is no file {tmp_path / 'own.npz'}; set data.path="
        assert f"fedssl: this site takes no part in run run, failure {number[1]}: {reason}" in log
    else:
        assert f"fedssl: this site takes no part in run run: {reason}\n" in log
    assert metric(tmp_path / "b", "loss", 1).keys() == {"0", "2", "mean"}


def test_a_run_does_not_begin_where_no_site_fits_and_names_the_reasons(quick, tmp_path):
    sites = write_sites(tmp_path, own={1: write_images(tmp_path / "own.npz", size=12)})[1:2]
    with pytest.raises(UserError, match=r"0 of 3 clients .* not connected: 0, 1, 2; node 11 is left out: its images"):
        run_on(quick(**WEIGHTS), *start(quick(**WEIGHTS), tmp_path / "b", sites))


def test_other_classes_are_refused_where_the_objective_trains_on_them(quick, tmp_path):
    recipe = quick(**WEIGHTS, objective="supervised")
    sites = write_sites(tmp_path, own={1: write_images(tmp_path / "a.npz", classes=RENAMED)})
    warning, _ = run_on(recipe, *start(recipe, tmp_path / "b", sites), rounds=False)
    assert (
        "its classes differ from those that the objective trains on, or their order: '9', 'x'; rename them" in warning
    )


@pytest.mark.parametrize("kind", ["local", "weighted_mean"])
def test_other_classes_are_no_matter_where_the_objective_does_not_train_on_them(kind, quick, tmp_path):
    recipe = quick(**KINDS[kind])
    sites = write_sites(tmp_path, own={1: write_images(tmp_path / "a.npz", classes=RENAMED)})
    assert run_on(recipe, *start(recipe, tmp_path / "b", sites), rounds=False) == []


def test_a_site_with_other_public_images_is_left_out(quick, tmp_path):
    recipe = quick(**ALIGNED | SMALL)
    sites = write_sites(tmp_path, own={1: {"data": {"name": "digits", "public_holdout": 31}}})
    warnings = run_on(recipe, *start(recipe, tmp_path / "b", sites), rounds=False)
    assert warnings[0].startswith("node 12 is left out: its public images differ from the server's")


def test_a_site_that_comes_later_with_other_images_is_left_out(quick, tmp_path):
    recipe = quick(**WEIGHTS)
    directory, grid = start(
        recipe, tmp_path / "b", write_sites(tmp_path, own={2: write_images(tmp_path / "a.npz", size=12)})
    )
    grid.get_node_ids = lambda: [11, 12] if directory.checkpoint.round < 1 else [11, 12, 13]
    warnings = run_on(recipe, directory, grid)
    assert warnings[0] == "client 2 is not connected: the run begins without it"
    assert any(warning.startswith("node 13 is left out: its images are 1 x 12 x 12") for warning in warnings)
    assert metric(tmp_path / "b", "missing", 2) == {"2": 1.0}


@pytest.mark.parametrize(
    ("method", "flower", "classes", "counted"),
    [
        (WEIGHTS, {}, [], True),
        (KINDS["local"], {}, [], True),
        (WEIGHTS | {"objective": "supervised"}, {}, list("0123456789"), True),
        (EQUAL, {"dp": {"name": "local_dp", "clipping_norm": 1, "epsilon": 0.5, "delta": 1e-5}}, [], False),
        (EQUAL, {"secure": {"name": "secagg_plus"}}, [], False),
    ],
    ids=["weights", "own models", "labels", "noise", "masks"],
)
def test_a_site_describes_no_more_of_its_data_than_is_needed(method, flower, classes, counted, quick, tmp_path):
    recipe = quick(**method, **flower)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    run_on(recipe, directory, grid, rounds=False)
    described = [dict(reply.content["data"]) for reply in grid.sent]
    images = [len(rows) if counted else 0 for rows in build_federation(recipe).client_rows]
    form = {"shape": [1, 8, 8], "classes": classes, "public": ""}
    assert described == [form | {"images": count} for count in images]


def test_a_site_that_hides_a_misfit_is_left_out_by_the_server(quick, tmp_path, monkeypatch):
    recipe = quick(**WEIGHTS)
    directory, grid = start(recipe, tmp_path / "b")
    changed(lambda content: content["data"].update(shape=[1, 9, 8]), kind="query")(grid, monkeypatch)
    warnings = run_on(recipe, directory, grid, rounds=False)
    assert warnings[0].startswith("node 12 is left out: its images are 1 x 9 x 8 (channels x height x width)")


def test_a_site_that_does_not_describe_its_images_is_left_out(quick, tmp_path, monkeypatch):
    recipe = quick(**WEIGHTS)
    directory, grid = start(recipe, tmp_path / "b")
    for change in (
        *({"classes": classes} for classes in ([3], ["x"] * 200_000)),
        *({"shape": shape} for shape in ([1, 8], [1.0, 8.0, 8.0])),
        *({"images": images} for images in (-1, 10**12, 40.0)),
    ):
        changed(lambda content, change=change: content["data"].update(change), kind="query")(grid, monkeypatch)
        warnings = run_on(recipe, directory, grid, rounds=False)
        told = "it does not describe its images: expected valid shape, classes, public and images"
        assert warnings[0] == f"node 12 is left out: {told}", list(change)


def test_a_site_that_states_no_images_or_fails_in_the_name_of_another_is_left_out_itself(
    bind, quick, tmp_path, monkeypatch
):
    """Without a number of images its answers could state any; a false name would explain why another one is missing."""
    recipe = quick(**WEIGHTS)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    bind(grid, SITES)
    changed(lambda content: content["data"].update(images=0), kind="query")(grid, monkeypatch)
    warnings = run_on(recipe, directory, grid, rounds=False)
    assert warnings[0] == "node 12 is left out: it states no images: expected at least 1"

    def fail(content):
        content["failure"] = ConfigRecord({"reason": "its disk burns", "client": 0})

    changed(fail, kind="query")(grid, monkeypatch)
    warnings = run_on(recipe, directory, grid, rounds=False)
    assert warnings == ["node 12 is left out: its disk burns", "client 1 is left out: the run begins without it"]


def test_a_site_that_connects_again_with_another_number_of_images_is_named(quick, tmp_path, monkeypatch):
    recipe = quick(**WEIGHTS)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    changed(lambda content: content["data"].update(images=50), kind="query")(grid, monkeypatch)
    grid.configs[14], grid.contexts[14] = grid.configs[12], grid.contexts[12]  # the site's next node, with its true one
    grid.get_node_ids = lambda: [11, 13, 12 if directory.checkpoint.round < 1 else 14]
    [warning] = run_on(recipe, directory, grid)
    assert warning.startswith("client 1 states ")
    assert warning.endswith(" images, and 50 when it connected before")


def test_a_site_whose_log_cannot_be_written_takes_part(quick, tmp_path, monkeypatch):
    """Flower would send the text of the error, and the site would be missing in every round."""
    recipe = quick(**WEIGHTS, rounds=1)
    directory, grid = start(recipe, tmp_path / "b", write_sites(tmp_path))
    full = Mock(**{"write.side_effect": OSError(28, "No space left on device")})
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        assert run_on(recipe, directory, grid) == []
    assert full.write.called
