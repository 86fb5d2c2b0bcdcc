"""The command line as a stranger meets it, also with input made to break it: one-line errors, nothing half-written."""

import csv
import errno
import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file

from fedssl import federation
from fedssl.data.datasets import load_dataset
from fedssl.engines import pace, rounds
from fedssl.engines.in_process import run
from fedssl.errors import installed_distribution
from fedssl.export.trained_encoder import encoder_of_run
from fedssl.recipe.reading import parse_recipe
from fedssl.run_folder.creation import alone_in
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import ALIGNED, OWN_PART, tiny_values
from tests.fedssl.data.data_files import full_disk, random_pixels
from tests.fedssl.data.image_samples import save_array
from tests.fedssl.engines.short_runs import SMALL, everything
from tests.fedssl.run_folder.test_changed_runs import without_digests

pytestmark = pytest.mark.usefixtures("few_neighbours")
SHARED = "local_update=replace aggregators=[weighted_mean]"
AT_SITES = "'partition={name: sites, clients: 2}' 'data={name: none, image_shape: [1, 8, 8]}'"
EVIL_PART = f"""{OWN_PART}

from pathlib import Path

Path(__file__).with_name("it_ran").touch()
"""


@pytest.fixture(scope="module")
def with_part(tmp_path_factory) -> Path:
    """A run whose recipe names a part file beside it."""
    folder = tmp_path_factory.mktemp("with_part")
    (folder / "evil.py").write_text(EVIL_PART)
    run(parse_recipe(tiny_values(**SMALL, rounds=1, regularizers=[str(folder / "evil.py")])), folder / "run")
    return folder / "run"


@pytest.fixture
def tiny_file(tmp_path) -> Path:
    """A recipe of one round, in the folder in which the command is called."""
    path = tmp_path / "tiny.yaml"
    path.write_text(parse_recipe(tiny_values(**SMALL, rounds=1)).to_yaml())
    return path


def one_line(ended: tuple[int, str, str], *told: str) -> None:
    """The command has ended with one line, which holds these texts."""
    code, _, err = ended
    assert code == 2, err
    assert err.startswith("fedssl: ")
    assert err.endswith("\n")
    assert err[:-1].isprintable(), err
    assert len(err) < 1000 or "a" * 500 in err, err  # or a word of the command is long
    for text in told:
        assert text in err


def test_run_evaluate_report_and_resume(fedssl, tmp_path):
    """`fedssl evaluate` repeats the run's own final figures."""
    (tmp_path / "tiny.yaml").write_text(parse_recipe(tiny_values(**ALIGNED | SMALL)).to_yaml())
    folder = tmp_path / "runs" / "tiny-seed0"
    code, out, _ = fedssl("run", "tiny.yaml", "rounds=1", "evaluation.semi_supervised_protocol.epochs=2")
    assert code == 0
    assert re.search(r"kNN %.*\nraw pixels +\d+\.\d.*\nbefore training +\d+\.\d.*\n0 ", out)
    assert "fedssl report runs/tiny-seed0" in out
    assert fedssl("evaluate", "runs/tiny-seed0", "--semi-supervised", "0.1")[0] == 0
    with open(folder / "evaluation.csv", newline="") as file:
        evaluated = {row.pop("client"): row for row in csv.DictReader(file)}
    assert list(evaluated) == ["0", "1", "2", "mean"]
    views = {"view_retrieval", "pixel_view_retrieval", "viewed_images"}
    assert set(evaluated["0"]) == {"knn", "effective_rank", "linear", "semi_supervised_0.1"} | views
    logged = read_run(folder).values
    for who, row in evaluated.items():
        for name in ("knn", "effective_rank", "linear"):
            assert float(row[name]) == pytest.approx(logged[1, who, name], abs=0.006)
    assert fedssl("report", "runs/tiny-seed0")[0] == 0
    page = (folder / "report.html").read_text()
    sections = ("Collapse of the representations", "Images as the encoder sees them", "Who holds what")
    assert all(section in page for section in sections)
    assert fedssl("run", "--resume", "runs/tiny-seed0")[0] == 0
    (tmp_path / "runs" / "tiny-seed0").rename(not_unicode := os.fsdecode(b"r\xe9"))
    assert fedssl("report", not_unicode, "--no-images")[0] == 0
    assert fedssl("export", not_unicode, "encoder", "--client", "0")[0] == 0


