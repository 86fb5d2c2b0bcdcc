"""``python -m benchmarks --device cuda`` as far as the CPU shows it, and the calls of ``benchmarks/on_gpu.sh``."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import timing
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

# A Python that notes how it is called. The self-test fails, the operators are not ready in time.
PYTHON = """#!/usr/bin/env bash
echo "${FEDKERNELS_SELF_TEST:-} $*" >>"$(dirname "$0")/calls.txt"
case "$*" in *fedkernels.self_test) exit 3 ;; *benchmarks*) exit 124 ;; esac
"""


Call = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    """Calls the script in a repository of its own, with a pack. -> exit code, output, and how it called Python"""
    if sys.platform != "linux":
        pytest.skip("timeout and du as Linux has them")
    for folder in ("benchmarks", "fedkernels", "build/gpu/fedkernels", "build/gpu/wheels"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks/on_gpu.sh", tmp_path / "benchmarks")
    (tmp_path / "build/gpu/fedkernels/_C.abi3.so").touch()
    (tmp_path / "build/gpu/wheels/a-1-py3-none-any.whl").touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def run(*arguments: str) -> tuple[int, str, list[str]]:
        environment = {**os.environ, "REHEARSE": "1", "PYTHON": str(tmp_path / "python"), "OUT": str(tmp_path / "out")}
        environment.pop("FEDKERNELS_SELF_TEST", None)
        command = ["bash", str(tmp_path / "benchmarks/on_gpu.sh"), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        calls = tmp_path / "calls.txt"
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_a_step_that_fails_does_not_end_the_others(call: Call, tmp_path: Path) -> None:
    code, printed, (unpacked, self_test, tests) = call("correctness")
    assert code == 1
    assert "] self_test: exit code 3" in printed
    assert "] tests: exit code 0" in printed
    assert unpacked.startswith(" -m zipfile -e build/gpu/wheels/a-1-py3-none-any.whl")
    assert self_test == " -m fedkernels.self_test"
    assert tests.startswith("0 ")  # no self-test at first use
    assert all((ROOT / word).exists() for word in tests.split() if word.startswith("tests/"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["self_test.txt", "tests.txt"]


def test_what_the_call_for_speed_calls_exists(call: Call) -> None:
    code, printed, (_, *trained, measured) = call("speed")
    assert code == 1
    assert "] operators: exit code 124, not ready after 230 s" in printed
    assert command._parse(measured.split()[3:]).rehearse
    for one, precision in zip(trained, ("float32", "bfloat16"), strict=True):
        words = one.split()
        assert words[1:5] == ["-m", "fedssl", "run", "fedu2"]
        assert load_recipe("fedu2", words[5 : words.index("--output")]).training.precision == precision


@pytest.mark.parametrize(("megabytes", "code"), [(1, 0), (70, 1)])
def test_a_pack_tells_whether_it_may_travel(megabytes: int, code: int, call: Call, tmp_path: Path) -> None:
    with (tmp_path / "images.npz").open("wb") as file:
        file.truncate(megabytes << 20)
    (tmp_path / "build/gpu/stale").touch()
    # The Python here builds nothing: the folder is made by what downloads, or in its place, and images are all taken.
    pack = 'gpu=$(dirname "$0")/build/gpu\nmkdir -p "$gpu"\n[ "$1" != -c ] || cp "$3" "$gpu/cifar10.npz"\n'
    (tmp_path / "python").write_text(PYTHON + pack)
    found, printed, (build, *downloads, images) = call("pack", str(tmp_path / "images.npz"))
    assert found == code
    assert printed.splitlines()[-1] == f"build/gpu and all tracked files: {megabytes} of 64 MiB"
    assert "build_ext --build-lib build/gpu" in build
    assert all("pip download" in line and "--python-version=3.12" in line for line in downloads)
    assert "[:5000]" in images
    assert [path.name for path in (tmp_path / "build/gpu").iterdir()] == ["cifar10.npz"]


def test_a_pack_whose_module_is_not_compiled_ends_there(call: Call, tmp_path: Path) -> None:
    (tmp_path / "python").write_text(PYTHON + 'case "$*" in *build_ext*) exit 4 ;; esac\n')
    code, _, calls = call("pack")
    assert (code, len(calls)) == (4, 1)


def test_other_calls_are_refused(call: Call) -> None:
    assert call("tests")[:2] == (2, "on_gpu.sh: expected pack [CIFAR10.npz], correctness or speed, got: tests\n")
