"""The Flower app of a recipe: its folder, and that Flower builds it."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load as load_toml
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.supercore.object_ref import load_app

from fedssl.deploy.apps import write_app
from fedssl.engines import flower
from fedssl.errors import UserError
from fedssl.recipe.reading import load_recipe
from tests.fedssl.conftest import AVERAGED, FEDU2

pytestmark = pytest.mark.usefixtures("flower_process")


def test_the_apps_folder_holds_the_recipe_and_is_replaced_but_nothing_else_is(quick, tmp_path):
    recipe = quick(**FEDU2)
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
    with pytest.raises(UserError, match="a Flower app needs a recipe with engine=flower, got engine=in-process"):
        write_app(recipe.model_copy(update={"engine": "in-process"}), tmp_path / "other")


def test_any_description_makes_an_app_that_flower_builds(quick, tmp_path):
    description = 'Größe, 联邦学习, \U0001f600, a "quote", and a \\'
    recipe = quick(**AVERAGED).model_copy(update={"description": description, "name": "größe"})
    write_app(recipe, tmp_path / "app", "runs/größe \U0001f600")
    project = load_toml(tmp_path / "app" / "pyproject.toml")
    assert project is not None
    assert project["project"]["description"] == description
    assert project["tool"]["flwr"]["app"]["config"]["output"] == "runs/größe \U0001f600"
    assert load_recipe(tmp_path / "app" / "fedssl_app" / "recipe.yaml") == recipe
    assert len(build_fab_from_disk(tmp_path / "app")) > 1000


@pytest.mark.parametrize("earlier", [False, True], ids=["this version", "an earlier version"])
@pytest.mark.parametrize("what", ["server", "client"])
def test_an_app_folder_is_loaded_by_flower(what, earlier, quick, tmp_path, monkeypatch):
    """Apps of an earlier version import from the package itself, as it was one module then."""
    write_app(quick(**AVERAGED), tmp_path / "app")
    module = tmp_path / "app" / "fedssl_app" / f"{what}_app.py"
    written = f"from fedssl.engines.flower.{what} import make_{what}_app"
    assert written in module.read_text()
    if earlier:
        module.write_text(module.read_text().replace(written, f"from fedssl.engines.flower import make_{what}_app"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("fedssl_app")]:
        monkeypatch.delitem(sys.modules, name)
    app = load_app(f"fedssl_app.{what}_app:app", ValueError, tmp_path / "app")
    assert isinstance(app, {"server": ServerApp, "client": ClientApp}[what])


def test_the_package_has_no_other_names():
    assert not hasattr(flower, "make_app")