def test_a_run_exports_its_encoder(fedssl, tiny_file, tmp_path):
    code, out, err = fedssl("run", "tiny.yaml", *SHARED.split(), "--output", "run", "--encoder", "at once")
    assert code == 0, err
    assert "load_encoder()" in out
    assert fedssl("export", "run", "afterwards")[0] == 0
    assert everything(tmp_path / "at once") == everything(tmp_path / "afterwards")
    code, _, err = fedssl("run", "tiny.yaml", "partition={name: iid, clients: 1}", "--encoder", "new")
    assert code == 0, err
    assert (tmp_path / "new" / "load.py").is_file()


@pytest.mark.parametrize("choice", ["evaluation.patience=1", "evaluation.keep_best=true"])
def test_a_run_exports_the_best_round_where_one_is_kept(choice, fedssl, tiny_file, tmp_path, monkeypatch):
    found = [9.0, 8.0, 2.0, 2.0]
    ranks = {"effective_rank": 3.0}
    measures = lambda federation, model, number: ({"view_retrieval": found[number]} | ranks, torch.ones(1))  # noqa: E731
    monkeypatch.setattr(rounds, "evaluate_after", measures)
    words = f"{SHARED} rounds=3 evaluation.every=1 {choice}".split()
    code, out, err = fedssl("run", "tiny.yaml", *words, "--output", "run", "--encoder", "the best")
    assert code == 0, err
    assert out.endswith("fedssl embed 'the best' my_images --output features.npz\n")
    assert read_run(tmp_path / "run").last_round == (2 if "patience" in choice else 3)
    kept, best = load_file(tmp_path / "the best" / "model.safetensors"), encoder_of_run(tmp_path / "run", best=True)
    assert best.round == 1
    assert "| view_retrieval | 9.0 | 8.0 |" in (tmp_path / "the best" / "README.md").read_text()
    assert all(torch.equal(kept[name], tensor) for name, tensor in best.encoder.network.state_dict().items())
    reported = fedssl("report", "run", "--no-images")[1]
    assert reported.endswith(f"fedssl embed '{tmp_path / 'the best'}' my_images --output features.npz\n")
    (tmp_path / "run" / "exported.txt").unlink()
    told = fedssl("report", "run", "--no-images")[1] + (tmp_path / "run" / "report.html").read_text()
    assert told.count("evaluation.patience=null") == (2 if "patience" in choice else 0)


def test_doctor_version_and_partition(fedssl):
    said = fedssl("doctor")[1]
    assert "torch" in said
    assert "left_out" not in said  # nothing is
    assert fedssl("--version")[1] == f"fedssl {importlib.metadata.version(installed_distribution())}\n"
    assert "total" in fedssl("partition", "hetero_ssfl")[1]


