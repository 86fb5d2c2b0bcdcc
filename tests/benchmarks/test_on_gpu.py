"""``python -m benchmarks --device cuda`` as far as the CPU shows it, and the stages of ``benchmarks/on_gpu.sh``."""

import json
import re
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the sdist")

from benchmarks import __main__ as command
from benchmarks import on_gpu, simulation, timing
from benchmarks.measure import ROOT, Settings, measure_case
from fedssl.recipe.reading import load_recipe

pytestmark = pytest.mark.usefixtures("no_collections")


def test_a_rehearsal_times_every_call_and_tells_the_share_of_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LONGEST", 0.0)
    rehearsal = Settings("cuda", rehearse=True, quick=True, repeats=None, rates={"bf16": 1e12})
    measured = measure_case("info_nce", 0, rehearsal)
    ours, naive = measured["rows"][:2]
    assert len(ours["times"]) == len(naive["times"]) == timing.LEAST
    assert measured["work"]["rate"] == "bf16"
    assert ours["share"] == pytest.approx(measured["work"]["amount"] / ours["median"] / 1e12)


def test_a_run_without_time_says_so(tmp_path: Path) -> None:
    rehearse = "--device", "cuda", "--rehearse"
    assert command.main(["delta_gram", *rehearse, "--seconds", "-1", "--output", str(tmp_path)]) == 1
    (case,) = json.loads((tmp_path / "results.json").read_text())["delta_gram"]["cases"]
    assert {row["status"] for row in case["rows"]} == {"not measured: no time was left"}
    assert case["bars"][0]["outcome"] == "not measured"


# ---- on_gpu.sh ----------------------------------------------------------------------------------------------

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="timeout as Linux has it")
PYTHON, CHECK = sys.executable, on_gpu.CHECK


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pack with one wheel, and a check that passes. -> the folder of what comes back"""
    (tmp_path / "pack" / "wheels").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "pack" / "wheels" / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("of_a_wheel.py", "")
    monkeypatch.setattr(on_gpu, "PACK", tmp_path / "pack")
    monkeypatch.setattr(on_gpu, "CHECK", "print('{}')")
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@LINUX
def test_each_step_of_a_stage_is_reported(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = "import os, of_a_wheel; assert os.environ['FEDKERNELS_GPU']; print(os.environ.get('FEDKERNELS_SELF_TEST'))"
    commands = {
        "first": [PYTHON, "-c", tested],
        "wrong": [PYTHON, "-c", "raise SystemExit(3)"],
        "late": ["sleep", "60"],
        "memcheck": ["compute-sanitizer", "--tool", "memcheck"],
        "run": ["bash", "-c", f'touch {tmp_path}/run/metrics.csv; {PYTHON} -c "{tested}"'],
    }
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(on_gpu, "steps", lambda *_: commands)
    monkeypatch.setattr(on_gpu, "SECONDS", 15)
    monkeypatch.setattr(on_gpu.shutil, "which", lambda name, path: None)
    monkeypatch.delenv("FEDKERNELS_SELF_TEST", raising=False)
    assert on_gpu.run("training", [], "cuda", packed, tmp_path) == 1
    report = json.loads((packed / "training.json").read_text())
    outcomes = {one["step"]: one["outcome"] for one in report["steps"]}
    assert re.fullmatch(r"failed: not ready after \d s", outcomes.pop("late"))
    skipped = "skipped: no compute-sanitizer"
    assert outcomes == {"first": "passed", "wrong": "failed: exit code 3", "memcheck": skipped, "run": "passed"}
    # The rules of what comes back: few files, flat.
    assert sorted(path.name for path in packed.iterdir()) == ["run.csv", "training.json", "training.txt"]
    printed = (packed / "training.txt").read_text().splitlines()
    assert [line for line in printed if line in ("None", "0")] == ["0", "0"]  # no self-test at first use


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_stage_that_cannot_begin_says_why_in_one_line(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(on_gpu, "CHECK", CHECK)
    assert on_gpu.run("tests", [], "cuda", packed, packed.parent) == 2
    assert re.fullmatch(r"on_gpu.sh tests: torch finds no CUDA device.*\n", capfd.readouterr().err)
    assert not list(packed.iterdir())
    with pytest.raises(SystemExit, match=r"^missing: no_such; call .*on_gpu.sh pack"):
        exec(CHECK.replace("typer yaml", "typer no_such"), {})


def test_what_the_stages_call_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("cpu", "cuda"):
        for command_ in on_gpu.steps("tests", [], device, tmp_path, tmp_path).values():
            assert all((ROOT / word).exists() for word in command_ if word.startswith("tests/"))
        (operators,) = on_gpu.steps("operators", ["nt_xent"], device, tmp_path, tmp_path).values()
        assert command._parse(operators[3:]).operators == ["nt_xent"]
        assert command._parse(operators[3:]).rehearse == (device == "cpu")
        (simulated,) = on_gpu.steps("simulation", [], device, tmp_path, tmp_path).values()
        assert simulation._parse(simulated[3:]).device == device
        for recipe, trained in on_gpu.steps("training", [], device, tmp_path, tmp_path).items():
            assert trained[3:5] == ["run", recipe]
            load_recipe(recipe, trained[5 : trained.index("--output")])


@pytest.mark.parametrize(("megabytes", "code"), [(1, 0), (70, 1)])
def test_a_pack_tells_whether_it_may_travel(
    megabytes: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append((" ".join(command), options.get("env", {}).get("FEDKERNELS_CUDA_ARCHITECTURES")))
        return SimpleNamespace(stdout="README.md\0CHANGELOG.md\0")

    monkeypatch.setattr(on_gpu, "PACK", tmp_path / "pack")
    monkeypatch.setattr(on_gpu.subprocess, "run", run)
    with (tmp_path / "images.npz").open("wb") as file:
        file.truncate(megabytes << 20)
    assert on_gpu.pack(str(tmp_path / "images.npz")) == code
    assert re.fullmatch(
        rf"build/gpu: {megabytes}.0 MiB; with all tracked files {megabytes}.\d of 64 MiB\n", capsys.readouterr().out
    )
    (build, architecture), *downloads, _ = commands
    assert "build_ext --build-lib" in build
    assert architecture == "90"
    assert all("pip download" in line and "--python-version=3.12" in line for line, _ in downloads)
    assert (tmp_path / "pack" / "cifar10.npz").stat().st_size == megabytes << 20
