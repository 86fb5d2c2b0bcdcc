"""The Flower app of a recipe, and the site's check that only apps approved by its owner run there.

An app is the code that a site executes for a run. Flower's SuperNode gets it from the SuperLink and trusts the digest,
name and version that the SuperLink states. Here the site computes all of these from the app itself.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Error, Message
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import get_fab_config, get_metadata_from_config
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.run import Run
from flwr.supernode import start_client_internal

from ..engines.flower.site_files import load_site
from ..errors import UserError, installed_distribution
from ..run_folder.creation import default_folder
from ..run_folder.storage import make_folder, write_atomically
from ..templates import fill_template
from ..untrusted import listed, own_parts, printable

if TYPE_CHECKING:
    from ..recipe.recipe import Recipe

# JSON's escapes are valid in TOML, except those of characters beyond 16 bits
_toml = partial(json.dumps, ensure_ascii=False)

_pull_and_store_message = start_client_internal._pull_and_store_message
_insert_message = start_client_internal._insert_message


def write_app(recipe: Recipe, folder: Path, output: str | None = None) -> None:
    """Write the app of a recipe with engine flower into a folder that is new, or an app's, which is then replaced.

    `output` is the run's folder on the SuperLink's machine, by default runs/NAME-seedN.

    Raises:
        UserError: the recipe names a part file; the folder holds something else.
    """
    part_files = [name for name in own_parts(recipe.model_dump()) if name.endswith(".py")]
    if part_files:
        raise UserError(
            f"the recipe names the part file {part_files[0]}, which an app does not carry to the sites: put it into "
            "the package's folder at the server and at every site, and name it in the recipe as shipped parts are named"
        )
    if folder.exists() and any(folder.iterdir()) and not (folder / "fedssl_app" / "recipe.yaml").is_file():
        raise UserError(f"{folder} is not empty and not the folder of a Flower app: name a new folder")
    name = re.sub(r"[^a-z0-9]+", "-", f"fedssl-{recipe.name}".lower()).strip("-")[:32].strip("-")
    project = fill_template(
        "fedssl.deploy",
        "app.toml.jinja",
        name=_toml(name),
        description=_toml(" ".join(recipe.description.split()) or recipe.name),
        distribution=installed_distribution(),
        version=importlib.metadata.version(installed_distribution()),
        output=_toml(output or str(default_folder(recipe.name, recipe.seed))),
    )
    files = {
        "pyproject.toml": project,
        "fedssl_app/__init__.py": "",
        "fedssl_app/server_app.py": fill_template("fedssl.deploy", "app_module.py.jinja", what="server"),
        "fedssl_app/client_app.py": fill_template("fedssl.deploy", "app_module.py.jinja", what="client"),
        "fedssl_app/recipe.yaml": recipe.to_yaml(),
    }
    make_folder(folder / "fedssl_app")
    for file, text in files.items():
        write_atomically(folder / file, text.encode())


def digest_of_app(folder: Path) -> str:
    """Return the SHA-256 of an app's folder as `flwr run` sends it: 64 hexadecimal digits."""
    return hashlib.sha256(build_fab_from_disk(folder)).hexdigest()


def require_digest(text: str) -> str:
    """Return a digest as it was typed, in lower case; raise UserError if it is not 64 hexadecimal digits."""
    digest = text.strip().lower()
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise UserError(
            f"an app's digest must have 64 hexadecimal digits, got {printable(text)[:80]!r}: fedssl app prints it"
        )
    return digest


class AppRefused(Exception):
    """The site does not run an app; the text gives the reason and is sent to the server."""


def require_approved(site_file: Path, allowed: Iterable[str], digest: str) -> None:
    """Raise AppRefused for an app, a zip file with this SHA-256, that neither `allowed` nor the site's file approves.

    The file is read for each app, as it may be changed while the site runs.
    """
    try:
        approved = {*allowed, *(load_site(site_file).approved_apps or ())}
    except UserError as error:
        raise AppRefused("this site's file cannot be read any more: its own log has the reason") from error
    if digest in approved:
        return
    names = f"the approved {'digest is' if len(approved) == 1 else 'digests are'} {listed(sorted(approved), most=2)}"
    told = f"the app has the digest {digest}, and {names if approved else 'no app is approved'}"
    raise AppRefused(f"this site runs only apps that its owner has approved: {told}")  # of at most 500 characters


def refuse_other_apps(approved: Callable[[str], None]) -> None:
    """Change Flower's modules in this process, which then runs `flower-supernode`."""
    start_client_internal._pull_and_store_message = partial(pull_approved, approved)


def pull_approved(
    approved: Callable[[str], None],
    *,
    receive: Callable[[], Any],
    get_run: Callable[[int], Run],
    get_fab: Callable[[str, int], Fab],
    **others: Any,
) -> int | None:
    """Take the next message and, for a new run, its app, as Flower's function does; refuse an app that is not approved.

    `approved` raises AppRefused for the digest of an app that is not. `receive`, `get_run` and `get_fab` ask the
    SuperLink for a message, for its description of a run, and for a run's app. For an app that is refused, the server
    gets an error with the reason as the answer to the message.

    Returns:
        The run's number; None if there is no message.
    """
    received: list[Any] = []
    runs: list[Run] = []

    def remember_message() -> Any:
        received.append(receive())
        return received[-1]

    def remember_run(number: int) -> Run:
        runs.append(get_run(number))
        return runs[-1]

    def get_approved_fab(digest: str, number: int) -> Fab:
        fab = get_fab(digest, number)
        _require_approved(approved, fab, runs[-1])
        return fab

    try:
        return _pull_and_store_message(
            receive=remember_message, get_run=remember_run, get_fab=get_approved_fab, **others
        )
    except AppRefused as refusal:
        message, _ = received[-1]
        run: int = message.metadata.run_id
        cause = f" ({printable(str(refusal.__cause__))})" if refusal.__cause__ else ""  # it may name the site's files
        print(f"fedssl: run {run} is refused: {printable(str(refusal))}{cause}", file=sys.stderr, flush=True)
        reply = Message(Error(ErrorCode.INVALID_FAB, str(refusal)), reply_to=message)
        _insert_message(reply, others["state"], others["object_store"])
        return run


def _require_approved(approved: Callable[[str], None], fab: Fab, run: Run) -> None:
    """Refuse an app that is not approved, and one that the SuperLink describes as another than it is.

    Flower finds an installed app by the SuperLink's description, which could name another app.
    """
    digest = hashlib.sha256(fab.content).hexdigest()
    approved(digest)
    described = {fab.hash_str, run.fab_hash}
    if described != {digest}:
        raise AppRefused(f"the server calls the app {' and '.join(sorted(described))}, but its digest is {digest}")
    name, version = get_metadata_from_config(get_fab_config(fab.content))
    if (run.fab_id, run.fab_version) != (name, version):
        raise AppRefused(f"the server calls the app {run.fab_id} {run.fab_version}, but it is {name} {version}")
    if run.primary_task_type == TaskType.AGENT_APP:
        raise AppRefused("the server asks for an agent, which no app of fedssl is")
