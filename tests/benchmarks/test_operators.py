"""``python -m benchmarks``, ``benchmarks.curves`` and ``benchmarks.peer_suites``: what they write, and peers."""

import csv
import importlib
import io
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import case, curves, measure, peer_suites, resident_memory, timing, write
from benchmarks.case import Bar, Case, Floor, Implementation
from benchmarks.measure import Settings
from benchmarks.peer_suites import Peer

pytestmark = pytest.mark.usefixtures("no_collections")
SPEED_PAGE = write.SPEED_PAGE
CPU = torch.device("cpu")


def row(name: str, times: list[float], **more: Any) -> dict[str, Any]:
    return {"implementation": name, "note": "", "same_result": True, "status": "ok", "times": times, **more}


def finished(size: str = "B = 4") -> dict[str, Any]:
    rows = [
        row("ours", [0.002, 0.001, 0.003], growth=3 * 2**20, outputs=2**20, extra=2 * 2**20, errors={"value": 1e-7}),
        row("slow", [0.008, 0.006, 0.007]),
        row("fast", [0.004, 0.004, 0.004]),
        {"implementation": "absent", "note": "", "same_result": True, "status": "not installed"},
    ]
    bars = (
        Bar(faster_than=("slow", "fast"), times=2.0),
        Bar(faster_than=("slow",), times=4.0),
        Bar(faster_than=("absent",), times=1.0),
        Bar(floor=1.5),
        Bar(extra_mib=1.0),
        Bar(error=1e-6),
    )
    one = Case(size, lambda device: {}, (), floor=Floor("a product", lambda inputs: dict), bars=bars)
    return measure.finish(one, rows, [0.001, 0.001, 0.001], {})


