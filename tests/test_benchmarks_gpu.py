"""``python -m benchmarks --device cuda`` as far as the CPU shows it, and the stages of ``benchmarks/on_gpu.sh``."""

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

from benchmarks import __main__ as command
from benchmarks import timing
from benchmarks.case import Bar, Case, Implementation, Outputs, Work
from benchmarks.measure import ROOT, Settings, finish, load_cases, measure_case, not_measured

pytestmark = pytest.mark.usefixtures("no_collections")
REHEARSAL = Settings("cuda", rehearse=True, quick=True, repeats=None, rates=dict.fromkeys(("bf16", "tf32"), 1e12))
TINY = [
    (operator, index)
    for operator in command.OPERATORS
    if operator != "unbalanced_ot"  # its peer takes long
    for index in range(len(load_cases(operator, REHEARSAL)))
]


@pytest.mark.parametrize(("operator", "index"), TINY)
def test_the_implementations_agree_with_the_truth(operator: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LONGEST", 0.0)
    measured = measure_case(operator, index, REHEARSAL)
    ours = measured["rows"][0]
    assert ours["implementation"].startswith(f"fedkernels.{operator}")
    for row in measured["rows"]:
        if row["status"] == "not installed":
            continue
        assert row["status"] == "ok"
        if not row["same_result"]:
            continue
        half = "bfloat16" in measured["size"]
        # the peers of SupCon normalise the rows in bfloat16
        of_peers = 2e-2 if operator == "supervised_contrastive_loss" else 1e-2
        assert row["errors"]["value"] < (of_peers if half and row is not ours else 1e-5)
        assert row["errors"].get("gradient", 0) < (2e-2 if half else 1e-4)
        assert len(row["times"]) == timing.LEAST
        assert ("share" in row) == (measured.get("work", {}).get("rate") in REHEARSAL.rates)


def test_which_bars_are_met() -> None:
    bars = (
        *(Bar(faster_than=("a",), times=2.0), Bar(faster_than=("a",), times=3.0), Bar(faster_than=("b",), times=1.0)),
        *(Bar(share=0.4), Bar(share=0.5), Bar(extra_mib=100), Bar(milliseconds=2)),
    )
    case = Case("", lambda device: {}, (), work=Work(4e5, "copy", "one read"), bars=bars)
    ours: dict[str, Any] = {"implementation": "ours", "status": "ok", "times": [1e-3], "extra": 200 * 2**20}
    peers: list[dict[str, Any]] = [
        {"implementation": "a", "status": "ok", "times": [2.5e-3]},
        {"implementation": "b", "status": "not installed"},
    ]
    judged = finish(case, [ours, *peers], None, {"copy": 1e9})["bars"]
    outcomes = ["met", "missed", "not measured", "met", "missed", "missed", "met"]
    assert [one["outcome"] for one in judged] == outcomes
    assert judged[2]["measured"] == "not installed"
    assert [one["bar"] for one in judged[3::2]] == [">= 40% of the copy rate", "<= 100 MiB beyond outputs"]


def test_bars_of_a_case_that_was_not_measured() -> None:
    names = ("fedkernels.x", "a")
    implementations = tuple(Implementation(name, lambda inputs: {}) for name in names)
    bars = (Bar(faster_than=("a",), times=2.0), Bar(share=0.4), Bar(milliseconds=2))
    case = Case("", lambda device: {}, implementations, work=Work(4e5, "copy", "one read"), bars=bars)
    judged = not_measured(case, "no time was left")["bars"]
    assert [one["outcome"] for one in judged] == 3 * ["not measured"]
    assert judged[0]["measured"] == "not measured: no time was left"


def test_a_peer_that_fails_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(inputs: Any) -> Any:
        raise KeyError("no such thing")

    good = Implementation("fedkernels.x", lambda inputs: {"value": torch.ones(1)})
    peers = (Implementation("failing", fail), Implementation("absent", fail, package="no-such-distribution"))
    case = Case("", lambda device: {}, (good, *peers), truth=lambda inputs: {"value": torch.ones(1)})
    monkeypatch.setattr("benchmarks.measure.load_cases", lambda operator, settings: (case,))
    rows = measure_case("x", 0, REHEARSAL)["rows"]
    assert [row["status"] for row in rows] == ["ok", "failed: 'no such thing'", "not installed"]
    assert rows[0]["kernels"] == []


def test_calls_are_timed_in_turn_with_a_reset_before_each() -> None:
    order: list[str] = []

    def implementation(name: str) -> Implementation:
        def note(inputs: Any) -> Outputs:
            order.append(name)
            return {}

        return Implementation(name, note)

    both = (implementation("x"), implementation("y"))
    case = Case("", lambda device: {}, both, reset=lambda inputs: order.append("reset"))
    answer = timing.time_case(case, list(both), torch.device("cpu"), timing.HostClock(), 2)
    assert order[-8:] == 2 * ["reset", "x", "reset", "y"]
    assert order[::2] == len(order) // 2 * ["reset"]
    assert [len(row["times"]) for row in answer["rows"].values()] == [2, 2]


REHEARSE = ("--device", "cuda", "--rehearse")


@pytest.mark.nightly
def test_a_rehearsal_writes_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LONGEST", 0.0)
    page = (ROOT / "docs" / "speed.md").read_bytes()
    assert command.main(["delta_gram", "linear_cka", *REHEARSE, "--output", str(tmp_path)]) == 0
    assert (ROOT / "docs" / "speed.md").read_bytes() == page
    results = json.loads((tmp_path / "results.json").read_text())
    assert [len(results[operator]["cases"]) for operator in ("delta_gram", "linear_cka")] == [1, 2]
    assert set(results["delta_gram"]["environment"]["rates"]) == {"copy", "bf16", "tf32", "fp32"}
    text = (tmp_path / "results.md").read_text()
    assert text.startswith("# Operators on a GPU")
    assert "| float32, K = 3, P = 0.000314 M in 4 tensors | **fedkernels.delta_gram** |" in text
    assert " of copy |" in text
    assert "| error <= 1e-12 |" in text


def test_a_run_without_time_says_so(tmp_path: Path) -> None:
    assert command.main(["delta_gram", *REHEARSE, "--seconds", "-1", "--output", str(tmp_path)]) == 1
    (case,) = json.loads((tmp_path / "results.json").read_text())["delta_gram"]["cases"]
    assert {row["status"] for row in case["rows"]} == {"not measured: no time was left"}
    assert case["bars"][0]["outcome"] == "not measured"


def test_a_rehearsal_of_the_cpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--rehearse"])
    assert "--rehearse needs --device cuda" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--device", "cuda"])
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
        python = script(
            "python",
            f'echo "$FEDKERNELS_CUDA_ARCHITECTURES: $*" >>{tmp_path}/calls.txt\n'
            '[[ $* == *run-table* ]] && exit "${CODE:-0}"\n'
            f'[[ "$*" != *"{fails}"* ]]',
        )
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


NO_DATA = "skipped: CIFAR10 names no folder"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="bash and timeout as Linux has them")


