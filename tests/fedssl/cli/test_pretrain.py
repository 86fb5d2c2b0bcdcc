"""`fedssl pretrain`: the precision that it chooses, which the run that it names and starts has too."""

import shlex

import pytest

from fedssl import cli
from fedssl.engines import pace
from fedssl.models import precision
from fedssl.recipe.reading import load_recipe, load_stored_recipe
from fedssl.run_folder.directory import EXPORTED, RunDirectory
from tests.fedssl.data.image_samples import write_two_classes

SHORT = ("rounds=1", "training.local_steps=1", "architectures=[small_convnet]", "--output", "run")


@pytest.mark.parametrize(
    ("has", "given", "share", "expected"),
    [
        (True, (), 0.5, "bfloat16"),
        (True, (), 0.9, "float32"),
        (True, ("training={precision: float32}",), 0.5, "float32"),
        (True, ("name=precision",), 0.5, "bfloat16"),
        (False, (), 0.5, "float32"),
    ],
    ids=["faster", "hardly faster", "given", "only in a name", "no instructions"],
)
def test_bfloat16_is_taken_where_a_step_in_it_is_faster(has, given, share, expected, fedssl, tmp_path, monkeypatch):
    write_two_classes(tmp_path / "photos")
    monkeypatch.setattr(precision, "has_bfloat16", lambda: has)
    timed = []

    def measured(federation, seconds):
        timed.append(federation.recipe.training.precision)
        return pace.Pace({"float32": 1.0, "bfloat16": share}[timed[-1]], 1.0, 1.0, 1)

    with monkeypatch.context() as changed:
        changed.setattr(pace, "measure_pace", measured)
        changed.setattr(pace, "told_duration", lambda federation: None)
        code, out, err = fedssl("pretrain", "photos", *given, *SHORT)
    assert code == 0, err
    assert load_stored_recipe(RunDirectory.open(tmp_path / "run")).training.precision == expected
    assert ("training.precision is bfloat16" in out) == (expected == "bfloat16")
    assert timed == (["float32", "bfloat16"] if has and "training" not in str(given) else ["float32"])
    same = shlex.split(next(line for line in out.splitlines() if line.startswith("The same as:")).partition(":")[2])
    assert ("training.precision=bfloat16" in same) == (expected == "bfloat16")
    rows = [line[:16].strip() for line in out.splitlines()]
    assert {"before training", "after training"} < set(rows)  # one client has no line of its own, and no mean
    assert not {"0", "mean"} & set(rows)


@pytest.mark.parametrize(
    ("seconds", "given", "expected"),
    [
        (1.0, (), "small_convnet_512"),
        (0.001, (), "resnet18"),
        (1.0, ("architectures=[resnet18]",), "resnet18"),
        (1.0, ("data.image_size=160",), "resnet18"),
    ],
    ids=["too few passes", "enough", "given", "larger images"],
)
def test_a_small_network_is_taken_where_the_time_is_short(seconds, given, expected, fedssl, monkeypatch, tmp_path):
    write_two_classes(tmp_path / "photos")
    monkeypatch.setattr(precision, "has_bfloat16", lambda: False)
    monkeypatch.setattr(pace, "measure_pace", lambda federation, _: pace.Pace(seconds, 1.0, 1.0, 1))
    monkeypatch.setattr(cli.runs, "run", lambda recipe, overrides, *_, **__: load_recipe(recipe, overrides))
    _, out, _ = fedssl("pretrain", "photos", "data.image_size=96", "preset=natural", *given, "--minutes", "1")
    same = next(line for line in out.splitlines() if line.startswith("The same as:"))
    assert ("architectures=[small_convnet_512]" in same) == (expected == "small_convnet_512")
    assert ("resnet18 would see each image" in out) == (expected == "small_convnet_512")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("my scans #2", "my scans #2"),
        ("'old' scans", "\"'old' scans\""),
        ("trail ", '"trail "'),
        ("null", '"null"'),
        ("two\nlines", r'"two\nlines"'),
    ],
)
def test_a_folder_may_have_any_name_and_a_setting_any_length(name, written, fedssl, tmp_path, monkeypatch):
    write_two_classes(tmp_path / name)
    started = []
    monkeypatch.setattr(cli.runs, "_timed_choices", lambda *_: [])
    monkeypatch.setattr(cli.runs, "run", lambda recipe, changes, *_, **__: started.append(load_recipe(recipe, changes)))
    code, out, err = fedssl("pretrain", name, f"description={'long ' * 60}")
    assert code == 0, err
    assert str(started[0].data.path) == name
    same = next(line for line in out.splitlines() if line.startswith("The same as:")).partition(":")[2]
    _, _, recipe, *changes = shlex.split(same)
    assert f"data.path={written}" in changes
    assert load_recipe(recipe, changes) == started[0]


@pytest.mark.parametrize("words", [("scans\udce9",), ("photos", "scans\udce9")])
def test_a_name_that_is_not_utf_8_is_to_be_changed(words, fedssl, tmp_path):
    for word in words:
        write_two_classes(tmp_path / word)
    code, _, err = fedssl("pretrain", *words)
    assert (code, "is not UTF-8: rename the file or folder" in err) == (2, True), err


def test_what_cannot_be_timed_is_told_by_the_run(fedssl, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.runs, "_step_seconds", lambda *_: pytest.fail("timed all the same"))
    code, out, err = fedssl("pretrain", "nowhere.npy", *SHORT)
    assert (code, "data.name=npz data.path=nowhere.npy" in out) == (2, True)
    assert "there is no file or folder nowhere.npy" in err
    write_two_classes(tmp_path / "photos")
    (tmp_path / "run").mkdir()
    code, _, err = fedssl("pretrain", "photos", *SHORT)
    assert (code, "run exists and is not" in err) == (2, True), err


def test_where_an_encoder_was_exported_is_not_written_through_a_link(fedssl, tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "SECONDS", 0.01)
    write_two_classes(tmp_path / "photos")
    assert fedssl("pretrain", "photos", "training.precision=float32", *SHORT)[0] == 0
    (tmp_path / "own.txt").write_text("mine")
    exported = tmp_path / "run" / EXPORTED
    for encoder, link in (("enc\udcff", exported.symlink_to), ("second", exported.hardlink_to)):  # one is not UTF-8
        exported.unlink(missing_ok=True)
        link(tmp_path / "own.txt")
        assert fedssl("export", "run", encoder)[0] == 0
        assert (tmp_path / "own.txt").read_text() == "mine"
        assert exported.read_bytes() == bytes(tmp_path / encoder)
        assert "fedssl embed " in fedssl("report", "run", "--no-images")[1]
