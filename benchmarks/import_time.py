"""``python -m benchmarks.import_time``: what ``import fedkernels`` adds to ``import torch``.

New processes with and without fedkernels in turn, after one of each that is not counted. Seconds of the clock and of
the processor, as medians; the difference is of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.__main__ import positive

IMPORTS = {"torch": "import torch", "torch and fedkernels": "import torch, fedkernels"}
_CODE = """
import json, time
wall, processor = time.perf_counter(), time.process_time()
{imports}
print(json.dumps([time.perf_counter() - wall, time.process_time() - processor]))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_time", description=__doc__)
    parser.add_argument("--repeats", type=positive, default=9, metavar="N", help="processes of each (default: 9)")
    options = parser.parse_args(arguments)
    times: dict[str, list[list[float]]] = {name: [] for name in IMPORTS}
    for repeat in range(options.repeats + 1):
        for name, imports in IMPORTS.items():
            seconds = _seconds(imports)
            if repeat:
                times[name].append(seconds)
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    for name, (wall, processor) in medians.items():
        print(f"{name}: {wall:.3f} s, of the processor {processor:.3f} s")
    added = [after - before for before, after in zip(*medians.values(), strict=True)]
    print(f"added by fedkernels: {added[0]:.3f} s, of the processor {added[1]:.3f} s")
    return 0


def _seconds(imports: str) -> list[float]:
    command = [sys.executable, "-c", _CODE.format(imports=imports)]
    seconds: list[float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
