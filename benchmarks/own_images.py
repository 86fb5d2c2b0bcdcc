"""``python -m benchmarks.own_images IMAGES.npz``: from image files to an encoder, beside LightlyTrain.

IMAGES.npz holds `x_train`, `y_train`, `x_test` and `y_test` (uint8, [n, H, W, 3]). They are written as PNG files of
each case's size. Both sides then train the same network with SimCLR and batches of 64 on these files, without labels,
each with its own defaults for the rest: `fedssl run ... --encoder FOLDER` and `lightly_train.pretrain` in turn,
`--repeats` times with seeds 0, 1, ... Each command is a new process with `--threads` threads.

- seconds: from the start of the command to the encoder on the disk, all else included.
- images a second: of the training alone, as each side tells it.
- memory: the largest sum of the proportional set sizes of all processes, read once a second (Linux only).
- accuracy: of 20 nearest neighbours by cosine and of logistic regression on standardised features, on test images, from
  features which each side's own `embed` command writes. This takes no part in the seconds. It is the mean over the
  seeds with their sample standard deviation; the other figures are medians.

With `--minutes M` both sides take the same time in place of the same epochs. Ours is `fedssl pretrain --minutes M`
with its defaults but for the network. Theirs is SimCLR with LightlyTrain's defaults and as many epochs as M minutes
hold, by a command of two epochs that is timed before. Accuracy is then of all test images, by all training images.

bfloat16 is what both sides are asked for. LightlyTrain 0.18 says that it disables autocast on a processor, and computes
in float32 there.
"""

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from dataclasses import replace as replace_in
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.__main__ import positive
from benchmarks.measure import ROOT, Settings
from benchmarks.write import environment, replace, table
from fedssl.evaluation.metrics import format_values

FOLDER = ROOT / "benchmarks" / "results" / "own_images"
PEER = ROOT / "benchmarks" / "own_images_peer.py"
OURS, THEIRS = "fedssl", "LightlyTrain"
BATCH_SIZE, NEIGHBORS = 64, 20
LABELLED, TESTED = 1000, 500


@dataclass(frozen=True)
class Case:
    """What both sides train, and how many times as fast ours should be."""

    size: int
    architecture: str
    images: int
    epochs: int
    precision: str
    command_bar: float
    training_bar: float = 1.3
    minutes: float | None = None  # both sides take so long, whatever their epochs

    @property
    def name(self) -> str:
        how = self.precision if self.minutes is None else f"{self.minutes:g} minutes"  # where each chooses its own
        return f"{self.size} pixels, {self.architecture}, {how}"

    @property
    def peer_batch(self) -> int:
        return BATCH_SIZE if self.minutes is None else 128  # LightlyTrain's default


CASES = (
    Case(96, "resnet18", 2560, 1, "float32", 1.5),
    Case(96, "resnet18", 2560, 1, "bfloat16", 1.5),
    Case(224, "resnet18", 384, 1, "float32", 1.5),
    Case(224, "resnet18", 384, 1, "bfloat16", 1.5),
    Case(32, "small_convnet", 10_000, 20, "float32", 3.0),
)


def write_images(images: NDArray[np.uint8], size: int, folder: Path) -> None:
    """Write images [n, H, W, 3] as PNG files of `size` pixels a side, in their order."""
    from PIL import Image

    folder.mkdir(parents=True)
    for number, pixels in enumerate(images):
        resized = Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC)
        resized.save(folder / f"{number:05}.png")


def measured(command: Sequence[str], threads: int) -> tuple[float, int, str]:
    """Run a command; return its seconds, the peak of its memory in bytes, and its output."""
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    peak = 0
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
        try:
            while process.poll() is None:
                peak = max(peak, _memory_of_session(process.pid))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
            seconds = time.perf_counter() - started
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        output = log.read()
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)}\nended with {process.returncode}:\n{output[-2000:]}")
    return seconds, peak, output


