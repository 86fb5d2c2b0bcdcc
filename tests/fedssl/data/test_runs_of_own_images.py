"""Whole runs on a folder of images: without labels, larger than the memory, dealt by a column, and on Flower."""

import json
from pathlib import Path

import pytest

from fedssl.cli import main
from fedssl.engines import in_process
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.reports.evaluation import evaluate_run
from fedssl.reports.report import write_report
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import AVERAGED, METHODS
from tests.fedssl.data.data_files import good_arrays, random_pixels, save
from tests.fedssl.data.image_samples import write_two_classes
from tests.fedssl.data.test_images import write_table
from tests.fedssl.engines.test_in_process import contents

IID = {"name": "iid", "clients": 3}
MEASURES = {"effective_rank", "alignment", "uniformity"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Sixty gray images of two sizes; the cache is beside them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_two_classes(tmp_path / "images")


def data_of(folder: Path, **options: object) -> dict[str, object]:
    return {"name": "images", "path": str(folder), "image_size": 8, **options}


def without_recipe(path: Path) -> dict[str, bytes]:
    """The files of a run's folder, without the recipe and its digest."""
    files = {name: data for name, data in contents(path).items() if name != "recipe.yaml"}
    manifest = json.loads(files["checkpoints/manifest.json"])
    del manifest["digests"]["recipe.yaml"]
    return files | {"checkpoints/manifest.json": json.dumps(manifest).encode()}


@pytest.mark.parametrize("changes", [AVERAGED, {}], ids=["global", "personal"])
def test_a_run_without_labels(folder, tiny, tmp_path, changes):
    recipe = tiny(**changes, data=data_of(folder), partition=IID)
    in_process.run(recipe, tmp_path / "run")
    run = read_run(tmp_path / "run")
    evaluated = {metric for number, who, metric in run.values if number in (0, 2)} - {
        *("loss", "total_loss", "bytes_up", "bytes_down", "memory", "flops", "local_model_distance")
    }
    assert evaluated == MEASURES
    assert (list(run.class_names), run.class_counts) == (["images"], [[20], [20], [20]])
    page = write_report([tmp_path / "run"]).read_text()
    assert "the images have no class each, so no accuracy can be measured" in page
    assert "kNN accuracy" not in page
    table = evaluate_run(tmp_path / "run").read_text().splitlines()
    assert table[0] == "client,effective_rank,alignment,uniformity"
    with pytest.raises(UserError, match="semi-supervised evaluation needs labels"):
        evaluate_run(tmp_path / "run", [0.1])


def test_a_labelled_run_is_measured_as_ever(folder, tiny, tmp_path):
    recipe = tiny(data=data_of(folder, labels="folders"), partition=IID)
    in_process.run(recipe, tmp_path / "run")
    metrics = {metric for _, _, metric in read_run(tmp_path / "run").values}
    assert {"knn", "linear", "effective_rank"} <= metrics
    assert not metrics & {"alignment", "uniformity"}
    assert "no class each" not in write_report([tmp_path / "run"]).read_text()


@pytest.mark.parametrize("labels", [None, "folders"])
def test_in_memory_and_in_a_file_the_run_is_the_same_bit_for_bit(folder, noisy, tmp_path, labels):
    for place, limit in (("memory", None), ("file", 0)):
        recipe = noisy(**AVERAGED, data=data_of(folder, labels=labels, memory_limit=limit), partition=IID)
        in_process.run(recipe, tmp_path / place)
    assert without_recipe(tmp_path / "memory") == without_recipe(tmp_path / "file")


def test_every_method_runs_from_a_file(folder, tiny, tmp_path):
    for kind, changes in METHODS.items():
        data = data_of(folder, memory_limit=0, public_holdout=15)
        in_process.run(tiny(**changes, data=data, partition=IID), tmp_path / kind)
        assert read_run(tmp_path / kind).finished


def test_a_stopped_run_continues(folder, tiny, tmp_path, monkeypatch):
    recipe = tiny(**AVERAGED, data=data_of(folder, memory_limit=0), partition=IID)
    in_process.run(recipe, tmp_path / "whole")

    class Stopped(Exception):
        pass

    def stop_after_round_1(directory: RunDirectory, number: int, *arguments: object, **keys: object) -> None:
        commit(directory, number, *arguments, **keys)
        if number == 1:
            raise Stopped

    commit = RunDirectory.commit
    monkeypatch.setattr(RunDirectory, "commit", stop_after_round_1)
    with pytest.raises(Stopped):
        in_process.run(recipe, tmp_path / "stopped")
    monkeypatch.setattr(RunDirectory, "commit", commit)
    in_process.resume(tmp_path / "stopped")
    assert contents(tmp_path / "stopped")["metrics.csv"] == contents(tmp_path / "whole")["metrics.csv"]


def test_a_column_deals_the_images(folder, tiny, tmp_path):
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))
    rows = [{"file": name, "site": "xyz"[number // 30]} for number, name in enumerate(files)]
    table = write_table(tmp_path / "table.csv", rows)
    data = data_of(folder, labels=str(table), label_column=None)
    recipe = tiny(data=data, partition={"name": "column", "column": "site", "clients": 2})
    in_process.run(recipe, tmp_path / "run")
    assert read_run(tmp_path / "run").class_counts == [[30], [30]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"objective": "supervised"},
            r"objective supervised trains on labels, and the images of data\.name=images have",
        ),
        (
            {"partition": {"name": "disjoint_classes", "clients": 3}},
            r"partition\.name=disjoint_classes divides the cla",
        ),
        ({"partition": {"name": "dirichlet", "clients": 3}}, r"set partition='\{name: iid, clients: 3\}'"),
        ({"evaluation": {"semi_supervised": [0.1]}}, r"semi-supervised evaluation needs labels"),
        ({"evaluation": {"fine_tune": {}}}, r"fine-tuning needs labels"),
    ],
)
def test_what_needs_labels_is_refused(folder, tiny, changes, says):
    with pytest.raises(UserError, match=says):
        build_federation(tiny(**AVERAGED, **({"data": data_of(folder), "partition": IID} | changes)))


