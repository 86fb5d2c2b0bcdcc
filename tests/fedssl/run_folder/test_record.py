"""A run read back from its folder: which value each method gives, and what counts of a folder that was cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedssl.errors import UserError
from fedssl.run_folder.record import Run, read_run
from tests.fedssl.conftest import ALIGNED
from tests.fedssl.reports.synthetic_runs import evaluated, write_run


@pytest.fixture
def finished(tiny, tmp_path) -> Run:
    """Two clients of two architectures over two rounds; the last round also has a global model."""
    rows = [*evaluated(0, "knn", [40.0, 42.0]), (1, "0", "bytes_up", 100.0), (2, "1", "bytes_up", 50.0)]
    rows += [*evaluated(2, "knn", [50.0, 54.0]), (2, "global", "knn", 60.0), (2, "mean", "bytes_up", 75.0)]
    counts = [[3, 0], [1, 2]]
    write_run(tmp_path / "a", tiny(**ALIGNED, seed=3), rows, counts=counts, spectrum={"0": [2.0, 1.0]})
    return read_run(str(tmp_path / "a"))


def test_a_run_has_what_its_folder_holds(finished, tmp_path):
    assert (finished.path, finished.name, finished.seed) == (tmp_path / "a", "tiny", 3)
    assert (finished.rounds, finished.last_round, finished.finished) == (2, 2, True)
    assert list(finished.class_names) == ["cat", "dog"]
    assert finished.class_counts == [[3, 0], [1, 2]]
    assert finished.spectra == {"0": [2.0, 1.0]}
    assert finished.values[2, "1", "knn"] == 54.0
    assert [finished.architecture_of(k) for k in range(3)] == ["small_convnet", "small_convnet_wide", "small_convnet"]


def test_the_global_model_stands_for_the_run_and_otherwise_the_mean(finished):
    assert finished.overall("knn") == {0: 41.0, 2: 60.0}
    assert finished.overall("no such metric") == {}
    assert finished.evaluated("knn", "before") == 41.0
    assert finished.evaluated("knn", "after") == 60.0
    assert finished.evaluated("knn", "after", "0") == 50.0
    assert finished.evaluated("knn", "after", "7") is None
    assert finished.total("bytes_up") == 150.0  # over rounds and clients, without the mean
    with pytest.raises(ValueError, match="when must be 'before' or 'after', got 'later'"):
        finished.evaluated("knn", "later")


def test_a_run_without_any_round_is_read(tiny, tmp_path):
    write_run(tmp_path / "a", tiny(), [])
    run = read_run(tmp_path / "a")
    assert (run.last_round, run.values, run.class_counts, run.spectra) == (-1, {}, [], {})


def test_what_a_killed_run_wrote_after_its_last_commit_does_not_count(tiny, tmp_path):
    """And it has no value after training."""
    directory = write_run(tmp_path / "a", tiny(), evaluated(0, "knn", [40.0]) + evaluated(1, "knn", [45.0]))
    directory.append_metrics(evaluated(2, "knn", [99.0]))
    with open(tmp_path / "a" / "metrics.csv", "a") as file:
        file.write("2,0,lin")
    run = read_run(tmp_path / "a")
    assert (run.finished, run.last_round) == (False, 1)
    assert run.overall("knn") == {0: 40.0, 1: 45.0}
    assert (run.evaluated("knn", "before"), run.evaluated("knn", "after")) == (40.0, None)


def test_a_copy_without_checkpoints_is_read_up_to_its_last_whole_line(tiny, tmp_path):
    write_run(tmp_path / "a", tiny(), evaluated(0, "knn", [40.0]) + evaluated(2, "knn", [50.0]))
    (tmp_path / "a" / "checkpoints" / "manifest.json").unlink()
    with open(tmp_path / "a" / "metrics.csv", "a") as file:
        file.write("2,0,torn")
    assert read_run(tmp_path / "a").evaluated("knn", "after") == 50.0


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("recipe.yaml", "- 1\n", "cannot be read as a run's folder: .*`name` or `rounds` is missing"),
        ("recipe.yaml", "{", "recipe.yaml is not YAML"),
        ("partition.csv", "client,cat\n0,many\n", "cannot be read as a run's folder: .*'many'"),
        ("metrics.csv", "round,client,metric,value\n1,0,knn,abc\n", "metrics.csv cannot be read: expected the columns"),
        ("metrics.csv", "round,client,value\n1,0,3.5\n", "metrics.csv cannot be read: expected the columns round, cl"),
        ("checkpoints/manifest.json", "{", "manifest.json cannot be read as a checkpoint"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(finished, file, content, message):
    (finished.path / file).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        read_run(finished.path)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for folder in (tmp_path, Path("nowhere")):
        with pytest.raises(UserError, match=r"is not a run's folder: it holds no recipe\.yaml"):
            read_run(folder)
