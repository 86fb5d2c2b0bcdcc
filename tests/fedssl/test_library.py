"""What `import fedssl` offers to a script or notebook."""

from __future__ import annotations

import ast
import inspect
import shutil
from pathlib import Path

import pytest

import fedssl
from fedssl.recipe.reading import parse_recipe
from tests.fedssl.conftest import tiny_values


@pytest.fixture(scope="module")
def run_folder(finished, tmp_path_factory) -> Path:
    """A copy of the folder of a finished run."""
    return Path(shutil.copytree(finished(parse_recipe(tiny_values())), tmp_path_factory.mktemp("library") / "run"))


def test_every_name_is_there_documented_and_typed():
    assert fedssl.__all__ == sorted(fedssl.__all__)
    for name in fedssl.__all__:
        assert inspect.getdoc(getattr(fedssl, name)), name
        assert name in dir(fedssl)
    tree = ast.parse(Path(fedssl.__file__).read_text(encoding="utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = [alias.name for node in typed.body for alias in node.names]
    assert sorted(imported) == fedssl.__all__
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = fedssl.trian


def test_a_run_is_made_read_resumed_evaluated_and_reported(run_folder, tmp_path):
    """By paths and by strings of them."""
    run = fedssl.read_run(str(run_folder))
    (tmp_path / "tiny.yaml").write_text(parse_recipe(tiny_values()).to_yaml())
    recipe = fedssl.load_recipe(str(tmp_path / "tiny.yaml"), ["rounds=2"])
    made = fedssl.run(recipe, str(tmp_path / "run"))
    assert isinstance(made, fedssl.Run)
    assert made.finished
    assert made.values == run.values == fedssl.resume(run_folder).values
    measures = fedssl.evaluate(str(run_folder), semi_supervised=[0.5])
    assert measures["mean"]["knn"] == pytest.approx(run.evaluated("knn", "after"), abs=0.006)
    assert "semi_supervised_0.5" in measures["0"]
    short = {"collapse": False, "images": False}
    assert fedssl.write_report(run_folder, **short) == run_folder / "report.html"
    both = fedssl.write_report([str(run_folder), tmp_path / "run"], str(tmp_path / "both.html"), **short)
    assert both == tmp_path / "both.html"
    assert both.is_file()


def test_one_override_instead_of_a_list_is_refused():
    with pytest.raises(TypeError, match=r"overrides: expected a list such as \['rounds=2'\]"):
        fedssl.load_recipe("fedbyol", "rounds=2")
