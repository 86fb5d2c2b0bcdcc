"""Whole runs on images of one's own: without labels or with several, larger than the memory, dealt by a column."""

from pathlib import Path

import pytest

from fedssl.data.digests import read_digests
from fedssl.data.summary import summarise
from fedssl.engines import in_process
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.reports.evaluation import write_evaluation
from fedssl.reports.report import write_report
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import AVERAGED, METHODS
from tests.fedssl.data.data_files import good_arrays, load_npz, random_pixels, save
from tests.fedssl.data.image_samples import write_two_classes
from tests.fedssl.killed_runs import contents, killed_and_resumed

IID = {"name": "iid", "clients": 3}
MEASURES = {"effective_rank", "alignment", "uniformity"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Sixty gray images of two sizes; the cache is beside them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_two_classes(tmp_path / "images")


def data_of(folder: Path, **options: object) -> dict[str, object]:
    return {"name": "images", "path": str(folder), "image_size": 8, **options}


def measured_of(run: Path) -> set[str]:
    """What is measured of the models before training, the personal ones or the global one."""
    metrics = {metric for number, _, metric in read_run(run).values if number == 0}
    return metrics & {"knn", "linear", "linear_auroc", *MEASURES}


def test_what_is_told_of_a_run_without_labels(folder, tiny, tmp_path, fedssl):
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(tiny(**AVERAGED, data=data_of(folder), partition=IID, rounds=1).to_yaml())
    code, out, err = fedssl("run", str(recipe), "--output", str(run))
    assert code == 0, err
    assert all(name in out for name in ("effective rank", "alignment", "uniformity"))
    assert "kNN" not in out
    assert fedssl("partition", str(recipe))[1].splitlines()[0].split() == ["client", "images", "total"]
    assert (list(read_run(run).class_names), read_run(run).class_counts) == (["images"], [[20], [20], [20]])
    assert measured_of(run) == MEASURES
    page = write_report([run], images=False).read_text()
    assert "the images have no class each, so no accuracy can be measured" in page
    assert "kNN accuracy" not in page
    assert write_evaluation(run).read_text().splitlines()[0] == (
        "client,effective_rank,alignment,uniformity,view_retrieval,pixel_view_retrieval,viewed_images"
    )
    with pytest.raises(UserError, match="semi_supervised or fine_tune need labels"):
        write_evaluation(run, [0.1])


def test_in_memory_and_stopped_and_resumed_from_a_file_a_run_is_the_same_bit_for_bit(folder, tiny, tmp_path):
    in_memory, in_file = (
        tiny(**METHODS["hetero_ssfl"], data=data_of(folder, memory_limit=m, public_holdout=15), partition=IID)
        for m in (None, 0)
    )
    in_process.run(in_memory, tmp_path / "memory")
    assert measured_of(tmp_path / "memory") == MEASURES
    found = contents(tmp_path / "memory")
    assert len(found) > 1
    assert contents(killed_and_resumed(in_file, tmp_path / "file")) == found
    assert read_digests(tmp_path / "file") == read_digests(tmp_path / "memory")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"objective": "supervised"}, r"objective supervised trains on labels, and the images of data\.name=images"),
        ({"partition": {"name": "dirichlet", "clients": 3}}, r"set partition='\{name: iid, clients: 3\}'"),
        ({"evaluation": {"semi_supervised": [0.1]}}, r"semi_supervised or fine_tune need labels"),
        ({"evaluation": {"few_labels": [0.1]}}, r"evaluation\.few_labels, .* need labels"),
    ],
)
def test_what_needs_labels_is_refused(folder, tiny, changes, says):
    with pytest.raises(UserError, match=says):
        build_federation(tiny(**AVERAGED, **({"data": data_of(folder), "partition": IID} | changes)))


@pytest.mark.parametrize(
    ("keys", "test_images"),
    [({"x": "x_train"}, 0), ({"x_train": "x_train", "x_test": "x_test"}, 5), ({"train_images": "x_train"}, 0)],
)
def test_npz_without_labels(tmp_path, caplog, keys, test_images):
    arrays = {key: good_arrays()[name] for key, name in keys.items()}
    dataset = load_npz(save(tmp_path / "a.npz", **arrays, y=random_pixels(3)))
    assert f"a.npz: y is not read; read are {', '.join(keys)}, and labels where they are called y_train" in caplog.text
    assert not dataset.labelled
    assert (len(dataset.train_images), len(dataset.test_images)) == (12, test_images)


def test_several_labels_an_image_are_measured_by_auroc(tiny, tmp_path):
    sizes = {"train": 36, "test": 15}
    images = {f"x_{part}": random_pixels(size, 6, 6) for part, size in sizes.items()}
    labels = {f"y_{part}": random_pixels(size, 4) % 2 for part, size in sizes.items()}
    data = {"name": "npz", "path": str(save(tmp_path / "a.npz", **images, **labels)), "public_holdout": 6}
    recipe = tiny(**AVERAGED, data=data, partition=IID, rounds=1)
    dataset = build_federation(recipe).dataset
    assert not dataset.labelled
    assert not summarise(data).labelled
    assert dataset.train_targets.shape == (30, 4)
    assert dataset.test_targets.shape == (15, 4)
    in_process.run(recipe, tmp_path / "run")
    assert measured_of(tmp_path / "run") == MEASURES | {"linear_auroc"}
    with pytest.raises(UserError, match=r"the images of data\.name=npz have several labels each"):
        build_federation(tiny(data=data, partition={"name": "dirichlet", "clients": 2}))