UNKNOWN_HOME = "begins with an unknown user's home folder"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run", "name a recipe"),
        ("run heterossfl", "did you mean hetero_ssfl?"),
        ("run --resume nowhere", "nowhere is not a run's folder"),
        ("run rounds=9 --resume nowhere", "nowhere is not a run's folder"),
        ("run fedbyol --from-round 3", "--from-round goes back to a round of a run that is there"),
        ("run --resume nowhere --overwrite", "--resume takes neither --output nor --overwrite"),
        ("run fedbyol model.weights=none.pt", "model.weights: there is no file .*none.pt"),
        ("run local_only 'model.weights={resnet18: none.pt}'", "model.weights names resnet18, but architectures"),
        ("run tiny.yaml --minutes inf", "--minutes: expected a number of minutes, got inf"),
        ("run tiny.yaml --minutes nan", "--minutes: expected a number of minutes, got nan"),
        ("run local_only --observer ./nothing.py", "an observer is an existing .py file .*, got nothing.py"),
        ("evaluate nowhere", "nowhere"),
        ("evaluate nowhere --data digits", "--data: expected KEY=VALUE pairs"),
        ("run tiny.yaml --output run --encoder new", "fedssl export run FOLDER --client NUMBER"),
        (f"run tiny.yaml {SHARED} --output run --encoder .", "exists and is not empty"),
        ("pretrain training.batch_size=8 --output run", "name a folder of images"),
        ("pretrain nowhere --output run", "data.path: there is no file or folder nowhere"),
        ("export nowhere out", "nowhere is not a run's folder"),
        ("embed nowhere .", "nowhere is not an exported encoder"),
        ("report nowhere", "nowhere"),
        ("run-table nowhere", "nowhere"),
        ("run-table digits_demo --part 3 2", "--part 3 2: expected a part of 2"),
        # overrides
        ("run tiny.yaml regularizers.².weight=1", "a list of 0, which has no entry '²'"),
        (f"run tiny.yaml rounds={'9' * 5000}", "rounds: unable to parse input string as an integer"),
        (f"run tiny.yaml {'.'.join('a' * 2000)}=1", "2000 levels deep"),
        ("run tiny.yaml name=\x1b[2J", "special characters are not allowed"),
        ("""run tiny.yaml 'name="a\\nb"'""", "name: expected 1 to 200 characters on one line"),
        ("run tiny.yaml name=../../thesis", "holds a slash, so it cannot be a folder's name"),
        (f"run tiny.yaml name={'日' * 200}", "File name too long"),
        ("run tiny.yaml regularizers=[~nosuchuser/part.py]", UNKNOWN_HOME),
        ("run tiny.yaml regularizers=[./nosuch.py]", "there is no part file"),
        ("run tiny.yaml \x1b[2Jrounds=3", "unknown key"),
        # paths that lead nowhere, or where a command would wait for ever
        ("run ~nosuchuser/r.yaml", UNKNOWN_HOME),
        ("run-table ~nosuchuser/t.yaml", UNKNOWN_HOME),
        ("evaluate ~nosuchuser", ""),
        ("run pipe", ""),
        ("run-table pipe", ""),
        ("run fedbyol regularizers=[./pipe.py]", ""),
        ("run --resume pipe", ""),
        ("report pipe", ""),
        ("export pipe out", ""),
        (f"run {'a' * 5000}", ""),
        ("run .", ""),
        ("evaluate fedbyol --data name=digits,train_limit=2020-13-45", ""),
        ("evaluate fedbyol --data name=digits,name=npz", ""),
        ("cost tiny.yaml --rounds tiny.yaml/x.csv", ""),
        (f"cost tiny.yaml engine=flower {SHARED} {AT_SITES}", "the images are at the sites, .*: name images like"),
        (f"partition tiny.yaml engine=flower {SHARED} {AT_SITES}", "partition sites deals no images: each site brings"),
    ],
)
def test_a_users_mistake_is_one_line_exit_code_2_and_leaves_nothing(command, message, fedssl, tiny_file, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.py")
    before, text = set(tmp_path.rglob("*")), tiny_file.read_text()
    ended = fedssl(*shlex.split(command))
    one_line(ended)
    assert re.search(message, ended[2])
    assert (set(tmp_path.rglob("*")), tiny_file.read_text()) == (before, text)


def test_privacy_is_foretold(fedssl):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")
    assert "nothing to count: set flower.differential_privacy" in fedssl("privacy", "fedbyol")[2]
    noise = "flower.differential_privacy={name: fixed_clipping, clipping_norm: 1, noise_multiplier: 4}"
    asked = ["privacy", "fedbyol", "engine=flower", "rounds=5", noise, "flower.epsilon_budget=3"]
    code, out, _ = fedssl(*asked)
    assert code == 0
    assert "0, 1, 2, 3, 4" in out
    assert "4.98331" in out  # dp-accounting's PLDAccountant of five Gaussian events of noise multiplier 2
    assert "allows 2 rounds of a client, which is too little: a client is asked in 5 rounds" in out


# Observers

LOGGER = """
from pathlib import Path

from fedssl import Observer


class Logger(Observer):
    def round_ended(self, number, rows):
        with open(Path(__file__).with_suffix(".log"), "a") as log:
            log.write(f"{number} ")
        if number == STOP_AFTER:
            raise KeyboardInterrupt
"""


def test_observers_are_called_by_a_run_and_its_continuation(fedssl, tiny_file, tmp_path):
    (tmp_path / "stops.py").write_text(f"STOP_AFTER = 1\n{LOGGER}")
    (tmp_path / "goes_on.py").write_text(f"STOP_AFTER = None\n{LOGGER}")
    both = ["--observer", "./goes_on.py", "--observer", "./stops.py"]
    code, out, _ = fedssl("run", "tiny.yaml", "rounds=2", "--output", "run", *both)
    assert code == 130
    assert "continue with: fedssl run --resume run --observer goes_on.py --observer stops.py" in out
    assert fedssl("run", "--resume", "run", "--observer", "goes_on.py")[0] == 0
    assert (Path("stops.log").read_text(), Path("goes_on.log").read_text()) == ("0 1 ", "0 1 2 ")


def test_ctrl_c_is_heard_while_an_object_is_deleted():
    deleted = "type('', (), {'__del__': lambda self: signal.raise_signal(signal.SIGINT)})() is None"
    app = f"import fedssl.cli, signal, time; fedssl.cli.app = lambda: [{deleted}, time.sleep(20)]; fedssl.cli.main()"
    ended = subprocess.run([sys.executable, "-c", app], capture_output=True, text=True, check=False)
    assert (ended.returncode, "Exception ignored" in ended.stderr) == (-signal.SIGINT, False)


# What is written, and where


@pytest.mark.parametrize(
    ("work", "command", "told"),
    [
        ("engines.in_process.build_federation", "run fedbyol --encoder new --output new/run", "new is the run's"),
        ("federation.build_federation", "cost tiny.yaml --rounds folder.png", "folder.png"),
        ("engines.in_process.build_federation", "run tiny.yaml --output tiny.yaml/run", "tiny.yaml/"),
        ("engines.in_process.build_federation", "run tiny.yaml --encoder tiny.yaml/encoder", "tiny.yaml/"),
        ("reports.report.draw_pictures", "report run --trust --output folder.png", "folder.png"),
        ("reports.evaluation.load_downstream", "evaluate run --trust --data name=cifar10,path=sets", "cifar10.csv is"),
    ],
)
def test_an_output_is_tried_before_the_work(work, command, told, fedssl, with_part, tiny_file, tmp_path, monkeypatch):
    shutil.copytree(with_part, tmp_path / "run")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "run" / "evaluation-cifar10.csv").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(f"fedssl.{work}", lambda *_, **__: pytest.fail("the work was begun"))
    one_line(fedssl(*shlex.split(command)), told)


