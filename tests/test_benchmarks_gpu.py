"""``python -m benchmarks.gpu`` as far as the CPU shows it, and the stages of ``benchmarks/on_gpu.sh``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the sdist")

from benchmarks.case import Implementation
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import measure
from benchmarks.gpu.cases import cases
from benchmarks.gpu.measure import Case, Target, judge
from benchmarks.measure import ROOT

CPU = torch.device("cpu")
LIMITS = {"copy": 1e9, "bf16": 1e12, "tf32": 1e12, "fp32": 1e12}
PEER_ALONE = {"unbalanced_ot"}  # its peer takes long


TINY = [case for case in cases(tiny=True) if case.operator not in PEER_ALONE]


@pytest.mark.parametrize("case", TINY, ids=lambda case: f"{case.operator}-{case.size}")
def test_the_implementations_agree_with_the_truth(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LONGEST", 0.0)
    measured = measure.measure_case(case, CPU, LIMITS)
    ours = measured["rows"][0]
    assert ours["implementation"] == f"fedkernels.{case.operator}"
    for row in measured["rows"]:
        if row["status"] == "not installed":
            continue
        assert row["status"] == "ok"
        half = "bfloat16" in case.size
        assert row["errors"]["value"] < (1e-2 if half and row is not ours else 1e-5)
        assert row["errors"].get("gradient", 0) < (2e-2 if half else 1e-4)
        assert len(row["times"]) == row["repeats"] >= measure.LEAST


def test_the_targets_name_peers_that_are_measured() -> None:
    for case in cases(tiny=False):
        names = [one.name for one in case.implementations]
        assert len(set(names)) == len(names)
        assert {target.faster_than for target in case.targets} - {""} <= set(names)
        assert case.limit in ("", *LIMITS)
        assert (case.work > 0) == bool(case.limit)


def test_what_becomes_of_targets() -> None:
    ours: dict[str, Any] = {"implementation": "ours", "status": "ok", "median": 1e-3, "extra": 2e8, "share": 0.4}
    rows = [ours, {"implementation": "a", "ratio": 2.5}, {"implementation": "b", "status": "not installed"}]
    found = [
        judge(target, rows, "copy")
        for target in (
            *(Target("a", 2.0), Target("a", 3.0), Target("b", 1.0)),
            *(Target(share=0.4), Target(share=0.5), Target(extra_mb=100), Target(milliseconds=2)),
        )
    ]
    outcomes = ["met", "missed", "not measured", "met", "missed", "missed", "met"]
    assert [one["outcome"] for one in found] == outcomes
    assert found[2]["measured"] == "b: not installed"
    assert [one["target"] for one in found[3::2]] == [">= 40% of the copy rate", "< 100 MB beyond the outputs"]
    broken = [{"implementation": "ours", "status": "failed: x"}, {"implementation": "a", "status": "ok"}]
    assert judge(Target("a", 2.0), broken, "")["outcome"] == "not measured"
    assert judge(Target(milliseconds=2.0), broken, "")["measured"] == "failed: x"


def test_a_peer_that_fails_is_a_row_that_says_so() -> None:
    def fail(inputs: Any) -> Any:
        raise KeyError("no such thing")

    good = Implementation("fedkernels.x", lambda inputs: {"value": torch.ones(1)})
    peers = (Implementation("failing", fail), Implementation("absent", fail, package="no-such-distribution"))
    case = Case("x", "", lambda device: {}, (good, *peers), lambda inputs: {"value": torch.ones(1)}, "")
    rows = measure.measure_case(case, CPU, {})["rows"]
    assert [row["status"] for row in rows] == ["ok", "failed: 'no such thing'", "not installed"]
    assert rows[0]["kernels"] == []


def test_a_rehearsal_writes_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LONGEST", 0.0)
    assert command.main(["delta_gram", "linear_cka", "--rehearse", "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [case["operator"] for case in results["cases"]] == ["linear_cka", "linear_cka", "delta_gram"]
    assert set(results["limits"]) == set(LIMITS)
    text = (tmp_path / "results.md").read_text()
    assert "## delta_gram, float32, K = 3" in text
    assert "| >= 80% of the copy rate |" in text


def test_a_run_without_time_says_so(tmp_path: Path) -> None:
    assert command.main(["delta_gram", "--rehearse", "--seconds", "-1", "--output", str(tmp_path)]) == 1
    (case,) = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert {row["status"] for row in case["rows"]} == {"not measured: no time was left"}
    assert case["targets"][0]["outcome"] == "not measured"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([])
    assert "torch finds no CUDA device" in capsys.readouterr().err


# ---- on_gpu.sh, with commands that only pretend -------------------------------------------------------------


@pytest.fixture
def pretend(tmp_path: Path) -> Any:
    """Runs on_gpu.sh; what a pretended `python` is asked for stands in calls.txt."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()

    def script(name: str, text: str) -> Path:
        (bin_ / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_ / name).chmod(0o755)
        return bin_ / name

    def run(card: str = "Card (R) X1", fails: str = "nothing", sanitizer: bool = True, **more: str) -> Any:
        script("nvidia-smi", f'[[ $1 == *compute_cap* ]] && echo "{"9.0" if card else ""}" || echo "{card}"')
        if sanitizer:
            script("compute-sanitizer", f'echo "sanitizer $*" >>{tmp_path}/calls.txt')
        python = script("python", f'echo "$*" >>{tmp_path}/calls.txt; [[ "$*" != *"{fails}"* ]]')
        path = f"{bin_}:/usr/bin:/bin"
        environment = {"PATH": path, "OUT": str(tmp_path / "out"), "PYTHON": str(python), **more}
        done = subprocess.run(
            ["bash", ROOT / "benchmarks/on_gpu.sh"], env=environment, capture_output=True, text=True, cwd=tmp_path
        )
        written = tmp_path / "out" / "card-r-x1" / "on_gpu.json"
        report = json.loads(written.read_text()) if written.exists() else None
        calls = tmp_path / "calls.txt"
        return done, report, calls.read_text() if calls.exists() else ""

    return run


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="bash and timeout as Linux has them")


