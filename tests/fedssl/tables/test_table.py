"""Tables: how they are read, the recipes of their cells, and the papers' figures in those that ship."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from fedssl.errors import UserError
from fedssl.recipe.overrides import shipped_names
from fedssl.recipe.reading import load_recipe
from fedssl.tables.runner import table_cells
from fedssl.tables.sweep import trials_of
from fedssl.tables.table import cell_path, cell_recipe, load_table
from tests.fedssl.conftest import ALIGNED, OWN_PART, tiny_values
from tests.fedssl.reports.synthetic_runs import ROWS, make_table, table_values

SEARCH = Path(__file__).parents[3] / "benchmarks" / "search_presets.yaml"


@pytest.mark.parametrize("name", [*shipped_names("table"), SEARCH], ids=lambda name: Path(name).stem)
def test_every_cell_of_the_tables_is_a_valid_recipe(name):
    table = trials_of(load_table(name)) if name == SEARCH else load_table(name)
    data = table.settings.get("data", {})
    # such a table is run with the path on the command line
    path = ["data.path=images.npz"] if data.get("name") == "npz" and "path" not in data else []
    for scenario in table.all_scenarios:
        for row in table.rows:
            recipe = cell_recipe(table, row, 5, ["rounds=7", *path], scenario)
            assert recipe.name == (f"{row.label} ({scenario.label})" if scenario.label else row.label)
            assert (recipe.seed, recipe.rounds) == (5, 7)


def test_recipes_and_part_files_are_seen_from_the_tables_folder(tmp_path, monkeypatch):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "own.py").write_text(OWN_PART)
    (folder / "mine.yaml").write_text(yaml.safe_dump(tiny_values()))
    own = {"regularizers": [{"name": "./own.py"}]}
    rows = [
        {"label": "a", "recipe": "mine.yaml", "settings": own},
        {"label": "b", "recipe": "mine.yaml"},
        {"label": "shipped", "recipe": "fedbyol"},
    ]
    scenarios = [{"label": "own", "settings": own}, {"label": "none"}]
    values = {"name": "t", "seeds": [0], "rows": rows, "scenarios": scenarios}
    (folder / "table.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir("/")
    table = load_table(folder / "table.yaml", trust=True)
    for row, scenario, expected in [(0, 1, True), (1, 0, True), (1, 1, False), (2, 0, True)]:
        recipe = cell_recipe(table, table.rows[row], 0, [], table.scenarios[scenario])
        assert [one.name for one in recipe.regularizers] == [str(folder / "own.py")] * expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": []}, "seeds: "),
        ({"seeds": [1, 1]}, "seeds must be different numbers, none below 0"),
        ({"seeds": [-1]}, "seeds must be different numbers, none below 0"),
        ({"metrics": ["accuracy"]}, "metrics.0: .*unknown metric; expected one of knn, .*got 'accuracy'"),
        ({"metrics": ["downstream_cifar10_nothing"]}, "metrics.0: .*unknown metric"),
        ({"method": "theirs"}, "method names 'theirs', but the rows' labels are ours, alone"),
        ({"baselines": ["x"]}, "baselines names 'x'"),
        ({"controls": ["x"]}, "controls names 'x'"),
        ({"paper": {"x": {"knn": "90.1"}}}, "paper names 'x'"),
        ({"baselines": ["ours"]}, "'ours' is named more than once"),
        ({"rows": [*ROWS, {"label": "Control-1", "recipe": "a"}]}, "'control 1' and 'Control-1' need labels that "),
        ({"rows": [*ROWS, {"label": "untrained", "recipe": "a"}]}, "'untrained' is the label of"),
        ({"rows": [{"label": "ours", "recipe": "a", "sets": {}}]}, "rows.0.sets: unknown key; .*label, recipe, set"),
        ({"scenarios": [{"settings": {}}]}, "every scenario needs a label"),
        ({"scenarios": [{"label": "a b"}, {"label": "A-b"}]}, "scenarios 'a b' and 'A-b' need labels that differ"),
        ({"scenarios": [{"label": "a", "paper": {"x": {"knn": "1"}}}]}, "paper names 'x'"),
        ({"scenarios": [{"label": "a"}], "paper": {"ours": {"knn": "1"}}}, "paper: a table with scenarios needs"),
        ({"verdict": "best"}, "verdict: .*'collaboration' or 'comparison'"),
        ({"control": ["x"]}, "control: unknown key; did you mean controls"),
        ({"name": "../up"}, "name: "),
    ],
)
def test_a_bad_table_is_refused_in_one_line(changes, message, tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text(yaml.safe_dump(table_values(**changes)))
    with pytest.raises(UserError, match=message) as error:
        load_table(path)
    assert "\n" not in str(error.value)


def test_a_table_that_is_not_there_or_none(tmp_path):
    with pytest.raises(UserError, match="no table 'digits_dem': did you mean digits_demo"):
        load_table("digits_dem")
    for text, message in ("- 1", "must hold a mapping of table keys, it holds list"), ("{", "is not YAML"):
        (tmp_path / "table.yaml").write_text(text)
        with pytest.raises(UserError, match=message):
            load_table(tmp_path / "table.yaml")


@pytest.fixture
def cell(tmp_path):
    """The recipes of a table's only row, one for each scenario; the row has the tiny recipe and settings of its own."""

    def build(row_settings, overrides=(), **changes):
        (tmp_path / "base.yaml").write_text(yaml.safe_dump(tiny_values(**ALIGNED)))
        row = {"label": "ours", "recipe": str(tmp_path / "base.yaml"), "settings": row_settings}
        table = make_table(baselines=[], controls=[], rows=[row], **changes)
        return [cell_recipe(table, table.rows[0], 3, overrides, scenario) for scenario in table.all_scenarios]

    return build