@pytest.mark.parametrize("file", ["recipe.yaml", "metrics.csv", "partition.csv", "checkpoints/manifest.json"])
def test_a_received_run_with_a_pipe_in_it_does_not_hang(file, fedssl, with_part, tmp_path):
    shutil.copytree(with_part, tmp_path / "run")
    (tmp_path / "run" / file).unlink()
    os.mkfifo(tmp_path / "run" / file)
    for command in (("report", "run"), ("evaluate", "run"), ("run", "--resume", "run")):
        one_line(fedssl(*command))


def test_a_tilde_that_no_shell_has_expanded_is_the_home_folder(fedssl, tiny_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert fedssl("run", "tiny.yaml", "rounds=1", "--output=~/run")[0] == 0
    assert f"The run is in {tmp_path / 'home' / 'run'}" in fedssl("run", "--resume=~/run", "rounds=2")[1]
    one_line(fedssl("run", "tiny.yaml", "--output=~/run"), "exists: continue it with")
    assert fedssl("run", "tiny.yaml", "rounds=1", "--output=~/run", "--overwrite")[0] == 0
    assert fedssl("report", "~/run", "--no-images", "--output=~/page.html")[0] == 0
    assert fedssl("cost", "tiny.yaml", "rounds=1", "--rounds=~/rounds.csv")[0] == 0
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"run", "page.html", "rounds.csv"}
    assert not (tmp_path / "~").exists()


def test_overwrite_deletes_only_runs_that_nobody_works_on(fedssl, with_part, tiny_file, tmp_path, monkeypatch):
    shutil.copytree(with_part, tmp_path / "run")
    (tmp_path / "run.preparing").mkdir()
    (tmp_path / "run.preparing" / "notes").write_text("precious")
    before = everything(tmp_path)
    with alone_in(tmp_path / "run"):
        one_line(fedssl("run", "tiny.yaml", "--output", "run", "--overwrite"), "another process is at work on this run")
    with monkeypatch.context() as patch:
        patch.setattr("fedssl.federation.load_dataset", lambda *_: signal.raise_signal(signal.SIGINT))
        code, out, _ = fedssl("run", "tiny.yaml", "--output", "run", "--overwrite")
    assert (code, "Stopped before the run began; nothing was written" in out) == (130, True)
    assert everything(tmp_path) == before
    assert fedssl("run", "tiny.yaml", "--output", "run", "--overwrite")[0] == 0
    assert (tmp_path / "run.preparing" / "notes").read_text() == "precious"