def _memory_of_session(session: int) -> int:
    """Return the bytes that the processes of a session hold, each shared page counted once."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(folder.name)) == session:
                found = re.search(r"^Pss:\s+(\d+) kB", (folder / "smaps_rollup").read_text(), re.MULTILINE)
                total += int(found[1]) * 1024 if found else 0
        except OSError:
            continue  # it has ended
    return total


def own_command(case: Case, images: Path, folder: Path, seed: int) -> list[str]:
    """Return what a user types here, as arguments."""
    places = ["--output", f"{folder}/run", "--encoder", f"{folder}/encoder"]
    if case.minutes is not None:
        pretrain = [sys.executable, "-m", "fedssl", "pretrain", str(images), "--minutes", str(case.minutes), *places]
        return [*pretrain, f"data.image_size={case.size}", f"architectures=[{case.architecture}]", f"seed={seed}"]
    options = {
        "data.name": "images",
        "data.path": images,
        "data.image_size": case.size,
        "preset": "natural",
        "architectures": f"[{case.architecture}]",
        "rounds": 1,
        "training.local_epochs": case.epochs,
        "training.batch_size": BATCH_SIZE,
        "training.precision": case.precision,
        "seed": seed,
    }
    run = [sys.executable, "-m", "fedssl", "run", "centralised_simclr"]
    return [*run, *(f"{key}={value}" for key, value in options.items()), *places]


def peer_command(python: str, case: Case, images: Path, folder: Path, seed: int, step: str) -> list[str]:
    """Return the command of LightlyTrain's step `train` or `embed`, as arguments."""
    options = asdict(case) | {"step": step, "run": f"{folder}/run", "seed": seed, "batch_size": case.peer_batch}
    return [python, str(PEER), json.dumps(options | {"images": str(images), "output": f"{folder}/features.pt"})]


def with_epochs(python: str, case: Case, images: Path, folder: Path, seed: int, threads: int) -> Case:
    """Return the case with as many epochs of LightlyTrain as its minutes hold, by a command of two epochs."""
    # In a folder of its own: LightlyTrain refuses one that has files.
    command = peer_command(python, replace_in(case, epochs=2), images, folder / "timed", seed, "train")
    seconds, _, output = measured(command, threads)
    of_epoch = case.images / images_a_second(THEIRS, output, case.peer_batch)
    left = 60 * (case.minutes or 0) - (seconds - 2 * of_epoch)
    return replace_in(case, epochs=max(1, int(left / of_epoch)))


def images_a_second(side: str, output: str, batch: int = BATCH_SIZE) -> float:
    """Return the training's own figure: of our last round, or the median of LightlyTrain's epochs."""
    if side == OURS:
        return float(re.findall(r"([\d,]+) images/s", output)[-1].replace(",", ""))
    epochs = re.findall(r"(\d+)/\1 \[[^\]]*?([\d.]+)(it/s|s/it)", output)
    rates = [float(value) if unit == "it/s" else 1 / float(value) for _, value, unit in epochs]
    return statistics.median(rates) * batch


def features_of(side: str, python: str, case: Case, images: Path, folder: Path, threads: int) -> NDArray[Any]:
    """Return the features [n, d] that a side's own embed command gives images, in the order of their names."""
    if side == OURS:
        output = folder / "features.npz"
        command = [sys.executable, "-m", "fedssl", "embed", f"{folder}/encoder", str(images), "--output", str(output)]
        measured(command, threads)
        stored = np.load(output)
        names, features = stored["files"], stored["features"]
    else:
        import torch

        measured(peer_command(python, case, images, folder, 0, "embed"), threads)
        loaded = torch.load(folder / "features.pt", weights_only=True)
        names, features = np.array(loaded["filenames"]), loaded["embeddings"].numpy()
    return np.asarray(features[np.argsort(names)])


