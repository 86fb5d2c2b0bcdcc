"""The Flower app of a recipe, and that a site runs the apps that its owner has approved and no others."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from flwr.app import Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load as load_toml
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory

from fedssl.deploy.apps import digest_of_app, refuse_other_apps, require_approved, require_digest, write_app
from fedssl.errors import UserError
from fedssl.recipe.reading import load_recipe

RUN, NODE = 7, 1


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def app(tiny, tmp_path_factory) -> Path:
    """The folder of an app; read it only."""
    folder = tmp_path_factory.mktemp("app")
    write_app(tiny(engine="flower"), folder)
    return folder


@pytest.fixture(scope="module")
def content(app) -> bytes:
    """The app as Flower sends it."""
    return build_fab_from_disk(app)


@pytest.fixture(scope="module")
def other_content(app, tmp_path_factory) -> bytes:
    """An app of the same name and version with other code."""
    folder = tmp_path_factory.mktemp("other") / "app"
    shutil.copytree(app, folder)
    code = folder / "fedssl_app" / "client_app.py"
    code.write_text(code.read_text() + "\nprint('other')\n")
    return build_fab_from_disk(folder)


# The folder of an app


def test_the_apps_folder_holds_the_recipe_and_is_replaced_but_nothing_else_is(tiny, tmp_path):
    recipe = tiny(engine="flower")
    for seed in (0, 1):
        write_app(recipe.model_copy(update={"seed": seed}), tmp_path / "app")
        assert load_recipe(tmp_path / "app" / "fedssl_app" / "recipe.yaml").seed == seed
    project = (tmp_path / "app" / "pyproject.toml").read_text()
    assert 'serverapp = "fedssl_app.server_app:app"' in project
    assert 'output = "runs/tiny-seed1"' in project
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UserError, match="is not empty and not the folder of a Flower app"):
        write_app(recipe, tmp_path / "mine")


def test_any_description_makes_an_app_that_flower_builds(tiny, tmp_path):
    description = 'Größe, 联邦学习, \U0001f600, a "quote", and a \\'
    recipe = tiny(engine="flower", name="größe", description=description)
    write_app(recipe, tmp_path / "app", "runs/größe \U0001f600")
    project = load_toml(tmp_path / "app" / "pyproject.toml")
    assert project["project"]["description"] == description
    assert project["tool"]["flwr"]["app"]["config"]["output"] == "runs/größe \U0001f600"
    assert load_recipe(tmp_path / "app" / "fedssl_app" / "recipe.yaml") == recipe
    assert len(build_fab_from_disk(tmp_path / "app")) > 1000


# A site that approves apps


Approval = Callable[[str], None]


@pytest.fixture
def approved(tmp_path) -> Callable[..., Approval]:
    """Write a site's file that approves some apps, and read it with some that are allowed beside."""

    def write(*digests: str, allowed: Sequence[str] = ()) -> Approval:
        path = tmp_path / "site.yaml"
        path.write_text(yaml.safe_dump({"state": "state", "approved_apps": [*digests]}))
        return partial(require_approved, path, [*map(require_digest, allowed)])

    return write


class SuperNode:
    """What Flower's SuperNode keeps, and a SuperLink that sends it one message of a run of an app."""

    def __init__(self, content: bytes, **described):
        objects = ObjectStoreFactory()
        self.state = NodeStateFactory(objectstore_factory=objects).state()
        self.state.set_node_id(NODE)
        self.store = objects.store()
        self.digest = digest(content)
        self.fab = Fab(self.digest, content, {})
        named = {"fab_id": "fedssl/fedssl-tiny", "fab_version": "1.0.0", "fab_hash": self.digest}
        self.run = replace(Run.create_empty(RUN), **(named | described))

    def accepts(self, approved: Approval) -> bool:
        """Whether the app and a task that executes it are kept."""
        message = Message(RecordDict(), dst_node_id=NODE, message_type="query")
        message.metadata.__dict__["_run_id"] = RUN
        message.metadata.__dict__["_message_id"] = message.object_id
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(start_client_internal, "_pull_and_store_message", None)
            refuse_other_apps(approved)
            pulled = start_client_internal._pull_and_store_message(
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
        return self.state.get_fab(self.digest) is not None and self.state.get_run(RUN) is not None

    def refusal(self, approved: Approval) -> str:
        """The text that the server gets as the answer."""
        assert not self.accepts(approved)
        [reply] = self.state.get_messages_legacy(run_ids=[RUN], is_reply=True)
        return reply.error.reason


def test_approved_apps_run_and_of_others_the_server_is_told_both_digests(app, content, other_content, approved, capsys):
    own = approved(allowed=[digest_of_app(app)])
    assert SuperNode(content).accepts(own)
    expected = f"the app has the digest {digest(other_content)}, and the approved digest is {digest(content)}"
    assert expected in SuperNode(other_content).refusal(own)
    assert f"run {RUN} is refused: " in capsys.readouterr().err
    told = SuperNode(other_content).refusal(approved(allowed=[letter * 64 for letter in "3241"]))
    assert told.endswith(f"the approved digests are {'1' * 64}, {'2' * 64}, and 2 more")


def test_the_sites_file_is_read_again_for_every_app(content, approved, tmp_path):
    read = approved()
    assert SuperNode(content).refusal(read).endswith("and no app is approved")
    approved(digest(content))
    assert SuperNode(content).accepts(read)
    (tmp_path / "site.yaml").write_text("client: [")
    assert "this site's file cannot be read any more" in SuperNode(content).refusal(read)


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"fab_hash": "0" * 64}, "the server calls the app"),
        ({"fab_id": "fedssl/other"}, "the server calls the app fedssl/other 1.0.0, but it is"),
        ({"fab_version": "2.0.0\x1b[2J"}, "2.0.0\x1b[2J, but it is"),
        ({"primary_task_type": TaskType.AGENT_APP}, "the server asks for an agent"),
    ],
)
def test_an_approved_app_that_the_server_describes_as_another_is_refused(
    described, expected, content, approved, capsys
):
    assert expected in SuperNode(content, **described).refusal(approved(digest(content)))
    assert expected.replace("\x1b", "\\x1b") in capsys.readouterr().err


def test_other_content_under_an_approved_digest_is_refused(content, other_content, approved):
    """The digest is computed from what arrived, whatever the server calls it."""
    node = SuperNode(content)
    node.fab = Fab(node.digest, other_content, {})
    assert digest(other_content) in node.refusal(approved(node.digest))


def test_a_digest_that_is_none_is_refused(approved):
    assert require_digest(" " + "A" * 64) == "a" * 64
    with pytest.raises(UserError, match="must have 64 hexadecimal digits, got 'abc'"):
        approved(allowed=["abc"])
