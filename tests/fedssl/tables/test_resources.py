"""Tables of resources: the paper's figures again, and how a table is read and written."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from fedssl.errors import UserError
from fedssl.recipe.reading import parse_recipe
from fedssl.tables.resources import run_resource_table
from fedssl.tables.table import load_table
from tests.fedssl.conftest import AVERAGED, tiny_values

SMALL = AVERAGED | {
    "architectures": ["small_vit"],
    "rounds": 8,
    "objective": {"name": "moco_v3", "hidden_features": 16, "output_features": 8},
    "training": {"local_epochs": 3, "batch_size": 5},
    "partition": {"name": "iid", "clients": 2, "min_samples": 1},
}


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
    logged = 8 * 5  # samples, loss, total loss, memory and operations
    payload = 4 * (12 * block + outside + heads) + statistics
    assert rows["FedMoCoV3"]["traffic"].ours == pytest.approx(180 * (2 * payload + logged) / (1000 * 2**20), rel=1e-12)
    passes = 12 * (12 * width**2 * tokens + 2 * tokens**2 * width) + 64 * 48 * width
    passes += width * 512 + 512 * 512 + 512 * 256 + 256 * 512 + 512 * 256
    assert rows["FedMoCoV3"]["flops"].ours == pytest.approx(180 * 3 * 3 * passes / 1e9, rel=1e-12)


@pytest.fixture
def small_table(tmp_path):
    """A table file over a recipe file: end-to-end, layer-wise, and layer-wise with everyone new."""
    recipe = tmp_path / "base.yaml"
    recipe.write_text(parse_recipe(tiny_values(**SMALL)).to_yaml())
    schedule = {"schedule": {"name": "layer_wise", "rounds_per_stage": 2}}
    values = {
        "name": "small",
        "kind": "resources",
        "image": [1, 8, 8],
        "seeds": [0],
        "metrics": ["memory", "flops", "traffic"],
        "rows": [
            {"label": "whole", "recipe": str(recipe)},
            {"label": "layers", "recipe": str(recipe), "settings": schedule, "relative_to": "whole"},
            {"label": "new", "recipe": str(recipe), "settings": schedule, "relative_to": "whole", "newcomers": True},
        ],
        "paper": {"whole": {"memory": "8.00", "flops": "100"}, "layers": {"memory": "2.00"}},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


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
        ({"paper": {"x": {"flops": "1"}}}, "paper names 'x'"),
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
