"""A site runs the apps that its owner has approved and no others, with Flower's own function that takes an app."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.nodestate import NodeStateFactory

from fedssl.deploy import apps, nodes
from fedssl.deploy.apps import AppRefused, ApprovedApps, digest_of_app, pull_approved, require_digest, write_app
from fedssl.errors import UserError

RUN = 7
NODE = 1


@pytest.fixture
def app(quick, tmp_path) -> Path:
    folder = tmp_path / "app"
    write_app(quick(), folder)
    return folder


@pytest.fixture
def site_file(tmp_path) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump({"client": 0, "state": "state", "approved_apps": []}))
    return path


@pytest.fixture
def other_app(quick, tmp_path) -> bytes:
    """An app of the same name and version with other code."""
    folder = tmp_path / "other"
    write_app(quick(), folder)
    code = folder / "fedssl_app" / "client_app.py"
    code.write_text(code.read_text() + "\nprint('other')\n")
    return build_fab_from_disk(folder)


class SuperNode:
    """What Flower's SuperNode keeps, and a SuperLink that sends it one message of a run of an app."""

    def __init__(self, content: bytes, **described):
        objects = ObjectStoreFactory()
        self.state = NodeStateFactory(objectstore_factory=objects).state()
        self.state.set_node_id(NODE)
        self.store = objects.store()
        self.digest = hashlib.sha256(content).hexdigest()
        self.fab = Fab(self.digest, content, {})
        run = Run.create_empty(RUN)
        named = {"fab_id": "fedssl/fedssl-tiny", "fab_version": "1.0.0", "fab_hash": self.digest}
        self.run = replace(run, **(named | described))

    def pull(self, approved: ApprovedApps) -> None:
        message = Message(RecordDict(), dst_node_id=NODE, message_type="query")
        message.metadata.__dict__["_run_id"] = RUN
        message.metadata.__dict__["_message_id"] = message.object_id
        pulled = pull_approved(
            approved,
            receive=lambda: (message, get_object_tree(message)),
            get_run=lambda number: self.run,
            get_fab=lambda digest, number: self.fab,
            state=self.state,
            object_store=self.store,
            node_config={},
            pull_object=lambda number, object_id: get_all_nested_objects(message)[object_id].deflate(),
            confirm_message_received=lambda number, message_id: None,
            trusted_entities=None,
        )
        assert pulled == RUN

    def accepted(self) -> bool:
        """Whether the app and a task that executes it are kept."""
        return self.state.get_fab(self.digest) is not None and self.state.get_run(RUN) is not None

    def refusal(self) -> str:
        """The text that the server gets as the answer."""
        [reply] = self.state.get_messages_legacy(run_ids=[RUN], is_reply=True)
        return reply.error.reason


def test_an_approved_app_is_accepted(app, site_file, flower_process):
    node = SuperNode(build_fab_from_disk(app))
    node.pull(ApprovedApps(site_file, [digest_of_app(app)], ask=False))
    assert node.accepted()


def test_an_app_of_another_digest_is_refused_and_the_server_is_told_both_digests(
    app, other_app, site_file, flower_process, capsys
):
    node = SuperNode(other_app)
    node.pull(ApprovedApps(site_file, [digest_of_app(app)], ask=False))
    assert not node.accepted()
    expected = f"the app has the digest {node.digest}, and the approved digest is {digest_of_app(app)}"
    assert expected in node.refusal()
    assert f"run {RUN} is refused: " in capsys.readouterr().err


def test_an_empty_list_refuses_every_app(app, site_file, flower_process):
    node = SuperNode(build_fab_from_disk(app))
    node.pull(ApprovedApps(site_file, [], ask=False))
    assert not node.accepted()
    assert node.refusal().endswith("and no app is approved")


def test_an_app_that_the_sites_file_approves_later_is_accepted(app, site_file, flower_process):
    node = SuperNode(build_fab_from_disk(app))
    approved = ApprovedApps(site_file, [], ask=False)
    node.pull(approved)
    assert not node.accepted()
    site_file.write_text(yaml.safe_dump({"client": 0, "state": "state", "approved_apps": [node.digest]}))
    node.pull(approved)
    assert node.accepted()