def test_settings_are_merged_and_lists_and_parts_replaced(cell):
    row = {"training": {"batch_size": 6}, "architectures": ["small_convnet_wide"], "objective": {"name": "simsiam"}}
    settings = {"training": {"batch_size": 4, "learning_rate": 0.5}, "rounds": 9}
    [recipe] = cell(row, ["rounds=1", "regularizers.0.weight=0.25"], settings=settings)
    with pytest.raises(UserError, match="a table sets seed itself"):
        cell(row, settings=settings | {"seed": 7})
    training = recipe.training
    assert (training.batch_size, training.learning_rate, training.local_epochs) == (6, 0.5, 1)
    assert recipe.architectures == ["small_convnet_wide"]
    assert recipe.rounds == 1
    assert recipe.regularizers[0].model_dump()["weight"] == 0.25
    assert (recipe.objective.name, recipe.objective.output_features) == ("simsiam", 256)  # the preset's
    [recipe] = cell({"objective": {"temperature": 0.3}}, settings={"objective": "simclr"})
    assert (recipe.objective.name, recipe.objective.temperature) == ("simclr", 0.3)


def test_a_scenario_stands_between_the_table_and_the_row(cell, tmp_path):
    scenario = {"label": "few clients", "settings": {"training": {"batch_size": 5, "local_epochs": 3}, "rounds": 7}}
    scenarios = [scenario, {"label": "as it is"}]
    first, second = cell({"training": {"batch_size": 6}}, scenarios=scenarios, settings={"rounds": 9})
    assert (first.name, second.name) == ("ours (few clients)", "ours (as it is)")
    assert (first.training.batch_size, first.training.local_epochs, first.rounds) == (6, 3, 7)
    assert (second.training.batch_size, second.training.local_epochs, second.rounds) == (6, 1, 9)
    assert cell_path(tmp_path, "ours", 3, "few clients") == tmp_path / "ours" / "few-clients" / "seed-3"
    assert cell_path(tmp_path, "ours", 3) == tmp_path / "ours" / "seed-3"
    cells = table_cells(make_table(scenarios=scenarios, rows=ROWS[:1], baselines=[], controls=[]), tmp_path)
    assert [(one.label, one.path) for one in cells] == [
        (f"ours, {label}", cell_path(tmp_path, "ours", seed, label))
        for seed in (0, 1)
        for label in ("few clients", "as it is")
    ]
    table = make_table(paper={"ours": {"knn": "71.2"}})
    assert [(one.label, one.settings, one.paper) for one in table.all_scenarios] == [("", {}, table.paper)]


def test_overrides_do_not_leak_into_the_table(tmp_path):
    settings = {"regularizers": [{"name": "cka_alignment", "weight": 2.0, "batch_size": 16}]}
    rows = [{"label": "ours", "recipe": "hetero_ssfl"}]
    table = make_table(baselines=[], controls=[], rows=rows, settings=settings)
    cell_recipe(table, table.rows[0], 0, ["regularizers.0.weight=5"])
    assert cell_recipe(table, table.rows[0], 0).regularizers[0].model_dump()["weight"] == 2.0


