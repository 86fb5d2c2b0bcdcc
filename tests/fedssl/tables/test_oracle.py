"""The room above the controls: rows that align to the encoder of another row, and the share that a method closes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedssl.data.pixels import normalize
from fedssl.errors import UserError
from fedssl.export.encoder_folder import read_encoder
from fedssl.federation import build_federation
from fedssl.recipe.reading import load_stored_recipe
from fedssl.run_folder.directory import RunDirectory
from fedssl.tables.results import Results, read_results, verdict
from fedssl.tables.runner import run_table
from fedssl.tables.table import Table, cell_path, cell_recipe, encoder_path
from tests.fedssl.reports.synthetic_runs import evaluated, make_table, write_run

SMALL = {
    "preset": "digits",
    "rounds": 2,
    "architectures": ["small_convnet"],
    "data": {"name": "digits", "train_limit": 80, "test_limit": 30, "public_holdout": 30},
    "partition": {"name": "iid", "clients": 2},
    "training": {"local_epochs": 1, "batch_size": 8},
}
TO_ORACLE = {"name": "representation_mean", "target": "oracle", "layer": "encoder", "kernel": "linear"}


def table_of(settings: dict[str, Any]) -> Table:
    central = {"partition": {"name": "iid", "clients": 1}} | settings
    to_oracle = {"label": "oracle", "recipe": "hetero_ssfl_half_whitened", "oracle": "central"}
    rows = [
        to_oracle | {"settings": {"aggregators": [TO_ORACLE]}},
        {"label": "central", "recipe": "centralised_byol", "settings": central},
    ]
    return Table.model_validate({"name": "room", "seeds": [3], "metrics": ["knn"], "settings": SMALL, "rows": rows})


def test_a_row_aligns_to_the_encoder_of_another_row_which_never_changes(tmp_path):
    output = tmp_path / "out"
    run_table(table_of({}), output)
    run = output / "oracle" / "seed-3"
    public = build_federation(load_stored_recipe(RunDirectory.open(run), trust=False)).dataset.public_images
    assert public is not None
    with torch.no_grad():
        expected = read_encoder(encoder_path(output / "central" / "seed-3")).network(normalize(public))
    state = RunDirectory.open(run).server_state().tensors
    for k in (0, 1):
        torch.testing.assert_close(state[f"representation.{k}"], expected)
    moved = Path(shutil.copytree(output, tmp_path / "moved"))  # the path of the encoder is the table's
    run_table(table_of({}), moved)


def test_without_a_folder_the_cost_is_that_of_untrained_kernels_and_a_row_without_the_target_is_refused():
    table = table_of({})
    assert cell_recipe(table, table.rows[0], 3).aggregators[0].target == "untrained"
    table.rows[0].settings.clear()
    with pytest.raises(UserError, match="row 'oracle': the row has an oracle, but none of its aggregators has target"):
        cell_recipe(table, table.rows[0], 3)


def test_rows_without_the_encoder_they_align_to_fail_and_the_others_go_on(tmp_path):
    with pytest.raises(UserError, match=r"2 of 2 runs failed: oracle, seed 3: .*central.*; central, seed 3: .*batch"):
        run_table(table_of({"training": {"batch_size": 500}}), tmp_path / "out")


def test_the_verdict_says_which_share_of_the_room_is_closed():
    labels = ("ours", "alone", "weak", "strong", "central")
    rows = [{"label": label, "recipe": "local_only"} for label in (*labels, "other")]
    table = make_table(controls=["weak", "strong"], ceiling=["central"], metrics=["knn"], rows=rows)

    def said(ceiling: list[float], **knn: list[float]) -> str:
        values = {(label, "knn"): dict(enumerate(reached)) for label, reached in knn.items()}
        return verdict(table, Results(after=values, ceiling={"knn": dict(enumerate(ceiling))}))

    others = {"ours": [42.0, 43.0], "alone": [30.0, 30.0], "weak": [20.0, 20.0], "strong": [40.0, 42.0]}
    text = "It closes 30 ± 14 % of the 5.0 points between strong, the best control, and central."
    assert text in said([45.0, 47.0], **others)  # 2 of 5 and 1 of 5 points, of seed 0 and 1
    assert "There is no room to close: central does not beat strong" in said([42.0, 42.1], **others)
    assert "Runs of central are missing" in said([], **others)


@pytest.mark.parametrize(
    ("trained", "expected"), [(["small_vit", "small_convnet"], (2 * 50.0 + 80.0) / 3), (["small_vit"], 80.0)]
)
def test_the_ceiling_is_the_mean_over_clients_of_the_row_with_their_architecture(tiny, tmp_path, trained, expected):
    reached = {"small_convnet": 50.0, "small_vit": 80.0}
    rows = [{"label": label, "recipe": "local_only"} for label in ("ours", *trained)]
    table = Table.model_validate(
        {"name": "small", "seeds": [0], "method": "ours", "ceiling": trained, "metrics": ["knn"], "rows": rows}
    )
    both = tiny(architectures=list(reached))
    write_run(cell_path(tmp_path, "ours", 0), both, evaluated(both.rounds, "knn", [1.0, 2.0, 3.0]))
    for name in trained:
        recipe = tiny(architectures=[name])
        write_run(cell_path(tmp_path, name, 0), recipe, evaluated(recipe.rounds, "knn", [reached[name]]))
    assert read_results(table, tmp_path).ceiling["knn"][0] == pytest.approx(expected)
    shutil.rmtree(cell_path(tmp_path, trained[0], 0))
    assert read_results(table, tmp_path).ceiling == {}
    write_run(cell_path(tmp_path / "2", "ours", 0), tiny(architectures=["small_resnet10"]), [(2, "0", "knn", 1.0)])
    assert read_results(table, tmp_path / "2").ceiling == {}
