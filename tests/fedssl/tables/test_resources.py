"""What tables cost: tables of resources with the paper's figures, and what `fedssl run-table NAME --dry-run` lists."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from fedssl.data.options import DataOptions
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.recipe.reading import parse_recipe
from fedssl.reports.cost import estimate, totals
from fedssl.tables.dry_run import dry_run, run_cost, training_data
from fedssl.tables.resources import run_resource_table
from fedssl.tables.table import ExpectedData, load_table
from tests.fedssl.conftest import ALIGNED, AVERAGED, tiny_values

STAGES = {"name": "layer_wise", "rounds_per_stage": 2}
SMALL = AVERAGED | {
    "architectures": ["small_vit"],
    "rounds": 8,
    "objective": {"name": "moco_v3", "hidden_features": 16, "output_features": 8},
    "training": {"local_epochs": 3, "batch_size": 5},
    "partition": {"name": "iid", "clients": 2, "min_samples": 1},
}


def write_table(folder: Path, recipe: dict[str, Any], rows: list[dict[str, Any]], **values: Any) -> Path:
    """A table file whose rows are all of one recipe file."""
    (folder / "base.yaml").write_text(parse_recipe(tiny_values(**recipe)).to_yaml())
    rows = [{"recipe": str(folder / "base.yaml")} | row for row in rows]
    (folder / "small.yaml").write_text(yaml.safe_dump({"name": "small", "rows": rows} | values))
    return folder / "small.yaml"


def test_flops_and_traffic_of_lw_fedssl_are_the_papers(tmp_path):
    """ViT-Tiny at full size, in batches of two: neither figure depends on the batch. Some rows of the shipped table."""
    table = load_table("lw_fedssl_resources")
    bounds = {  # FLOPs within 0.01, traffic within 0.02, as printed in the paper's Tables 2, 3 and 5
        "FedMoCoV3": (1.0, 1.0),
        "LW-FedSSL": (0.24, 0.20),
        "Prog-FedSSL, 6 layers a stage": (0.75, 0.78),
    }
    kept = [row for row in table.rows if row.label in bounds]
    paper = {label: figures for label, figures in table.paper.items() if label in bounds}
    small = table.model_copy(update={"rows": kept, "paper": paper})
    rows = run_resource_table(small, tmp_path / "a", ["training.batch_size=2"])
    assert list(rows) == list(bounds)
    for label, (flops, traffic) in bounds.items():
        assert rows[label]["flops"].ratio == pytest.approx(flops, abs=0.01)
        assert rows[label]["traffic"].ratio == pytest.approx(traffic, abs=0.02)
    # by hand: a block has 12 w^2 + 13 w parameters at width w = 192; 64 patches and a class token pass it
    width, tokens = 192, 65
    block = 12 * width**2 + 13 * width
    outside = 3 * 16 * width + width + tokens * width + width + 2 * width  # patches, position, class token, last norm
    heads = width * 512 + 512 * 512 + 512 * 256 + 256 * 512 + 512 * 256 + 3 * 2 * 512  # linear maps and BatchNorm
    statistics = 4 * 2 * (3 * 512 + 2 * 256) + 5 * 8  # running means and variances, and counters of eight bytes
    logged = 8 * 6  # samples, loss, total loss, gradient norm, memory and operations
    payload = 4 * (12 * block + outside + heads) + statistics
    assert rows["FedMoCoV3"]["traffic"].ours == pytest.approx(180 * (2 * payload + logged) / (1000 * 2**20), rel=1e-12)
    passes = 12 * (12 * width**2 * tokens + 2 * tokens**2 * width) + 64 * 48 * width
    passes += width * 512 + 512 * 512 + 512 * 256 + 256 * 512 + 512 * 256
    assert rows["FedMoCoV3"]["flops"].ours == pytest.approx(180 * 3 * 3 * passes / 1e9, rel=1e-12)


@pytest.fixture
def small_table(tmp_path):
    """End-to-end, layer-wise, and layer-wise with everyone new."""
    layers = {"settings": {"schedule": STAGES}, "relative_to": "whole"}
    rows = [{"label": "whole"}, {"label": "layers"} | layers, {"label": "new", "newcomers": True} | layers]
    values = {"kind": "resources", "image": [1, 8, 8], "seeds": [0], "metrics": ["memory", "flops", "traffic"]}
    paper = {"whole": {"memory": "8.00", "flops": "100"}, "layers": {"memory": "2.00"}}
    return write_table(tmp_path, SMALL, rows, paper=paper, **values)


def test_a_table_is_counted_by_the_command_and_written(small_table, fedssl):
    code, out, err = fedssl("run-table", str(small_table), "training.batch_size=6", "--output", "o")
    assert code == 0, err
    assert "counting layers" in out
    assert "memory (GB)  ratio  paper  ratio" in out
    with open("o/table.csv") as file:
        rows = {(row["row"], row["resource"]): row for row in csv.DictReader(file)}
    assert rows["layers", "memory"]["paper_ratio"] == "0.25"
    assert rows["layers", "flops"]["paper"] == rows["layers", "flops"]["paper_ratio"] == ""
    for resource in ("memory", "flops", "traffic"):
        whole, layers = (float(rows[label, resource]["ours"]) for label in ("whole", "layers"))
        assert float(rows["layers", resource]["ratio"]) == layers / whole < 1
    assert float(rows["new", "traffic"]["ours"]) > float(rows["layers", "traffic"]["ours"])
    assert rows["new", "flops"]["ours"] == rows["layers", "flops"]["ours"]
    assert Path("o/table.md").read_text().count("\n| ") == 4
    assert Path("o/table.yaml").read_text().startswith("# with training.batch_size=6\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "runs"}, "metrics memory, flops, traffic need kind: resources"),
        ({"metrics": ["knn"]}, "metrics memory, flops, traffic need kind: resources"),
        ({"scenarios": [{"label": "a"}], "paper": {}}, "cannot have scenarios or a method"),
        ({"method": "whole"}, "cannot have scenarios or a method"),
        ({"paper": {"whole": {"flops": "about 3"}}}, "paper: expected a number such as 2.05, got 'about 3'"),
        ({"rows": [{"label": "a", "recipe": "fedbyol", "relative_to": "b"}], "paper": {}}, "relative_to names 'b'"),
    ],
)
def test_a_bad_table_is_refused(small_table, changes, message):
    small_table.write_text(yaml.safe_dump(yaml.safe_load(small_table.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        load_table(small_table)


def test_equal_steps_are_refused_where_passes_are_counted(small_table, tmp_path):
    with pytest.raises(UserError, match=r"row whole has training\.local_steps 4, .* use training\.local_epochs"):
        run_resource_table(load_table(small_table), tmp_path / "a", ["training.local_steps=4"])


# Dry runs


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
@pytest.mark.parametrize("values", [ALIGNED, SMALL | {"schedule": STAGES}])
def test_operations_are_those_of_fedssl_cost(values):
    recipe = parse_recipe(tiny_values(**values))
    data = training_data(recipe.data, recipe.seed, None)
    found = run_cost(recipe, data, {})
    assert found.flops == totals(estimate(build_federation(recipe)))["flops"]
    assert found.seconds > 0


@pytest.mark.usefixtures("short_timings")
def test_sampled_clients_and_dropout_count_on_average():
    recipe = parse_recipe(tiny_values(**AVERAGED))
    data, known_steps = training_data(recipe.data, 0, None), {}
    whole = run_cost(recipe, data, known_steps)
    half = run_cost(recipe.model_copy(update={"client_dropout": 0.5}), data, known_steps)
    assert half.steps == whole.steps / 2
    one = run_cost(recipe.model_copy(update={"clients_per_round": 1}), data, known_steps)
    assert one.flops == pytest.approx(whole.flops / recipe.partition.clients)


@pytest.mark.usefixtures("short_timings")
def test_missing_data_is_named_and_counted_where_the_table_expects_it(table):
    npz = load_table(table).model_copy(update={"settings": {"preset": "digits", "data": {"name": "npz"}}})
    text = listed(npz)
    assert "Missing for a run: give data.path=PATH, an .npz file" in text
    assert "In all" not in text
    expected = ExpectedData(images=200, classes=10, shape=(1, 8, 8))
    text = listed(npz.model_copy(update={"expected_data": expected}))
    assert "Missing for a run: give data.path=PATH, an .npz file" in text
    assert "In all: " in text
    assert "Missing for a run: there is no nowhere.npz" in listed(npz, "data.path=nowhere.npz")


def test_the_published_sizes_are_known_without_the_data(tmp_path):
    data = training_data(DataOptions(name="cifar100", path=tmp_path, public_holdout=5000), 0, None)
    assert (len(data.train_labels), len(data.class_names)) == (45_000, 100)
    assert data.train_images.shape == (45_000, 3, 32, 32)
    assert torch.bincount(data.train_labels).tolist() == [450] * 100


def test_image_files_are_counted_by_their_folders(tmp_path):
    for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (12, 12)).save(tmp_path / name / f"{number}.png")
    data = training_data(DataOptions(name="folder", path=tmp_path, image_size=16), 0, None)
    assert (len(data.train_labels), len(data.class_names)) == (6, 2)
    assert data.train_images.shape == (6, 1, 16, 16)


def test_a_recipe_that_is_refused_ends_the_dry_run(table):
    with pytest.raises(UserError, match=r"row 'one epoch': client 0 has .* fewer than training\.batch_size"):
        listed(load_table(table), "training.batch_size=2000")
