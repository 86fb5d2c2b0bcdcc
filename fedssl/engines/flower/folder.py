"""The Flower app of a recipe: a folder that `flwr run` takes."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

from ...errors import UserError, installed_distribution
from ...recipe import Recipe
from ...recipe_text import own_parts
from ...run_folder.creation import default_folder
from ...storage import cannot_write, write_atomically

_PROJECT = """\
[project]
name = {name}
version = "1.0.0"
description = {description}
license = "Apache-2.0"
requires-python = ">=3.10"
dependencies = ["{distribution}[flower]=={version}"] # installed at every site beforehand, not by Flower

[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[tool.flwr.app]
publisher = "fedssl"

[tool.flwr.app.components]
serverapp = "fedssl_app.server_app:app"
clientapp = "fedssl_app.client_app:app"

[tool.flwr.app.config]
output = {output} # the run's folder, where the SuperLink runs; the same one continues an interrupted run
"""

_MODULE = '''\
"""The {what} app of the recipe beside this file."""

from pathlib import Path

from fedssl.engines.flower.{what} import make_{what}_app

app = make_{what}_app(Path(__file__).with_name("recipe.yaml"))
'''


def write_app(recipe: Recipe, folder: Path, output: str | None = None) -> None:
    """Write the app of a recipe.

    Args:
        recipe: with engine flower.
        folder: new, or an app's that is then replaced.
        output: the run's folder on the SuperLink's machine; runs/NAME-seedN where not given.

    Raises:
        UserError: the recipe's engine is another; the folder holds something else, or cannot be written.
    """
    if recipe.engine != "flower":
        raise UserError(f"a Flower app needs a recipe with engine=flower, got engine={recipe.engine}")
    own = [name for name in own_parts(recipe.model_dump()) if name.endswith(".py")]
    if own:
        raise UserError(
            f"the recipe names the part file {own[0]}, which an app does not carry to the sites: put it into the "
            "package's folder at the server and at every site, and name it in the recipe as shipped parts are named"
        )
    if folder.exists() and any(folder.iterdir()) and not (folder / "fedssl_app" / "recipe.yaml").is_file():
        raise UserError(f"{folder} is not empty and not the folder of a Flower app: name a new folder")
    name = re.sub(r"[^a-z0-9]+", "-", f"fedssl-{recipe.name}".lower()).strip("-")[:32].strip("-")
    project = _PROJECT.format(
        name=_toml(name),
        description=_toml(" ".join(recipe.description.split()) or recipe.name),
        distribution=installed_distribution(),
        version=importlib.metadata.version(installed_distribution()),
        output=_toml(output or str(default_folder(recipe.name, recipe.seed))),
    )
    files = {
        "pyproject.toml": project,
        "fedssl_app/__init__.py": "",
        "fedssl_app/server_app.py": _MODULE.format(what="server"),
        "fedssl_app/client_app.py": _MODULE.format(what="client"),
        "fedssl_app/recipe.yaml": recipe.to_yaml(),
    }
    try:
        (folder / "fedssl_app").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    for file, text in files.items():
        write_atomically(folder / file, text.encode())


def _toml(text: str) -> str:
    """A string in TOML. JSON's escapes are TOML's too, but for those of characters beyond 16 bits."""
    return json.dumps(text, ensure_ascii=False)
