"""What `import fedssl` offers, methods that are composed of Python objects, and parts whose class is in no file."""

import ast
import re
import sys
from pathlib import Path

import pytest

import fedssl
from fedssl import parts
from fedssl.aggregators.weighted_mean import WeightedMean
from fedssl.augmentations.random_views import RandomViews
from fedssl.engines.in_process import run
from fedssl.federation import build_federation
from fedssl.local_updates.replace import Replace
from fedssl.objectives.byol import BYOL
from fedssl.recipe.reading import parse_recipe
from fedssl.schedules.end_to_end import EndToEnd
from tests.fedssl.conftest import AVERAGED, tiny_values
from tests.fedssl.engines.short_runs import SMALL
from tests.fedssl.killed_runs import Killed, KilledIn

PAGE = (Path(__file__).parents[2] / "docs" / "compose_in_python.md").read_text(encoding="utf-8")
PROGRAM, REPLACED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class Imported(fedssl.Regularizer):
    """A part of a module."""

    weight: float = 1.0

    def start_round(self, local):
        return lambda step: self.weight * step.loss.new_zeros(())


def composed(**changes) -> fedssl.Recipe:
    """The tiny recipe with averaged weights, of Python objects."""
    by_part = {
        "objective": BYOL(hidden_features=32, output_features=16),
        "augmentation": RandomViews(flip=0.0),
        "schedule": EndToEnd(),
        "aggregators": [WeightedMean()],
        "local_update": Replace(),
    }
    return fedssl.Recipe(**tiny_values(**SMALL) | by_part | changes)


CELL = """
class Cell(Regularizer):
    weight: float = 1.0

    def start_round(self, local):
        return lambda step: self.weight * step.loss
"""


def in_a_cell() -> type[fedssl.Regularizer]:
    """A class as a notebook's cell defines it."""
    namespace = {"__name__": "__main__", "Regularizer": fedssl.Regularizer}
    exec(CELL, namespace)
    return namespace["Cell"]


def interrupt(recipe: fedssl.Recipe, path: Path) -> None:
    """Run a recipe up to its first committed round."""
    with pytest.raises(Killed):
        run(recipe, path, KilledIn(2))