@LINUX
def test_all_stages_pass(pretend: Any) -> None:
    done, report, calls = pretend()
    assert done.returncode == 0, done.stdout + done.stderr
    names = ["packages", "build", "tests", "memcheck", "racecheck", "benchmarks"]
    assert [stage["stage"] for stage in report["stages"]] == names
    assert {stage["outcome"] for stage in report["stages"]} == {"passed"}
    assert report["compute_capability"] == "9.0"
    assert report["card"] == "Card (R) X1"
    assert "setup.py build_ext --inplace" in calls
    assert re.search(r"-m benchmarks.gpu --output \S+/card-r-x1 --seconds \d+\n", calls)


@LINUX
@pytest.mark.parametrize(
    ("fails", "stage"), [("build_ext", "build"), ("pytest -q", "tests"), ("benchmarks.gpu", "benchmarks")]
)
def test_a_stage_that_fails_leaves_the_others_alone(pretend: Any, fails: str, stage: str) -> None:
    done, report, _ = pretend(fails=fails)
    assert done.returncode == 1
    outcomes = {one["stage"]: one["outcome"] for one in report["stages"]}
    assert [name for name, outcome in outcomes.items() if outcome != "passed"] == [stage]
    assert outcomes[stage] == "failed"


@LINUX
def test_no_sanitizer_is_no_failure(pretend: Any) -> None:
    done, report, _ = pretend(sanitizer=False)
    assert done.returncode == 0
    assert [one["outcome"] for one in report["stages"]].count("skipped: no compute-sanitizer") == 2


@LINUX
def test_wheels_are_installed_without_the_network(pretend: Any, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a.whl").touch()
    done, report, calls = pretend(WHEELS=str(tmp_path / "wheels"))
    assert done.returncode == 0
    assert report["stages"][0]["stage"] == "wheels"
    assert "-m pip install -q --no-index --no-deps" in calls


@LINUX
def test_no_gpu_is_told_at_once(pretend: Any) -> None:
    done, report, calls = pretend(card="")
    assert (done.returncode, report, calls) == (2, None, "")
    assert "no NVIDIA GPU was found" in done.stderr