@pytest.mark.parametrize(("largest_file", "file"), [(500, "recipe.yaml"), (3000, "safetensors")])
def test_a_full_disk_at_a_file_is_one_line_and_the_run_continues(largest_file, file, fedssl, tiny_file, tmp_path):
    with full_disk(largest_file):
        one_line(fedssl("run", "tiny.yaml", "--output", "run"), "no space left to write", file)
    assert not list(tmp_path.rglob("*.partial"))
    assert not list(tmp_path.glob(".run.*"))
    if (tmp_path / "run").exists():
        assert fedssl("run", "--resume", "run")[0] == 0
        assert RunDirectory.open(tmp_path / "run").checkpoint.finished


def test_a_full_disk_under_tensorboard_is_one_line(fedssl, tiny_file, tmp_path, monkeypatch):
    """Its writes are a thread's, which keeps the error for the next call and would print a traceback."""
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
    one_line(fedssl("run", "tiny.yaml", "--output", "run"), "no space left to write run/tensorboard")
    monkeypatch.undo()
    assert RunDirectory.open(tmp_path / "run").checkpoint.round < 1


# The code of a received run


def received(run: Path, folder: Path, where: str, forged: bool = False) -> Path:
    """A copy of the run, made elsewhere, whose recipe names a part in its folder, beside it, or a module.

    The manifest has no digests, or forged ones that call the code unchanged.
    """
    shutil.copytree(run, folder / "received")
    old = str(run.parent / "evil.py")
    name = {"inside": "./evil.py", "beside": "../evil.py", "module": "evil_package.evil"}[where]
    file = folder / "received" / "recipe.yaml"
    file.write_text(file.read_text().replace(old, name))
    code = {"inside": folder / "received", "beside": folder, "module": folder / "evil_package"}[where]
    code.mkdir(exist_ok=True)
    (code / "evil.py").write_text(EVIL_PART)
    names = [name, str(code / "evil.py")]
    digest = hashlib.sha256(EVIL_PART.encode()).hexdigest()
    without_digests(folder / "received", **({"parts": dict.fromkeys(names, digest)} if forged else {}))
    return code / "it_ran"


