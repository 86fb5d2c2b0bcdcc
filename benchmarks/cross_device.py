"""``python -m benchmarks.cross_device``: what a round costs where a hundred of very many clients take part in it.

FedBYOL with `small_convnet` on images of noise, 3 x 32 x 32 pixels; 100 of 100, 1,000 and 10,000 clients are sampled in
a round, and each takes one step of 8 images. All rows have the same 80,000 images, so that memory and time can differ
by the number of clients alone. Each row is measured in a process of its own.

- round: wall-clock seconds, the mean of the rounds after the first.
- training: milliseconds that a client spends in its local training, with augmentation and the counting of its step.
- overhead: what is left of a client's share of the round: loading its state, the server's message, its answer, storing
  its state, the aggregation and the commit of the round.
- memory: the process's peak (VmHWM; Linux only), without the last round, after which whole models are stored.
- disk: bytes of all stored states after these rounds, and how many clients have one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import ROOT, Settings
from benchmarks.resident_memory import status
from benchmarks.write import environment
from fedssl import method
from fedssl.data.datasets import Dataset
from fedssl.engines.in_process import LocalClients
from fedssl.engines.observers import Observer
from fedssl.engines.rounds import first_files, run_rounds
from fedssl.federation import build_federation
from fedssl.recipe.reading import load_recipe
from fedssl.run_folder.directory import MetricRow, RunDirectory

FOLDER = ROOT / "benchmarks" / "results" / "cross_device"
CLIENTS = (100, 1000, 10000)
SAMPLED, BATCH = 100, 8


class TrainingTimer:
    """Sums up the seconds that clients spend in their local training."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._train = method.train_locally

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return self._train(*arguments, **options)
        finally:
            self.seconds += time.perf_counter() - start


class Gauge(Observer):
    """What was measured up to the end of the first round, and of the last but one."""

    def __init__(self, training: TrainingTimer, checkpoints: Path, last: int):
        self._training, self._checkpoints, self._last = training, checkpoints, last
        self.readings: list[dict[str, float]] = []

    def round_ended(self, round_number: int, rows: Sequence[MetricRow]) -> None:
        if round_number not in (1, self._last):
            return
        states = [path.stat().st_size for path in self._checkpoints.glob("client-*")]
        reading = {
            "time": time.perf_counter(),
            "training": self._training.seconds,
            "memory": status("VmHWM"),
            "states": len(states),
            "disk": sum(states),
        }
        self.readings.append(reading)


def measure_row(clients: int, images: int, rounds: int) -> dict[str, float]:
    """One row of the table. For a process of its own."""
    overrides = [
        "preset=none",
        f"rounds={rounds + 2}",
        f"clients_per_round={SAMPLED}",
        f"partition={{name: iid, clients: {clients}}}",
        "architectures=[small_convnet]",
        "objective.hidden_features=256",
        "objective.output_features=128",
        f"training={{local_steps: 1, batch_size: {BATCH}}}",
        "device=cpu",
    ]
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, 32, 32), generator=generator, dtype=torch.uint8)
    no_labels = torch.zeros(images, dtype=torch.int64)
    dataset = Dataset("noise", pixels, no_labels, pixels[:50], no_labels[:50], (), None)
    start = time.perf_counter()
    federation = build_federation(load_recipe("fedbyol", overrides), dataset)
    built = time.perf_counter() - start
    training = TrainingTimer()
    method.train_locally = training
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory.create(Path(folder) / "run", first_files(federation))
        gauge = Gauge(training, directory.checkpoints, rounds + 1)
        run_rounds(federation, directory, gauge, LocalClients(federation, directory, gauge))
    first, last = gauge.readings
    seconds = (last["time"] - first["time"]) / rounds
    per_client = (last["training"] - first["training"]) / rounds / SAMPLED
    return {
        "clients": clients,
        "build": built,
        "round": seconds,
        "training": per_client,
        "overhead": seconds / SAMPLED - per_client,
        "memory": last["memory"],
        "states": last["states"],
        "disk": last["disk"],
    }


def measure(images: int, rounds: int, threads: int) -> dict[str, Any]:
    """All rows."""
    rows = []
    for clients in CLIENTS:
        command = [sys.executable, "-m", "benchmarks.cross_device", "--row", str(clients)]
        command += ["--images", str(images), "--rounds", str(rounds), "--threads", str(threads)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{clients} clients: {done.stderr.strip().splitlines()[-1]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    environment_of_run = environment(Settings(threads=threads, repeats=rounds))
    return {"environment": environment_of_run, "images": images, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    lines = [
        "# Rounds across devices",
        "",
        "Written by `python -m benchmarks.cross_device`; its first lines say what is measured.",
        "",
        f"{SAMPLED} clients a round, {result['images']:,} images. "
        + ", ".join(f"{name}: {value}" for name, value in result["environment"].items()),
        "",
        "| clients | before the first round (s) | round (s) | training (ms a client) | overhead (ms a client) "
        "| peak memory (MiB) | clients with a state | disk (MiB) |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['clients']:,} | {row['build']:.1f} | {row['round']:.2f} | {1e3 * row['training']:.1f} "
        f"| {1e3 * row['overhead']:.1f} | {row['memory'] / 2**20:.0f} | {row['states']:,} "
        f"| {row['disk'] / 2**20:.1f} |"
        for row in result["rows"]
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cross_device", description=__doc__)
    parser.add_argument("--images", type=int, default=80_000, help="in all rows (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="that are measured (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of results.md and results.json")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.images < BATCH * max(CLIENTS):
        parser.error(f"--images must be at least {BATCH * max(CLIENTS)}, got {options.images}")
    torch.set_num_threads(options.threads)
    if options.row:
        print(json.dumps(measure_row(options.row, options.images, options.rounds)))
        return 0
    result = measure(options.images, options.rounds, options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.output / "results.md").write_text(table(result))
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