@pytest.mark.parametrize(
    ("keys", "test_images"),
    [({"x": "x_train"}, 0), ({"x_train": "x_train", "x_test": "x_test"}, 5), ({"train_images": "x_train"}, 0)],
)
def test_npz_without_labels(tmp_path, tiny, keys, test_images):
    arrays = {key: good_arrays()[name].repeat(3, axis=0) for key, name in keys.items()}
    path = save(tmp_path / "a.npz", **arrays, other=random_pixels(3))
    dataset = build_federation(
        tiny(data={"name": "npz", "path": str(path)}, partition={"name": "iid", "clients": 2})
    ).dataset
    assert not dataset.labelled
    assert len(dataset.train_images) == 36
    assert len(dataset.test_images) == 3 * test_images


def test_the_command_line_shows_the_measures(folder, tiny, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(tiny(**AVERAGED, data=data_of(folder), partition=IID).to_yaml())
    monkeypatch.setattr("sys.argv", ["fedssl", "run", str(recipe), "--output", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "effective rank  alignment  uniformity" in out
    assert "kNN" not in out
    monkeypatch.setattr("sys.argv", ["fedssl", "partition", str(recipe)])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.splitlines()[0].split() == ["client", "images", "total"]


def several_labels(path: Path, **changes: object) -> Path:
    arrays = good_arrays()
    arrays = {key: arrays[key].repeat(3, axis=0)[:, :6, :6, 0] for key in ("x_train", "x_test")}
    arrays |= {f"y_{part}": random_pixels(len(arrays[f"x_{part}"]), 4) % 2 for part in ("train", "test")}
    return save(path, **(arrays | changes))


def test_several_labels_an_image_are_measured_by_auroc(tiny, tmp_path):
    data = {"name": "npz", "path": str(several_labels(tmp_path / "a.npz")), "public_holdout": 6}
    recipe = tiny(**AVERAGED, data=data, partition={"name": "iid", "clients": 2})
    dataset = build_federation(recipe).dataset
    assert not dataset.labelled
    assert dataset.train_targets.shape == (30, 4)
    assert dataset.test_targets.shape == (15, 4)
    in_process.run(recipe, tmp_path / "run")
    run = read_run(tmp_path / "run")
    measured = {metric for _, who, metric in run.values if who == "global"} - {"local_model_distance"}
    assert measured == MEASURES | {"linear_auroc"}
    assert "linear AUROC (%)" in write_report([tmp_path / "run"]).read_text()
    with pytest.raises(UserError, match=r"the images of data\.name=npz have several labels each"):
        build_federation(tiny(data=data, partition={"name": "dirichlet", "clients": 2}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"y_test": random_pixels(15, 3) % 2}, r"y_test has shape \[15, 3\]; expected .* 4 labels, as y_train has"),
        ({"y_test": random_pixels(14, 4) % 2}, r"y_test has shape \[14, 4\]; expected a line for each image of x_test"),
        ({"y_test": random_pixels(15, 4)}, r"y_train in .* has shape \[36, 4\]; expected \[n\] or \[n, 1\]"),
    ],
)
def test_labels_of_several_kinds_are_refused(tiny, tmp_path, changes, says):
    path = several_labels(tmp_path / "a.npz", **changes)
    with pytest.raises(UserError, match=says):
        build_federation(tiny(data={"name": "npz", "path": str(path)}, partition={"name": "iid", "clients": 2}))
