"""``python -m benchmarks.import_time``: what ``import fedkernels`` adds to ``import torch``.

New processes with and without fedkernels in turn, after one of each that is not counted. Seconds of the clock and of
the processor, as medians with the least and the most; what is added is the difference of the medians.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import positive
from benchmarks.measure import ROOT, Settings
from benchmarks.write import environment, replace

FOLDER = ROOT / "benchmarks" / "results" / "import_time"
IMPORTS = {"torch": "import torch", "torch and fedkernels": "import torch, fedkernels"}
_CODE = """
import json, time
wall, processor = time.perf_counter(), time.process_time()
{imports}
print(json.dumps([time.perf_counter() - wall, time.process_time() - processor]))
"""


def measure(repeats: int) -> dict[str, Any]:
    """Start the processes.

    Returns:
        "environment", and "times", the seconds of the clock and of the processor of every counted process by what it
        imports.

    Raises:
        SystemExit: an import fails.
    """
    about = environment(Settings(threads=torch.get_num_threads(), repeats=repeats))
    times: dict[str, list[list[float]]] = {name: [] for name in IMPORTS}
    for repeat in range(repeats + 1):
        for name, imports in IMPORTS.items():
            seconds = _seconds(imports)
            if repeat:
                times[name].append(seconds)
    return {"environment": about, "times": times}


def _seconds(imports: str) -> list[float]:
    command = [sys.executable, "-c", _CODE.format(imports=imports)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{imports}: {done.stderr.strip().splitlines()[-1]}")
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def table(result: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = [
        "# Importing fedkernels",
        "",
        "Written by `python -m benchmarks.import_time`; its first lines say what is measured.",
        "",
        ", ".join(f"{name}: {value}" for name, value in result["environment"].items()),
        "",
        "| import | seconds (median; least to most) | of the processor |",
        "| --- | ---: | ---: |",
    ]
    medians = []
    for name, rows in result["times"].items():
        columns = [list(column) for column in zip(*rows, strict=True)]
        medians.append([statistics.median(column) for column in columns])
        cells = (f"{statistics.median(one):.3f}; {min(one):.3f} to {max(one):.3f}" for one in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    before, after = medians
    added = (f"{both - alone:.3f}" for alone, both in zip(before, after, strict=True))
    lines.append(f"| added by fedkernels | {' | '.join(added)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_time", description=__doc__)
    parser.add_argument("--repeats", type=positive, default=9, metavar="N", help="processes of each (default: 9)")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of README.md and results.json")
    options = parser.parse_args(arguments)
    result = measure(options.repeats)
    options.output.mkdir(parents=True, exist_ok=True)
    replace(options.output / "results.json", json.dumps(result, indent=1) + "\n")
    replace(options.output / "README.md", table(result))
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