@pytest.mark.nightly  # a process for each implementation
def test_quick_run_writes_results_and_leaves_the_page_alone(tmp_path: Path) -> None:
    before = SPEED_PAGE.read_bytes()
    arguments = [sys.executable, "-m", "benchmarks", "apply_deltas", "--quick", "--repeats", "2", "--threads", "1"]
    done = subprocess.run([*arguments, "--output", tmp_path], cwd=measure.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert SPEED_PAGE.read_bytes() == before

    entry = json.loads((tmp_path / "results.json").read_text())["apply_deltas"]
    assert entry["environment"]["threads"] == 1
    assert entry["environment"]["torch"] == torch.__version__
    (measured,) = entry["cases"]
    assert [len(one["times"]) for one in measured["rows"]] == [2, 2, 2]
    assert len(measured["floor"]["times"]) == 2
    ours, loop, _ = measured["rows"]
    assert ours["errors"]["value"] < 1e-6
    assert loop["ratio"] == pytest.approx(loop["median"] / ours["median"])
    if sys.platform == "linux":
        assert ours["outputs"] == 0  # written in place
        assert ours["extra"] == ours["growth"]
    text = (tmp_path / "results.md").read_text()
    assert "**fedkernels.apply_deltas**" in text
    assert "K = 10, P = 0.000314 M in 4 tensors" in text
    assert not list(tmp_path.glob(".*"))


def test_medians_ratios_and_bars() -> None:
    measured = finished()
    ours, slow, fast, absent = measured["rows"]
    assert (ours["median"], ours["interquartile_range"]) == pytest.approx((0.002, 0.001))
    assert (slow["ratio"], fast["ratio"], measured["floor"]["ratio"]) == pytest.approx((3.5, 2.0, 2.0))
    assert "ratio" not in absent
    assert [bar["outcome"] for bar in measured["bars"]] == ["met", "missed", "not measured", "missed", "missed", "met"]
    assert measured["bars"][0]["bar"] == ">= 2 x fast"
    assert measured["bars"][2]["measured"] == "not installed"


def test_a_run_writes_its_operators_and_the_page_between_its_marks_unless_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, page = tmp_path / "results", tmp_path / "speed.md"
    page.write_text(f"before\n{write.START}\nold\n{write.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(write, "SPEED_PAGE", page)
    monkeypatch.setattr(write, "default_folder", lambda settings: folder)
    monkeypatch.setattr(command, "measure_case", lambda operator, index, _: finished(f"{operator} {index}"))
    assert command.main(["delta_gram", "apply_deltas"]) == 0
    first, text = json.loads((folder / "results.json").read_text()), page.read_text()
    assert text.startswith(f"before\n{write.START}\n## ")
    assert text.endswith(f"{write.END}\nafter\n")
    assert "old" not in text
    assert "| `delta_gram` | delta_gram 0 | 2.00 | fast 4.00 | 2.00 | 2.00 | 2.0 | - |" in text
    assert command.main(["apply_deltas", "--threads", "5", "--output", str(folder)]) == 0
    second = json.loads((folder / "results.json").read_text())
    assert second["delta_gram"] == first["delta_gram"]
    assert second["apply_deltas"]["environment"]["threads"] == 5
    assert page.read_text() == text
    second["apply_deltas"]["environment"] |= {"torch": "2.99.0+cpu"}  # as on another machine
    (folder / "results.json").write_text(json.dumps(second))
    one, other = write.short_tables(tmp_path).split("## ")[1:]
    assert "torch 2.99.0\n" in other
    assert ("| `delta_gram`" in one, "| `apply_deltas`" in one) == (True, False)
    before = [path.read_bytes() for path in (*folder.iterdir(), page)]
    monkeypatch.setattr(command, "measure_case", Mock(side_effect=KeyboardInterrupt))
    assert command.main(["delta_gram"]) == 130
    assert [path.read_bytes() for path in (*folder.iterdir(), page)] == before


COMMITTED = sorted(path.parent for path in (measure.ROOT / "benchmarks/results/cpu").glob("*/results.json"))


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_committed_results_stay_readable(folder: Path) -> None:
    """The same tables come of them."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert write.tables(results) == (folder / "results.md").read_text(encoding="utf-8")


def test_every_operator_has_its_file_and_ours_comes_first() -> None:
    files = {path.stem.removeprefix("bench_") for path in (measure.ROOT / "benchmarks").glob("bench_*.py")}
    assert files == set(command.OPERATORS)
    settings = [Settings(device, quick=quick) for device in ("cpu", "cuda") for quick in (False, True)]
    for operator, setting in itertools.product(command.OPERATORS, settings):
        cases = measure.load_cases(operator, setting)
        assert cases
        for one in cases:
            names = [implementation.name for implementation in one.implementations]
            assert names[0].startswith(f"fedkernels.{operator}")
            assert len(set(names)) == len(names)
            for bar in one.bars:
                assert set(bar.faster_than) <= set(names)
                assert one.work or not bar.share
                assert one.floor or not bar.floor
            assert one.work is None or one.work.rate in ("copy", "bf16", "tf32", "fp32")


def test_what_is_not_installed_fails_or_lasts_too_long_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Implementation("absent", lambda inputs: {}, package="no-such-distribution")
    request = {"threads": 1, "task": "memory"}
    assert measure._memory_row(absent, request)["status"] == "not installed"
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Traceback >&2\necho IndexError: 99 >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(measure.sys, "executable", str(python))
    assert measure._child(request, 60.0)["status"] == "failed: IndexError: 99"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    assert measure._child(request, 0.01)["status"].startswith("not ready after")


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_peak_holds_what_was_freed_again() -> None:
    """In a process of its own that hands freed memory back, as the command has it: here glibc may keep it for later."""
    code = "from tests.benchmarks.test_operators import peak_of_what_is_freed; print(peak_of_what_is_freed())"
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=measure.ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) / 2**20 == pytest.approx(32, abs=4)


def peak_of_what_is_freed() -> int | None:
    def run() -> case.Outputs:
        torch.ones(32 * 2**18).sum()  # 32 MiB, gone at the end
        return {"value": torch.ones(8 * 2**18)}

    run()  # what the first call loads and keeps
    return resident_memory.peak_growth(run)[1]


def test_errors_are_relative_to_the_largest_entry() -> None:
    truth = {"value": torch.tensor([2.0, -4.0]), "gradient in x": torch.ones(2), "gradient in y": torch.ones(2)}
    outputs = {name: tensor.clone() for name, tensor in truth.items()} | {"unbiased estimate": torch.ones(1)}
    outputs["value"][0] += 1
    outputs["gradient in x"][1] = math.nan
    errors = case.largest_errors(outputs, truth, {})
    assert errors["value"] == 0.25
    assert math.isnan(errors["gradient"])


ON_CPU, ON_GPU = Settings(quick=True), Settings("cuda", rehearse=True, quick=True)


@pytest.mark.parametrize("settings", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("operator", command.OPERATORS)
def test_the_implementations_agree_with_the_truth(operator: str, settings: Settings) -> None:
    """Each computes what its row says: ours, PyTorch's, and the packages' that a GPU is measured with."""
    peers_too = settings is ON_GPU and operator != "unbalanced_ot"  # whose peer takes long
    for one in measure.load_cases(operator, settings):
        if not one.timed or one.truth is None:
            continue
        installed = [i for i in one.implementations if measure.row_of(i)["status"] == "ok"]
        present = [i for i in installed if peers_too or not i.package]
        rows = timing.time_case(one, present, CPU, timing.HostClock(), 1)["rows"]
        half = "bfloat16" in one.size
        most = {"value": 1e-4} if operator == "unbalanced_ot" else {"value": 1e-5, "gradient": 2e-2 if half else 1e-4}
        assert "value" in rows[present[0].name]["errors"]
        for implementation in present:
            if half and implementation is not present[0]:
                # the peers of SupCon normalise the rows in bfloat16
                most["value"] = 2e-2 if operator == "supervised_contrastive_loss" else 1e-2
            row = rows[implementation.name]
            assert "status" not in row, row
            if implementation.same_result:
                assert all(row["errors"][name] < most.get(name, math.inf) for name in row["errors"]), row


# ---- curves: python -m benchmarks.curves ----


def point(size: int, name: str, milliseconds: str, **more: Any) -> curves.Point:
    known = {"status": "ok", "same_result": True, "processor": "a processor", "beyond_outputs_mib": "1.5"}
    return {**dict.fromkeys(curves.COLUMNS, ""), **known, "size": size, "implementation": name, **more} | {
        "milliseconds": milliseconds
    }


POINTS = [
    point(10, "ours", "1.5"),
    point(10, "peer", "3"),
    point(100, "ours", "20"),
    point(100, "peer", "", status="not installed", beyond_outputs_mib=""),
    point(100, "of large sizes", "40"),
]


@pytest.mark.parametrize("operator", curves.OPERATORS)
def test_sizes_ascend_and_ours_comes_first_and_the_pages_link_to_what_is_committed(operator: str) -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in measure.ROOT.glob("docs/operators/*.md"))
    for written in measure.ROOT.glob(f"benchmarks/results/curves/*/{operator}.*"):
        assert f"](../../{written.relative_to(measure.ROOT).as_posix()})" in pages
    module = importlib.import_module(f"benchmarks.bench_{operator}")
    for quick in (True, False):
        sizes = module.curve_cases(quick)
        assert list(sizes) == sorted(sizes)
        assert len(sizes) > 1
        assert all(case.timed and case.implementations[0].name.startswith("fedkernels.") for case in sizes.values())


def test_the_files_hold_every_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(curves, "measure", lambda operator, settings: POINTS)
    folder = tmp_path / "a-processor"
    assert curves.main(["client_weights", "--output", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["client_weights.csv", "client_weights.svg"]
    lines = list(csv.DictReader(io.StringIO((folder / "client_weights.csv").read_text())))
    assert [(line["size"], line["implementation"], line["milliseconds"]) for line in lines] == [
        (str(one["size"]), one["implementation"], one["milliseconds"]) for one in POINTS
    ]
    picture = (folder / "client_weights.svg").read_text()
    assert all(f">{text}<" in picture for text in ("ours", "peer", "clients", "ms"))


# ---- python -m benchmarks.peer_suites, on a library of this file's own ----

LIBRARY = {
    "library/__init__.py": "from library.losses import Loss, user, value\n",
    "library/losses.py": """\
from torch import nn
class Loss(nn.Module):
    def forward(self, x): return x
def value(x): return x
def user(): return value, Loss
""",
    "ours.py": """\
from torch import nn
class Loss(nn.Module):
    def forward(self, x): return x + 1
def value(x): return x
""",
    "test_library.py": """\
import library, library.losses
import pytest
def test_both_pass(): assert library.value(3) == library.losses.value(3) == 3
@pytest.mark.parametrize("x", [1, 2])
def test_ours_fails(x): assert library.Loss()(x) == library.losses.Loss()(x) == x
def test_both_fail(): assert library.value(1) == 2
""",
}


@pytest.fixture
def suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tests, with the library and a module in the place of fedkernels.compat in it."""
    folder = tmp_path / "suites" / "mine"
    for name, text in LIBRARY.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    refused = {"assert 3 == 2": "ours adds one"}
    peer = Peer("torch", "example.org", ("test_library.py",), "library", ("Loss", "value"), refused=refused)
    monkeypatch.setattr(peer_suites, "PEERS", {"mine": peer})
    monkeypatch.setattr(peer_suites, "replacements", lambda *_: {f"library.{one}": f"ours.{one}" for one in peer.names})
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return tmp_path / "suites"


@pytest.mark.nightly  # two processes of pytest
def test_new_failures_and_calls_are_those_of_the_drop_in(suites: Path, tmp_path: Path) -> None:
    assert peer_suites.main(["--suites", str(suites), "--output", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["mine"]
    assert (result["tests"], result["original"], result["drop_in"]) == (4, 3, 1)
    assert result["calls"] == {"library.Loss": 4, "library.value": 3}
    assert [test.partition("::")[2] for test in result["new"]] == ["test_ours_fails[1]", "test_ours_fails[2]"]
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| mine | not explained: AssertionError: assert 2 == 1 | 1 | `test_ours_fails[1]` |" in page
    assert "| mine | ours adds one | 1 | `test_ours_fails[2]` |" in page


def test_a_run_of_one_library_leaves_the_rows_of_others_and_tests_that_never_call_a_drop_in_are_refused(
    suites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--suites", str(suites), "--output", str(tmp_path)]
    monkeypatch.setattr(peer_suites, "outcomes", lambda *_: ({"test_library::test": ""}, {"library.Loss": 0}))
    with pytest.raises(SystemExit, match=r"^mine: the tests called none of library\.Loss$"):
        peer_suites.main(arguments)
    shutil.copytree(suites / "mine", suites / "other")
    monkeypatch.setattr(peer_suites, "PEERS", peer_suites.PEERS | {"other": peer_suites.PEERS["mine"]})
    counts = {"tests": 1, "original": 1, "drop_in": 1, "calls": {"library.Loss": 1}, "new": {}}
    monkeypatch.setattr(peer_suites, "compare", lambda name, *_: {"version": name, **counts})
    for name in ("other", "mine", "mine"):
        assert peer_suites.main([name, *arguments]) == 0
    assert list(json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))) == ["mine", "other"]
