"""``python -m benchmarks.site_memory``: the memory of the server's process by the number of sites that answer a round.

A server without data runs one round of FedSimSiam with a ResNet-50 (float32, about 100 MB an update). Its Flower grid
is a stand-in that makes each site's answer when the server pulls it, so that no site's memory and no network is
measured; what Flower itself needs to pull one answer is not in it. Each row is a process of its own.

- own: the peak of memory that belongs to the process alone (RssAnon, sampled every 2 ms), beyond that before the round.
- with files: the peak of resident memory (VmHWM), beyond that before the round. It counts pages of mapped files too,
  which the system takes back when it needs memory.

Both in updates: multiples of the size of one site's answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import ROOT, Settings
from benchmarks.resident_memory import status
from benchmarks.write import environment
from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.recipe.reading import load_recipe
from fedssl.run_folder.directory import SITES_RUN, RunDirectory

FOLDER = ROOT / "benchmarks" / "results" / "site_memory"
SITES = (2, 5, 10, 20)
IMAGES_OF_A_SITE = 100


class Sites:
    """Flower's grid, whose sites answer each message when the server looks for it."""

    def __init__(self, federation: Federation):
        """Stand for all clients of a federation; node k + 1 is client k."""
        self._federation = federation
        self._numbers = itertools.count()
        self._unanswered: dict[str, Any] = {}
        self.update_bytes = 0

    def clients(self) -> dict[int, int]:
        return {k + 1: k for k in range(len(self._federation.client_rows))}

    def push_messages(self, messages: list[Any]) -> list[str]:
        names = [f"message {next(self._numbers)}" for _ in messages]
        for name, message in zip(names, messages, strict=True):
            message.metadata.__dict__["_message_id"] = name
            self._unanswered[name] = message
        return names

    def pull_messages(self, names: list[str]) -> list[Any]:
        return [self._answer(self._unanswered.pop(name)) for name in list(names) if name in self._unanswered]

    def _answer(self, message: Any) -> Any:
        from flwr.app import ConfigRecord, RecordDict
        from flwr.app import Message as FlowerMessage

        from fedssl.engines.flower.wire import from_records, to_records

        k = message.metadata.dst_node_id - 1
        if message.metadata.message_type == "query":
            return FlowerMessage(RecordDict({"answer": ConfigRecord({"images": IMAGES_OF_A_SITE})}), reply_to=message)
        received = from_records(message.content)
        generator = torch.Generator().manual_seed(k)
        for tensor in received.tensors.values():
            if tensor.dtype == torch.float32:
                tensor.add_(torch.rand(tensor.shape, generator=generator), alpha=1e-3)
        self.update_bytes = sum(t.numel() * t.element_size() for t in received.tensors.values())
        return FlowerMessage(to_records(Message(received.tensors, {"samples": IMAGES_OF_A_SITE})), reply_to=message)


class PeakOfOwnMemory:
    """The largest RssAnon of this process while the body runs."""

    def __enter__(self) -> PeakOfOwnMemory:
        self.bytes = status("RssAnon")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.bytes = max(self.bytes, status("RssAnon"))
            time.sleep(0.002)


def measure_row(sites: int, architecture: str, transport: str) -> dict[str, float]:
    """One row of the table. For a process of its own."""
    from flwr.supercore.task_identity import TaskIdentity

    from fedssl.engines.flower.messenger import Messenger
    from fedssl.engines.flower.registration import ConnectedClients
    from fedssl.engines.flower.server import FlowerClients
    from fedssl.engines.observers import Observer
    from fedssl.engines.rounds import first_files, run_rounds

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    overrides = [
        "preset=none",
        "rounds=1",
        f"partition={{name: sites, clients: {sites}}}",
        "data={name: none, image_shape: [3, 32, 32]}",
        f"architectures=[{architecture}]",
        "objective.bottleneck_features=64",
        "objective.output_features=128",
        "device=cpu",
        "engine=flower",
        f"transport={transport}",
    ]
    federation = build_federation(load_recipe("fedsimsiam", overrides))
    with tempfile.TemporaryDirectory(dir=_place_of_runs()) as folder:
        directory = RunDirectory.create(Path(folder) / "run", first_files(federation) | {SITES_RUN: "run"})
        grid = Sites(federation)
        connected = ConnectedClients(Messenger(grid), grid.clients, federation, Observer(), "run")
        connected.require_enough()
        clients = FlowerClients(connected, federation, directory, Observer())
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = status("RssAnon"), status("VmRSS")
        started = time.perf_counter()
        with PeakOfOwnMemory() as own:
            run_rounds(federation, directory, Observer(), clients)
        seconds = time.perf_counter() - started
    return {
        "sites": sites,
        "update": grid.update_bytes,
        "own": own.bytes - before[0],
        "with_files": status("VmHWM") - before[1],
        "seconds": seconds,
    }


def _place_of_runs() -> Path:
    """A folder on a disk, as a run's folder is; the system's folder for temporary files may be in memory."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    return folder


def measure(sites: list[int], architecture: str, transport: str) -> dict[str, Any]:
    """All rows."""
    rows = []
    for count in sites:
        command = [sys.executable, "-m", "benchmarks.site_memory", "--row", str(count)]
        command += ["--architecture", architecture, "--transport", transport]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{count} sites: {done.stderr.strip().splitlines()[-1]}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    return {
        "environment": environment(Settings(threads=1, repeats=1)),
        "architecture": architecture,
        "transport": transport,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    rows = result["rows"]
    update = rows[0]["update"]
    growth = (rows[-1]["own"] - rows[0]["own"]) / update
    lines = [
        "# Memory of the server by sites",
        "",
        "Written by `python -m benchmarks.site_memory`; its first lines say what is measured.",
        "",
        f"{result['architecture']}, transport: {result['transport']}, an update of {update / 1e6:.1f} MB. "
        + ", ".join(f"{name}: {value}" for name, value in result["environment"].items()),
        "",
        "| sites | own (MB) | own (updates) | with files (MB) | with files (updates) | seconds |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['sites']} | {row['own'] / 1e6:.0f} | {row['own'] / update:.2f} | {row['with_files'] / 1e6:.0f} "
        f"| {row['with_files'] / update:.2f} | {row['seconds']:.1f} |"
        for row in rows
    ]
    lines += [
        "",
        f"From {rows[0]['sites']} to {rows[-1]['sites']} sites the process's own memory grows by {growth:.2f} updates.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.site_memory", description=__doc__)
    parser.add_argument("--sites", type=int, nargs="+", default=SITES, help="of the rows (default: %(default)s)")
    parser.add_argument("--architecture", default="resnet50", help="of timm or of fedssl (default: %(default)s)")
    parser.add_argument("--transport", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of README.md and results.json")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.row:
        print(json.dumps(measure_row(options.row, options.architecture, options.transport)))
        return 0
    result = measure(list(options.sites), options.architecture, options.transport)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.output / "README.md").write_text(table(result))
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
