"""A plugin of pytest that writes what each file of tests takes: its seconds, and the processor's.

    PYTEST_ADDOPTS="-p tests.times_by_file" TIMES_BY_FILE=DIR make test
    python -m tests.times_by_file DIR

The processor's seconds count processes that a test has started and waited for. Each process of pytest-xdist writes a
file of its own into DIR.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    began, used = time.perf_counter(), sum(os.times()[:4])
    yield
    of_file = seconds[item.nodeid.partition("::")[0]]
    of_file[0] += time.perf_counter() - began
    of_file[1] += sum(os.times()[:4]) - used
    of_file[2] += 1


def pytest_sessionfinish() -> None:
    folder = Path(os.environ["TIMES_BY_FILE"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.json").write_text(json.dumps(seconds), encoding="utf-8")


def table(folder: Path) -> str:
    total: dict[str, list[float]] = {}
    for path in folder.glob("*.json"):
        for name, figures in json.loads(path.read_text(encoding="utf-8")).items():
            total[name] = [a + b for a, b in zip(figures, total.get(name, [0.0, 0.0, 0]), strict=True)]
    rows = sorted(total.items(), key=lambda row: -row[1][1])
    rows.append(("in all", [sum(column) for column in zip(*total.values(), strict=True)]))
    lines = ["| file | seconds | processor's seconds | tests |", "|---|---|---|---|"]
    lines += [f"| {name} | {wall:.1f} | {used:.1f} | {tests:.0f} |" for name, (wall, used, tests) in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
