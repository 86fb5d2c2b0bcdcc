"""``python -m benchmarks.import_time``: what is counted, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the sdist")

from benchmarks import import_time

TORCH, BOTH = import_time.IMPORTS.values()


def test_it_writes_the_medians_of_all_processes_but_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {
        TORCH: iter([[9.0, 8.0], [1.0, 0.9], [1.2, 0.7], [1.1, 0.8]]),
        BOTH: iter([[9.0, 8.0], [1.5, 1.0], [1.3, 0.8], [1.4, 0.9]]),
    }
    order = []

    def measured(imports: str) -> list[float]:
        order.append(imports)
        return next(seconds[imports])

    monkeypatch.setattr(import_time, "_seconds", measured)
    folder = tmp_path / "results"
    assert import_time.main(["--repeats", "3", "--output", str(folder)]) == 0
    assert order == 4 * [TORCH, BOTH]
    result = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert result["environment"]["repeats"] == 3
    assert result["times"] == {
        "torch": [[1.0, 0.9], [1.2, 0.7], [1.1, 0.8]],
        "torch and fedkernels": [[1.5, 1.0], [1.3, 0.8], [1.4, 0.9]],
    }
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert page.splitlines()[-3:] == [
        "| torch | 1.100; 1.000 to 1.200 | 0.800; 0.700 to 0.900 |",
        "| torch and fedkernels | 1.400; 1.300 to 1.500 | 0.900; 0.800 to 1.000 |",
        "| added by fedkernels | 0.300 | 0.100 |",
    ]
    assert page == import_time.table(result)
    assert page in capsys.readouterr().out


def test_a_process_tells_seconds_of_the_clock_and_of_the_processor() -> None:
    wall, processor = import_time._seconds("import time; time.sleep(0.05)")
    assert 0 <= processor < wall  # sleep takes no time of the processor


def test_an_import_that_fails_is_told() -> None:
    with pytest.raises(SystemExit, match=r"^import nothing_of_this_name: ModuleNotFoundError"):
        import_time._seconds("import nothing_of_this_name")