@pytest.mark.parametrize("forged", [False, True], ids=["without digests", "with digests of its code"])
@pytest.mark.parametrize("where", ["inside", "beside", "module"])
def test_reading_a_received_run_never_runs_its_code(where, forged, fedssl, with_part, tmp_path, monkeypatch):
    mark = received(with_part, tmp_path, where, forged)
    for name in ("evil_package", "evil_package.evil"):  # imported by another case
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m fedssl` has the working folder
    for command in (("evaluate", "received"), ("run", "--resume", "received"))[: 1 if forged else 2]:
        one_line(fedssl(*command), "--trust", "evil")
    assert fedssl("report", "received")[0] == 0
    page = (tmp_path / "received" / "report.html").read_text()
    for text in ("no pictures of images", "--trust", "kNN accuracy"):
        assert text in page
    assert not mark.exists()
    assert fedssl("evaluate", "received", "--trust")[0] == 0
    assert mark.exists()


@pytest.mark.parametrize(
    "command",
    [
        ("show", "mine.yaml"),
        ("show", "mine.yaml", "--yaml"),
        ("cost", "mine.yaml", "training.batch_size=4"),
        ("partition", "mine.yaml", "regularizers.0.strength=2"),
        ("privacy", "mine.yaml"),
        ("app", "mine.yaml", "app"),
        ("run", "mine.yaml"),
        ("run-table", "table.yaml"),
        ("run-table", "table.yaml", "--dry-run"),
        ("run-table", "settings.yaml", "--dry-run"),
    ],
    ids=" ".join,
)
def test_code_that_a_file_names_runs_in_no_command_without_trust(command, fedssl, tmp_path):
    if command[0] in ("privacy", "app"):
        pytest.importorskip("flwr")
    (tmp_path / "evil.py").write_text(EVIL_PART)
    own = {"regularizers": [{"name": "./evil.py"}]}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny_values(**SMALL, rounds=1, **own)))
    for name, row in (("table", {"recipe": "mine.yaml"}), ("settings", {"recipe": "fedbyol", "settings": own})):
        table = {"name": "mine", "seeds": [0], "rows": [{"label": "a"} | row]}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(table))
    before = everything(tmp_path)
    one_line(fedssl(*command), f"names the part {tmp_path / 'evil.py'}", "read that code first", "--trust")
    assert everything(tmp_path) == before
    fedssl(*command, "--trust")
    assert (tmp_path / "it_ran").exists()


def test_code_that_is_named_on_the_command_line_needs_no_flag(fedssl, tmp_path):
    (tmp_path / "evil.py").write_text(EVIL_PART)
    assert fedssl("show", "fedbyol", "preset=digits", "regularizers=[./evil.py]")[0] == 0
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tiny_values(regularizers=["./other.py"])))
    assert fedssl("show", "mine.yaml", "regularizers=[./evil.py]")[0] == 0  # the recipe's own is not used


@pytest.mark.parametrize(("fewest", "told"), [(1, "can compute another's kernel exactly"), (3, "of at least 2 others")])
def test_privacy_says_what_a_mean_of_kernels_tells(fewest, told, fedssl):
    code, out, _ = fedssl("privacy", "hetero_ssfl", f"aggregators.0.fewest_clients={fewest}")
    assert code == 0
    assert told in " ".join(out.split())


def test_ones_own_run_needs_no_flag_as_long_as_its_part_is_unchanged(fedssl, with_part, tmp_path, caplog):
    commands = [(*command, str(with_part)) for command in (("run", "--resume"), ("report",), ("evaluate",))]
    commands.append(("export", str(with_part), str(tmp_path / "encoder"), "--client", "0"))
    assert [fedssl(*command)[0] for command in commands] == [0] * 4
    assert "no pictures of images" not in (with_part / "report.html").read_text()
    assert not caplog.messages
    part = with_part.parent / "evil.py"
    text = part.read_text()
    part.write_text(text + "\n# changed\n")
    ended, report = fedssl(*commands[0]), fedssl(*commands[1])
    part.write_text(text)
    one_line(ended, "evil.py", "was changed since the run began", "--trust")
    assert report[0] == 0
    (said,) = caplog.messages
    assert "the report shows less of tiny: " in said
    assert "evil.py" in said


def test_pretrain_is_the_run_that_it_names_and_says_whether_it_learned(fedssl, tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "SECONDS", 0.01)
    for number in range(40):
        folder = tmp_path / ("here" if number < 20 else "there=here😀")
        save_array(folder / f"{number}.png", random_pixels(16, 16, seed=number))
    short = ["training.batch_size=8", "rounds=2", "training.local_epochs=1"]
    code, out, err = fedssl("pretrain", "here", "there=here😀", *short, "--encoder", "encoder", "--output", "run")
    assert code == 0, err
    command = shlex.split(re.search(r"The same as: fedssl (.*)", out)[1])
    assert re.search(r"% of random views find their own image .*by raw pixels", out)
    assert "NOT learned" in out  # noise
    assert "this run is short: it sees each of 40 images 2 times" in out
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert (recipe["partition"]["clients"], recipe["data"]["more_paths"]) == (1, ["there=here😀"])
    assert fedssl(*["again" if word == "encoder" else word for word in command], "--overwrite")[0] == 0
    once, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("encoder", "again"))
    assert once == again
    minutes = fedssl("pretrain", "here", "rounds=2", "--minutes", "1", "--output", "other")
    one_line(minutes, "--minutes chooses the number of rounds")
    assert not (tmp_path / "other").exists()


def test_minutes_are_stored_as_rounds_and_not_taken_with_a_run_that_goes_on(fedssl, tiny_file, tmp_path, monkeypatch):
    """On a machine on which a round takes 150 seconds."""
    monkeypatch.setattr(pace, "told_duration", lambda federation: "it takes an hour")
    monkeypatch.setattr(pace, "measure_pace", lambda *_: pace.Pace(step=150.0, flops=1.0, steps=1.0, parallel=1))
    assert "it takes an hour" in fedssl("run", "tiny.yaml", "--output", "told")[1]
    read = []  # decoding many photos may take longer than training
    monkeypatch.setattr(federation, "load_dataset", lambda *data: read.append(data) or load_dataset(*data))
    code, out, err = fedssl("run", "tiny.yaml", "--minutes", "9", "--output", "run")
    assert code == 0, err
    assert len(read) == 1
    assert "it takes an hour" not in out  # the minutes are those that were given
    assert "9 minutes hold 3 rounds" in out
    assert read_run(tmp_path / "run").rounds == 3
    one_line(fedssl("run", "--resume", "run", "--minutes", "1"), "nor --minutes")