def test_a_row_with_a_partition_of_its_own_keeps_it():
    """Or else clients that a user asks for would train where the table says one place."""
    table = load_table("how_much_can_peers_give")
    for override in (
        "partition.clients=3",
        "partition={name: dirichlet, clients: 3, alpha: 0.5, classes_per_client: null}",
    ):
        overrides = [override, "data.path=a.npz", "preset=small_colour"]
        clients = {row.label: cell_recipe(table, row, 0, overrides).partition.clients for row in table.rows}
        assert clients.pop("all in one place") == 1
        assert set(clients.values()) == {3}


def test_the_rows_of_a_table_are_measured_on_the_same_images(tmp_path):
    """A preset's number depends on the recipe: local_only has more models to measure than fedbyol."""
    data = {"name": "npz", "path": str(tmp_path / "a.npz")}
    np.savez(data["path"], **{f"x_{part}": np.zeros((2000, 8, 8, 1), np.uint8) for part in ("train", "test")})
    rows = [{"label": name, "recipe": name} for name in ("local_only", "fedbyol")]
    settings = {"data": data, "rounds": 1, "partition": {"name": "iid", "classes_per_client": None}}
    limits = [load_recipe(name, [f"data={data}", "rounds=1"]).evaluation.images for name in ("local_only", "fedbyol")]
    assert None not in limits
    assert limits[0] != limits[1]
    for expected in (None, 7):
        table = make_table(method=None, baselines=[], controls=[], rows=rows, settings=settings)
        assert [cell_recipe(table, row, 0).evaluation.images for row in table.rows] == [expected] * 2
        assert [cell_recipe(table, row, 0).checkpoints for row in table.rows] == [1] * 2
        settings |= {"evaluation": {"images": 7}}


# The papers' figures, against a sample copied by hand from the papers

ON = "downstream_{}_fine_tune_accuracy"


@pytest.mark.parametrize(
    ("table", "scenario", "row", "metric", "printed"),
    [
        # Hetero-SSFL: Tables 1 to 6
        ("hetero_ssfl_table1", "CIFAR-10", "Hetero-SSFL", "linear", "90.29 ± 0.3"),
        ("hetero_ssfl_table1", "CIFAR-10", "Hetero-SSFL", "linear@resnet34", "93.7"),
        ("hetero_ssfl_table1", "CIFAR-100", "FedEMA", "semi_supervised_0.01", "23.11 ± 0.65"),
        ("hetero_ssfl_tiny_imagenet", "", "FedU", "linear", "58.23 ± 2.3"),
        ("hetero_ssfl_table2", "CIFAR-10", "FedEMA", "linear", "85.9 ± 0.3"),
        ("hetero_ssfl_table3", "20 clients (5)", "Hetero-SSFL", "linear", "57.5 ± 0.9"),
        # FedU2: Tables 1 and 2
        ("fedu2_table1", "CIFAR-100, cross-silo (K = 10)", "Orchestra", "semi_supervised_0.1", "48.85"),
        ("fedu2_table1_small", "cross-silo (K = 10)", "FedX-SimCLR", "semi_supervised_0.01", "65.03"),
        ("fedu2_table2", "CIFAR-100, alpha 5", "FedU2 without EUA", "knn", "54.61"),
        # LW-FedSSL: Tables 2 to 4 and 6 to 13, accuracies
        ("lw_fedssl_accuracy", "", "Prog-FedSSL, 6 layers a stage", ON.format("cifar100"), "66.78"),
        ("lw_fedssl_resnet18", "", "Prog-FedSSL", "downstream_caltech101_fine_tune_per_class_accuracy", "63.59"),
        ("lw_fedssl_participation", "50 of 100 clients a round", "LW-FedSSL", ON.format("tinyimagenet"), "41.17"),
        ("lw_fedssl_medmnist", "BloodMNIST, beta = 0.5", "FedMoCoV3", "fine_tune_per_class_accuracy", "92.14"),
    ],
)
def test_the_papers_figures_stand_in_the_table(table, scenario, row, metric, printed):
    papers = {one.label: one.paper for one in load_table(table).all_scenarios}
    assert papers[scenario][row][metric] == printed


def test_every_row_of_a_papers_table_has_a_figure_in_every_scenario():
    for name in [f"hetero_ssfl_table{k}" for k in (1, 2, 3)] + ["fedu2_table1", "fedu2_table2"]:
        table = load_table(name)
        for scenario in table.all_scenarios:
            assert {row.label for row in table.rows} - set(scenario.paper) <= {"Local SSL"}, (name, scenario.label)


def test_the_page_of_what_reproduces_what_names_every_table_that_ships():
    page = (Path(__file__).parents[3] / "docs" / "what_reproduces_what.md").read_text(encoding="utf-8")
    named = {name for code in re.findall("`([^`]+)`", page) for name in code.split()}
    assert set(shipped_names("table")) <= named