def accuracies(features: NDArray[Any], labels: NDArray[Any], tested: int) -> tuple[float, float]:
    """Return the percent of nearest neighbours and of logistic regression that are right on the last rows."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train, test = slice(None, -tested), slice(-tested, None)
    readers = (
        KNeighborsClassifier(NEIGHBORS, metric="cosine"),
        make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000)),
    )
    knn, linear = (
        100 * reader.fit(features[train], labels[train]).score(features[test], labels[test]) for reader in readers
    )
    return float(knn), float(linear)


def measure(arrays: dict[str, NDArray[Any]], cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    """Run all cases; SystemExit is raised where a command fails."""
    about = environment(Settings(threads=options.threads, repeats=options.repeats))
    rows = []
    for case in cases:
        runs: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
        with tempfile.TemporaryDirectory(prefix="own_images_") as name:
            work = Path(name)
            write_images(arrays["x_train"][: case.images], case.size, work / "images")
            labelled, tested = (LABELLED, TESTED) if case.minutes is None else (None, len(arrays["x_test"]))
            both = np.concatenate([arrays["x_train"][:labelled], arrays["x_test"][:tested]])
            labels = np.concatenate([arrays["y_train"][:labelled], arrays["y_test"][:tested]]).ravel()
            write_images(both, case.size, work / "labelled")
            for seed in range(options.repeats):
                for side in runs:
                    folder = work / f"{side}{seed}"
                    folder.mkdir()
                    if case.minutes is not None and side == THEIRS:
                        case = with_epochs(options.lightly_train, case, work / "images", folder, seed, options.threads)
                    command = (
                        own_command(case, work / "images", folder, seed)
                        if side == OURS
                        else peer_command(options.lightly_train, case, work / "images", folder, seed, "train")
                    )
                    seconds, memory, output = measured(command, options.threads)
                    features = features_of(
                        side, options.lightly_train, case, work / "labelled", folder, options.threads
                    )
                    knn, linear = accuracies(features, labels, tested)
                    rate = images_a_second(side, output, case.peer_batch)
                    figures = {"seconds": seconds, "rate": rate, "memory": memory, "knn": knn, "linear": linear}
                    print(case.name, side, figures, flush=True)
                    runs[side].append(figures)
        rows.append({"case": asdict(case), "name": case.name, "runs": runs})
    return {"environment": about, "rows": rows}


def page(result: dict[str, Any]) -> str:
    """Return what was measured, as Markdown."""
    lines, bars = [], []
    for row in result["rows"]:
        case = Case(**row["case"])
        medians = {
            side: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for side, runs in row["runs"].items()
        }
        for side, runs in row["runs"].items():
            middle = medians[side]
            spread = f"{min(run['seconds'] for run in runs):.1f} to {max(run['seconds'] for run in runs):.1f}"
            accuracy = (format_values(key, [run[key] for run in runs]) for key in ("knn", "linear"))
            seconds, memory = f"{middle['seconds']:.1f} ({spread})", f"{middle['memory'] / 2**20:.0f}"
            lines.append([case.name, side, seconds, f"{middle['rate']:,.0f}", memory, *accuracy])
        ours, theirs = medians[OURS], medians[THEIRS]
        command, training = theirs["seconds"] / ours["seconds"], ours["rate"] / theirs["rate"]
        verdicts = (
            f"{value:.2f} (bar {bar}: {'met' if value >= bar else 'missed'})"
            for value, bar in ((command, case.command_bar), (training, case.training_bar))
        )
        of_seeds = ([[run[key] for run in row["runs"][side]] for side in (OURS, THEIRS)] for key in ("knn", "linear"))
        gains = (f"{statistics.fmean(ours) - statistics.fmean(theirs):+.1f}" for ours, theirs in of_seeds)
        bars.append([case.name, f"{case.images:,} x {case.epochs}", *verdicts, *gains])
    head = ["case", "side", "seconds (median; range)", "images a second", "memory (MiB)", "kNN (%)", "linear (%)"]
    times = ["case", "images x epochs", "command, times as fast", "training, times as fast", "kNN", "linear"]
    parts = [
        "# From own images to an encoder, beside LightlyTrain",
        "Written by `python -m benchmarks.own_images`; its first lines say what is measured.",
        ", ".join(f"{name}: {value}" for name, value in result["environment"].items() if name != "fedkernels"),
        table(times, bars),
        table(head, lines),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own_images", description=__doc__.split("\n")[0])
    parser.add_argument("images", type=Path, metavar="IMAGES.npz")
    parser.add_argument(
        "--lightly-train", default=sys.executable, metavar="PYTHON", help="the Python that has lightly_train"
    )
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    parser.add_argument("--threads", type=positive, default=2, metavar="N")
    parser.add_argument("--sizes", type=int, nargs="+", help="cases of these sizes alone")
    parser.add_argument("--minutes", type=float, help="the same time for both sides, in place of the same epochs")
    parser.add_argument("--network", default="small_convnet_512", help="with --minutes: what both sides train")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of README.md and results.json")
    options = parser.parse_args(arguments)
    if (options.sizes or options.minutes) and options.output == FOLDER:
        parser.error("--sizes and --minutes measure other cases than the committed table has: give --output FOLDER")
    with np.load(options.images) as stored:
        arrays = {key: stored[key] for key in ("x_train", "y_train", "x_test", "y_test")}
    cases = [case for case in CASES if not options.sizes or case.size in options.sizes]
    if options.minutes is not None:
        sizes, images = options.sizes or [32], len(arrays["x_train"])
        cases = [Case(size, options.network, images, 0, "float32", 1.0, 1.0, options.minutes) for size in sizes]
    result = measure(arrays, cases, options)
    options.output.mkdir(parents=True, exist_ok=True)
    replace(options.output / "results.json", json.dumps(result, indent=1) + "\n")
    replace(options.output / "README.md", page(result))
    print(page(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