def test_a_site_file_that_is_damaged_meanwhile_refuses_every_app_that_allow_does_not_name(
    app, site_file, flower_process
):
    node = SuperNode(build_fab_from_disk(app))
    approved = ApprovedApps(site_file, [], ask=False)
    site_file.write_text("client: [")
    node.pull(approved)
    assert not node.accepted()
    assert "this site's file cannot be read any more" in node.refusal()


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"fab_hash": "0" * 64}, "the server calls the app"),
        ({"fab_id": "fedssl/other"}, "the server calls the app fedssl/other 1.0.0, but it is"),
        ({"fab_version": "2.0.0"}, "2.0.0, but it is"),
        ({"primary_task_type": TaskType.AGENT_APP}, "the server asks for an agent"),
    ],
)
def test_an_approved_app_that_the_server_describes_as_another_is_refused(
    described, expected, app, site_file, flower_process
):
    node = SuperNode(build_fab_from_disk(app), **described)
    node.pull(ApprovedApps(site_file, [node.digest], ask=False))
    assert not node.accepted()
    assert expected in node.refusal()


def test_other_content_under_an_approved_digest_is_refused(app, other_app, site_file, flower_process):
    """The digest is computed from what arrived, whatever the server calls it."""
    node = SuperNode(build_fab_from_disk(app))
    node.fab = Fab(node.digest, other_app, {})
    node.pull(ApprovedApps(site_file, [node.digest], ask=False))
    assert not node.accepted()
    assert hashlib.sha256(other_app).hexdigest() in node.refusal()


def test_the_supernodes_own_function_is_replaced(site_file, monkeypatch):
    """`refuse_other_apps` is called in the process that then runs flower-supernode."""
    module = apps.start_client_internal
    monkeypatch.setattr(module, "_pull_and_store_message", module._pull_and_store_message)
    called = []
    monkeypatch.setattr(apps, "pull_approved", lambda approved, **others: called.append((approved, others)))
    approved = ApprovedApps(site_file, [], ask=False)
    apps.refuse_other_apps(approved)
    module._pull_and_store_message(state="a state")
    assert called == [(approved, {"state": "a state"})]


@pytest.mark.parametrize(("answer", "runs"), [("yes", True), ("no", False), ("", False), (EOFError, False)])
def test_with_ask_the_owner_sees_the_app_and_decides(answer, runs, app, site_file, monkeypatch, capsys):
    asked = []

    def reply(prompt):
        asked.append(prompt)
        if answer is EOFError:
            raise EOFError
        return answer

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", reply)
    approved, content = ApprovedApps(site_file, [], ask=True), build_fab_from_disk(app)
    digest = hashlib.sha256(content).hexdigest()
    for _ in range(2):
        if runs:
            approved.require(digest, content)
        else:
            with pytest.raises(AppRefused, match=digest):
                approved.require(digest, content)
    assert len(asked) == (1 if runs else 2)
    out = capsys.readouterr().out
    assert digest in out
    assert "--- fedssl_app/client_app.py" in out


def test_what_is_shown_cannot_move_the_cursor(site_file, monkeypatch, capsys):
    import io
    import zipfile

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: "no")
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a\x1b[2J.py", "print()\x1b[1A\n" + "x" * 30_000)
        archive.writestr("b.py", "hidden")
    for content in (file.getvalue(), b"no zip"):
        with pytest.raises(AppRefused):
            ApprovedApps(site_file, [], ask=True).require("0" * 64, content)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "The app is longer than this" in out
    assert "The app cannot be read" in out


def test_ask_without_a_terminal_is_refused(site_file, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(UserError, match="--ask needs a terminal to ask on"):
        ApprovedApps(site_file, [], ask=True)


def test_a_digest_that_is_none_is_refused():
    assert require_digest(" " + "A" * 64) == "a" * 64
    with pytest.raises(UserError, match="must have 64 hexadecimal digits, got 'abc'"):
        require_digest("abc")


@pytest.mark.parametrize("how", ["site file", "allow", "neither"])
def test_a_supernode_refuses_other_apps_where_the_file_or_allow_says_so(how, site_file, monkeypatch, capsys):
    """Then it also has a folder of its own for installed apps, in which no other app can be."""
    started = []
    monkeypatch.setattr(nodes, "run", lambda *arguments: started.append(arguments) or 130)
    monkeypatch.setattr(nodes, "import_module", lambda name: None)
    values = {"client": 0, "state": str(site_file.parent / "state")}
    site_file.write_text(yaml.safe_dump(values | ({"approved_apps": []} if how == "site file" else {})))
    allowed = ["0" * 64] if how == "allow" else []
    assert nodes.supernode(site_file, "127.0.0.1:1", None, None, insecure=True, allowed_apps=allowed) == 130
    [(_, environment, _, *prepare)] = started
    if how == "neither":
        assert not prepare
        assert "every app that the server sends runs at this site" in capsys.readouterr().err
        return
    assert Path(environment["FLWR_HOME"]).name.startswith("fedssl-apps-")
    module = apps.start_client_internal
    original = module._pull_and_store_message
    monkeypatch.setattr(module, "_pull_and_store_message", original)
    prepare[0]()
    assert module._pull_and_store_message is not original
