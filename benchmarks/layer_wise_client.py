"""``python -m benchmarks.layer_wise_client``: what a client's training takes in LW-FedSSL's last stage and end-to-end.

ViT-Tiny (12 blocks, 4x4 patches) at 32x32 pixels with MoCo v3's heads, noise for images. Both train by the code that a
run uses, views and update included; the last stage is the dearest, as all other layers are passed forward.

- memory: each in a fresh process, two steps after one of two images: by how much the resident set grew at its peak
  (/proc/self/clear_refs, VmHWM; Linux only), and the process's whole peak.
- time: both in one process, one step after the other in turn; the median of the repeats.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import ROOT, Settings
from benchmarks.resident_memory import peak_growth, status
from benchmarks.write import environment
from fedssl.client import Client, LocalRound
from fedssl.data.datasets import Dataset
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.recipe.reading import load_recipe
from fedssl.training import train_locally

STAGES = 12
NAMES = {"end-to-end": "fedmoco_v3", f"layer-wise, stage {STAGES} of {STAGES}": "lw_fedssl"}
BARS = {"memory": 0.5, "time": 0.45}
FOLDER = ROOT / "benchmarks" / "results" / "layer_wise"


@dataclass
class Trainer:
    """One client in the last round."""

    recipe_name: str
    batch_size: int

    def __post_init__(self) -> None:
        overrides = [
            f"rounds={STAGES}",
            "device=cpu",
            "architectures=[vit_tiny_patch16_224]",
            "partition={name: iid, clients: 1}",
            "objective.hidden_features=512",
            "objective.output_features=256",
            f"training={{local_epochs: 1, batch_size: {self.batch_size}, optimizer: adamw, learning_rate: 1.0e-4}}",
        ]
        if self.recipe_name == "lw_fedssl":
            overrides.append("schedule.rounds_per_stage=1")
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (2 * self.batch_size, 3, 32, 32), generator=generator, dtype=torch.uint8)
        labels = torch.arange(len(images)) % 2
        dataset = Dataset("noise", images, labels, images[:2], labels[:2], ("0", "1"), None)
        self.federation = build_federation(load_recipe(self.recipe_name, overrides), dataset)
        self.method, self.client = self.federation.method, self.federation.client(0, Message())
        plan = self.method.plan(self.client.model, STAGES)
        self.method.schedule.prepare(self.client.model, plan)

    def train(self, steps: int, batch_size: int | None = None) -> None:
        """So many steps of local training."""
        size = batch_size or self.batch_size
        client = Client(0, self.client.images[: steps * size], self.client.labels, None, self.client.model)
        local = LocalRound(client, Message(), STAGES, 0, self.method.objective, self.method.augmentation)
        train_locally(local, self.method.training.model_copy(update={"batch_size": size}), (), STAGES)


def measure(batch_size: int, repeats: int, threads: int) -> dict[str, Any]:
    """Both rows with memory and times."""
    rows: dict[str, dict[str, Any]] = {}
    for name, recipe in NAMES.items():
        command = [sys.executable, "-m", "benchmarks.layer_wise_client", "--memory-of", recipe]
        command += ["--batch-size", str(batch_size), "--threads", str(threads)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        rows[name] = json.loads(done.stdout.splitlines()[-1])
    torch.set_num_threads(threads)
    trainers = {name: Trainer(recipe, batch_size) for name, recipe in NAMES.items()}
    for trainer in trainers.values():
        trainer.train(1)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(repeats):
        for name, trainer in trainers.items():
            start = time.perf_counter()
            trainer.train(1)
            times[name].append(time.perf_counter() - start)
    for name, row in rows.items():
        row["times"] = times[name]
    return {
        "environment": environment(Settings(threads=threads, repeats=repeats)),
        "batch_size": batch_size,
        "rows": rows,
    }


def peak_memory(recipe: str, batch_size: int) -> dict[str, int]:
    """Bytes that two steps add to the resident set at most, and the process's peak. For a process of its own."""
    trainer = Trainer(recipe, batch_size)
    trainer.train(1, batch_size=2)

    def run() -> dict[str, torch.Tensor]:
        trainer.train(2)
        return {}

    _, growth = peak_growth(run)
    return {"growth": growth or 0, "peak": status("VmHWM")}


def tables(result: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    whole, layered = result["rows"].values()
    lines = [
        "# A client's training, layer-wise against end-to-end",
        "",
        "Written by `python -m benchmarks.layer_wise_client`; its first lines say what is measured.",
        "",
        f"Batch {result['batch_size']}. " + ", ".join(f"{k}: {v}" for k, v in result["environment"].items()),
        "",
        "| | memory growth (MiB) | process's peak (MiB) | step (s, median; least to most) |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, row in result["rows"].items():
        times = row["times"]
        spread = f"{statistics.median(times):.2f}; {min(times):.2f} to {max(times):.2f}"
        lines.append(f"| {name} | {row['growth'] / 2**20:.0f} | {row['peak'] / 2**20:.0f} | {spread} |")
    ratios = {
        "memory growth": (layered["growth"] / whole["growth"], BARS["memory"]),
        "process's peak": (layered["peak"] / whole["peak"], BARS["memory"]),
        "step": (statistics.median(layered["times"]) / statistics.median(whole["times"]), BARS["time"]),
    }
    lines += ["", "| ratio | measured | bar |", "| --- | ---: | ---: |"]
    lines += [
        f"| {name} | {value:.3f} | under {bar}: {'met' if value < bar else 'missed'} |"
        for name, (value, bar) in ratios.items()
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer_wise_client", description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--memory-of", choices=list(NAMES.values()), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.memory_of:
        torch.set_num_threads(options.threads)
        print(json.dumps(peak_memory(options.memory_of, options.batch_size)))
        return 0
    result = measure(options.batch_size, options.repeats, options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (options.output / "results.md").write_text(tables(result), encoding="utf-8")
    print(tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