@LINUX
def test_all_stages_pass(pretend: Any) -> None:
    done, report, calls = pretend()
    assert done.returncode == 0, done.stdout + done.stderr
    names = ["packages", "build", "self-test", "tests", "memcheck", "racecheck", "synccheck", "benchmarks"]
    names += ["simulation", "table1"]
    assert [stage["stage"] for stage in report["stages"]] == names
    assert [stage["outcome"] for stage in report["stages"][:-1]] == (len(names) - 1) * ["passed"]
    assert report["stages"][-1]["outcome"] == NO_DATA
    assert report["compute_capability"] == "9.0"
    assert report["card"] == "Card (R) X1"
    assert "9.0: setup.py build_ext --inplace" in calls
    for command_name in ("benchmarks", "benchmarks.simulation"):
        assert re.search(rf"-m {re.escape(command_name)} --device cuda --output \S+/card-r-x1 --seconds \d+\n", calls)


@LINUX
@pytest.mark.parametrize(
    ("fails", "stage"),
    [
        ("build_ext", "build"),
        ("-m fedkernels.self_test", "self-test"),
        ("pytest -q", "tests"),
        ("-m benchmarks --device", "benchmarks"),
        ("-m benchmarks.simulation", "simulation"),
    ],
)
def test_a_stage_that_fails_leaves_the_others_alone(pretend: Any, fails: str, stage: str) -> None:
    done, report, _ = pretend(fails=fails)
    assert done.returncode == 1
    outcomes = {one["stage"]: one["outcome"] for one in report["stages"]}
    assert [name for name, outcome in outcomes.items() if outcome not in ("passed", NO_DATA)] == [stage]
    assert outcomes[stage] == "failed"


@LINUX
def test_no_sanitizer_is_no_failure(pretend: Any) -> None:
    done, report, _ = pretend(sanitizer=False)
    assert done.returncode == 0
    assert [one["outcome"] for one in report["stages"]].count("skipped: no compute-sanitizer") == 3


@LINUX
@pytest.mark.parametrize(
    ("code", "outcome", "exit_code"), [(0, "passed", 0), (124, "to be continued", 0), (2, "failed", 1)]
)
def test_table_1_is_continued_by_a_call_of_its_own(
    pretend: Any, code: int, outcome: str, exit_code: int, tmp_path: Path
) -> None:
    done, report, calls = pretend(STAGES="build table1", CIFAR10="/data", CODE=str(code))
    assert done.returncode == exit_code, done.stdout
    assert [(one["stage"], one["outcome"]) for one in report["stages"]] == [("build", "passed"), ("table1", outcome)]
    options = r"--output \S+/card-r-x1/table1 data.path=/data device=cuda"
    (table,) = re.findall(rf"-m fedssl run-table (\S+) {options}\n", calls)
    assert (ROOT / table).is_file()


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