def test_the_program_of_the_page_runs_and_is_short(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len([line for line in PROGRAM.splitlines() if line and not line.startswith(("import", "from"))]) <= 25
    namespace = {"__name__": "__main__"}
    exec(PROGRAM, namespace)
    assert namespace["run"].finished
    assert re.match(r"[0-9.]+ [0-9.]+$", capsys.readouterr().out)
    exec(REPLACED, namespace)
    recipe = namespace["recipe"]
    assert (recipe.name, recipe.preset, recipe.regularizers[0].weight) == ("fedbyol", "digits", 2.0)


def test_a_composed_recipe_is_the_one_of_its_yaml(tmp_path):
    recipe = composed()
    assert recipe == parse_recipe(tiny_values(**AVERAGED | SMALL))
    (tmp_path / "stored.yaml").write_text(recipe.to_yaml())
    assert fedssl.load_recipe(tmp_path / "stored.yaml") == recipe


def test_a_class_of_a_module_is_stored_by_module_and_name_and_refused_when_the_module_changes(tmp_path, monkeypatch):
    source = "from tests.fedssl.test_compose_in_python import Imported\n\n\nclass Mine(Imported):\n    pass\n"
    (tmp_path / "my_part.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    from my_part import Mine

    recipe = composed(regularizers=[Mine(weight=2.0), Imported()])
    assert [part.name for part in recipe.regularizers] == ["my_part:Mine", f"{__name__}:Imported"]
    interrupt(recipe, tmp_path / "run")
    (tmp_path / "my_part.py").write_text(source + "\n")
    with pytest.raises(fedssl.UserError, match=r"my_part:Mine, a part of .*, was changed since the run began"):
        fedssl.resume(tmp_path / "run")
    (tmp_path / "my_part.py").write_text(source)
    assert fedssl.resume(tmp_path / "run").finished
    assert fedssl.load_recipe(tmp_path / "run" / "recipe.yaml", trust=True) == recipe
    with pytest.raises(fedssl.UserError, match="whose code would be run: read that code first"):
        fedssl.evaluate(tmp_path / "run")


def test_a_class_from_a_notebooks_cell_runs_and_resumes_in_its_process_alone(tmp_path, monkeypatch):
    recipe = composed(regularizers=[in_a_cell()(weight=0.5)])
    assert recipe.regularizers[0].name == "__main__:Cell"
    interrupt(recipe, tmp_path / "run")
    with monkeypatch.context() as other_process:
        other_process.setattr(parts, "_session_classes", {})
        refusal = r"regularizers.0.name: the class Cell was .* a file, .*from my_part import Cell[^\n]*$"
        with pytest.raises(fedssl.UserError, match=refusal):
            fedssl.resume(tmp_path / "run")
    resumed = fedssl.resume(tmp_path / "run")
    assert resumed.finished
    assert resumed.values == fedssl.run(recipe, tmp_path / "whole").values
    assert fedssl.evaluate(tmp_path / "run") == fedssl.evaluate(tmp_path / "whole")


def test_a_script_resumes_what_it_began_until_it_changes(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(CELL)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    interrupt(composed(regularizers=[in_a_cell()()]), tmp_path / "run")
    script.write_text(CELL + "# changed\n")
    in_a_cell()
    with pytest.raises(fedssl.UserError, match=r"__main__:Cell, a part of .*recipe.yaml, was changed since the run"):
        fedssl.resume(tmp_path / "run")
    script.write_text(CELL)
    assert fedssl.resume(tmp_path / "run").finished


def test_other_processes_cannot_have_a_class_from_a_cell():
    for changes in ({"clients_parallel": 2}, {"engine": "flower"}):
        recipe = composed(regularizers=[in_a_cell()()], **changes)
        with pytest.raises(fedssl.UserError, match=r"^[^\n]*class Cell was defined in a notebook or a script, which"):
            build_federation(recipe)


# What `import fedssl` offers to a script or notebook


def test_every_name_is_there_and_typed():
    assert fedssl.__all__ == sorted(fedssl.__all__)
    assert set(fedssl.__all__) <= set(dir(fedssl))
    tree = ast.parse(Path(fedssl.__file__).read_text(encoding="utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    assert sorted(alias.name for node in typed.body for alias in node.names) == fedssl.__all__
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = fedssl.trian


def test_a_run_is_made_read_resumed_evaluated_and_reported(finished, tmp_path):
    """By paths and by strings of them."""
    (tmp_path / "tiny.yaml").write_text(parse_recipe(tiny_values(**SMALL)).to_yaml())
    changes = ["rounds=1", "evaluation.semi_supervised_protocol.epochs=2"]
    recipe = fedssl.load_recipe(str(tmp_path / "tiny.yaml"), changes)
    other, path = finished(recipe), tmp_path / "run"
    made = fedssl.run(recipe, str(path))
    assert isinstance(made, fedssl.Run)
    assert made.values == fedssl.read_run(str(other)).values == fedssl.resume(path).values
    measures = fedssl.evaluate(str(path), semi_supervised=[0.5])
    assert measures["mean"]["knn"] == pytest.approx(made.evaluated("knn", "after"), abs=0.006)
    assert "semi_supervised_0.5" in measures["0"]
    assert fedssl.write_report(path, images=False) == path / "report.html"
    both = fedssl.write_report([str(path), other], str(tmp_path / "both.html"), images=False)
    assert both == tmp_path / "both.html"
    assert both.is_file()


def test_one_override_instead_of_a_list_is_refused():
    with pytest.raises(TypeError, match=r"overrides: expected a list such as \['rounds=2'\]"):
        fedssl.load_recipe("fedbyol", "rounds=2")
