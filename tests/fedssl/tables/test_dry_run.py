"""What `fedssl run-table NAME --dry-run` lists."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.recipe.reading import parse_recipe
from fedssl.reports.cost import estimate, totals
from fedssl.tables.dry_run import RunCost, dry_run, run_cost, training_data
from fedssl.tables.table import ExpectedData, load_table
from tests.fedssl.conftest import ALIGNED, AVERAGED, LW_FEDSSL, tiny_values
from tests.fedssl.data.data_files import write_image

FEW_PUBLIC = ALIGNED | {"data": {"name": "digits", "public_holdout": 60, "public_limit": 9, "train_limit": 60}}


def write_table(folder: Path, recipe: dict[str, Any], rows: list[dict[str, Any]], **values: Any) -> Path:
    """A table file whose rows are all of one recipe file."""
    (folder / "base.yaml").write_text(parse_recipe(tiny_values(**recipe)).to_yaml())
    rows = [{"recipe": str(folder / "base.yaml")} | row for row in rows]
    (folder / "small.yaml").write_text(yaml.safe_dump({"name": "small", "rows": rows} | values))
    return folder / "small.yaml"


def listed(table, *overrides):
    lines = []
    dry_run(table, overrides, lines.append)
    return "\n".join(lines)


@pytest.fixture
def table(tmp_path):
    """Two rows, two scenarios, two seeds, on digits."""
    three = {"label": "three epochs", "settings": {"training": {"local_epochs": 3}}}
    scenarios = [
        {"label": "few", "paper": {"one epoch": {"knn": "71.20"}}},
        {"label": "many", "settings": {"rounds": 4}, "paper": {"three epochs": {"linear": "88.8 ± 0.3"}}},
    ]
    values = {"seeds": [0, 1], "metrics": ["knn", "linear"], "scenarios": scenarios}
    return write_table(tmp_path, AVERAGED, [{"label": "one epoch"}, three], **values)


@pytest.fixture
def short_timings(monkeypatch):
    """One step of each kind is timed, in the smallest batch."""
    monkeypatch.setattr("fedssl.tables.dry_run.SECONDS", 0.0)


def test_runs_and_the_papers_figures_are_listed_and_nothing_is_written(table, fedssl, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    code, out, err = fedssl("run-table", str(table), "--dry-run", columns=80)
    assert code == 0, err
    assert "8 runs: 2 rows x 2 scenarios x 2 seeds (0, 1)" in out
    few, many = out.split("\nfew\n")[1].split("\nmany\n")
    for text, shown in ((few, ("paper: kNN %", "71.20")), (many, ("paper: linear %", "88.8 ± 0.3", "In all: "))):
        assert all(part in text for part in shown), text
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("short_timings")
@pytest.mark.parametrize(("values", "within"), [(ALIGNED, 1e-9), (FEW_PUBLIC, 1e-9), (LW_FEDSSL, 0.1)])
def test_operations_are_those_of_fedssl_cost(values, within):
    recipe = parse_recipe(tiny_values(**values))
    found = run_cost(recipe, training_data(recipe.data, recipe.seed, None))
    assert found.flops == pytest.approx(totals(estimate(build_federation(recipe)))["flops"], rel=within)
    assert found.seconds > 0


@pytest.mark.usefixtures("short_timings")
def test_sampled_clients_and_dropout_count_on_average():
    recipe = parse_recipe(tiny_values(**AVERAGED))
    data = training_data(recipe.data, 0, None)
    whole = run_cost(recipe, data)
    half = run_cost(recipe.model_copy(update={"client_dropout": 0.5}), data)
    assert half.steps == whole.steps / 2
    one = run_cost(recipe.model_copy(update={"clients_per_round": 1}), data)
    assert one.flops == pytest.approx(whole.flops / recipe.partition.clients)


@pytest.mark.usefixtures("short_timings")
def test_missing_data_is_named_and_counted_where_the_table_expects_it(table):
    npz = load_table(table).model_copy(update={"settings": {"preset": "digits", "data": {"name": "npz"}}})
    for expected in (None, ExpectedData(images=200, classes=10, shape=(1, 8, 8))):
        text = listed(npz.model_copy(update={"expected_data": expected}))
        assert "Missing for a run: give data.path=PATH, an .npz file" in text
        assert ("In all" in text) == (expected is not None)
    for override in ("data.path=nowhere.npz", "data={name: npz, path: nowhere.npz}"):
        assert "Missing for a run: there is no nowhere.npz" in listed(npz, override)
    with pytest.raises(UserError, match="data: expected a mapping such as"):
        listed(npz, "data=nowhere.npz")


def test_the_published_sizes_are_known_without_the_data(tmp_path):
    options = DataOptions(name="cifar100", path=tmp_path, validation_fraction=0.2, public_holdout=5000)
    data = training_data(options, 0, None)
    assert (len(data.train_labels), len(data.class_names)) == (35_000, 100)
    assert data.train_images.shape == (35_000, 3, 32, 32)
    assert torch.bincount(data.train_labels).tolist() == [350] * 100


def test_image_files_are_counted_by_their_folders(tmp_path):
    for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
        for number in range(3):
            write_image(tmp_path / name / f"{number}.png", 0, "L", (12, 12))
    data = training_data(DataOptions(name="folder", path=tmp_path, image_size=16, validation_fraction=0.3), 0, None)
    assert (len(data.train_labels), len(data.class_names)) == (4, 2)
    assert data.train_images.shape == (4, 1, 16, 16)


@pytest.mark.usefixtures("short_timings")
@pytest.mark.parametrize(
    ("data", "partition"),
    [
        ({"path": "scans", "labels": "scans.csv"}, {"name": "dirichlet_equal"}),
        ({"path": "scans", "labels": "scans.csv"}, {"name": "column", "column": "hospital"}),
        ({"path": "scans/ma", "more_paths": ["scans/mb"]}, {"name": "column", "column": "folder"}),
    ],
    ids=["labels of a table", "a column of a table", "several folders"],
)
def test_labels_and_columns_of_image_files_are_read_once_for_all_rows(data, partition, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    lines = ["file;label;hospital"]
    for number in range(60):
        name = f"m{'ab'[number % 2]}/{number}.png"
        write_image(tmp_path / "scans" / name, number, "L", (12, 12))
        lines.append(f"{name};{('cat', 'dog')[number // 2 % 2]};{'ab'[number % 2]}")
    (tmp_path / "scans.csv").write_text("\n".join(lines))
    data = {"name": "images", "image_size": 16, "train_limit": 40, **data}
    (tmp_path / "scans" / "ma" / "notes.txt").touch()
    recipe = AVERAGED | {"data": data, "partition": {"clients": 2, **partition}}
    rows = [{"label": label} for label in ("own", "again")]
    assert "In all: " in listed(load_table(write_table(tmp_path, recipe, rows, seeds=[0])))
    assert caplog.text.count("1 file is left out of") == 1
    options = DataOptions(**data)
    noise, read = training_data(options, 0, None), load_dataset(options, 0)
    assert (noise.class_names, noise.columns.keys()) == (read.class_names, read.columns.keys())
    assert torch.bincount(noise.train_labels).equal(torch.bincount(read.train_labels))
    assert noise.train_images.shape == read.train_images.shape


def test_runs_that_differ_in_what_costs_nothing_are_timed_once(table, monkeypatch):
    timed = []
    monkeypatch.setattr(f"{dry_run.__module__}.run_cost", lambda *given: timed.append(given) or RunCost(1.0, 2.0, 3.0))
    text = listed(load_table(table))
    assert len(timed) == 4  # rows and scenarios; of each seed they cost the same
    assert "In all: 16.0 FLOPs" in text
    rates = [{"label": str(rate), "settings": {"training": {"learning_rate": rate}}} for rate in (0.1, 0.2)]
    timed.clear()
    listed(load_table(write_table(table.parent, AVERAGED, rates, seeds=[0])))
    assert len(timed) == 1


def test_a_recipe_that_is_refused_ends_the_dry_run(table):
    with pytest.raises(UserError, match=r"row 'one epoch': client 0 has .* fewer than training\.batch_size"):
        listed(load_table(table), "training.batch_size=2000")
