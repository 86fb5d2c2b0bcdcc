"""``python -m benchmarks.image_files FOLDER``: training on image files that are larger than the memory, and speed.

FOLDER gets the files, made up from noise: by default 20,000 JPEGs of 224 x 224 pixels in two class folders. What is
there already is used again.

- memory: FedBYOL without labels on all of them, in a process of its own whose address space may grow by --limit GB
  above what it is after all imports. Four clients train a small vision transformer for one epoch, since a network of
  the size that such images want would take hours on a processor. The command fails where the limit does not hold.
- speed: images per second as batches of 128 in a random order, uint8 [128, 3, 224, 224]. Torchvision's `ImageFolder`
  and `DataLoader` decode every file in every epoch, by as many workers as --workers says; ours reads the rows of the
  decoded file. All passes are timed in turn, once a repeat; the files are in the operating system's cache. `first pass`
  is what decoding once takes, with as many threads as the machine has processors. Both sides' images are compared
  first.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import ROOT, Settings
from benchmarks.write import environment
from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions
from fedssl.data.stored_images import StoredImages
from fedssl.engines import in_process
from fedssl.recipe.reading import load_recipe

FOLDER = ROOT / "benchmarks" / "results" / "image_files"
BATCH = 128
OURS, TORCHVISION = "rows of the decoded file", "torchvision ImageFolder and DataLoader"


def make_files(folder: Path, count: int, size: int) -> None:
    """Write JPEGs of smooth noise, which compress about as photographs do; those that are there stay."""
    from PIL import Image

    for number in range(count):
        path = folder / f"class{number % 2}" / f"{number:06}.jpg"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = np.random.default_rng(number).integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(path, quality=90)


def data_options(folder: Path, size: int, limit: float) -> DataOptions:
    """All files as one dataset without labels, decoded into a file."""
    return DataOptions(name="images", path=folder, image_size=size, memory_limit=limit)


def train_within(folder: Path, size: int, limit: float) -> dict[str, Any]:
    """A short run under a limit on the address space, in GB above what the imports take. For a process of its own."""
    import sklearn.neighbors  # noqa: F401 (imported now, and not within the limit)
    import timm  # noqa: F401

    imported = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (imported + int(limit * 1e9), resource.RLIM_INFINITY))
    recipe = load_recipe(
        "fedbyol",
        [
            f"data={{name: images, path: {json.dumps(str(folder))}, image_size: {size}, memory_limit: 0}}",
            "partition={name: iid, clients: 4}",
            "architectures=[small_vit]",
            "augmentation.blur=0",
            "rounds=1",
            "device=cpu",
            "training.local_epochs=1",
            "training.batch_size=64",
        ],
    )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as output:
        directory = in_process.run(recipe, Path(output) / "run")
        rows = [row for row in directory.read_metrics() if row[2] in ("loss", "effective_rank")]
    return {
        "imports": imported,
        "limit": limit * 1e9,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": time.perf_counter() - start,
        "metrics": rows,
    }


def speeds(folder: Path, size: int, workers: int, repeats: int) -> dict[str, Any]:
    """Images per second of both sides, and the seconds of the first pass."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        start = time.perf_counter()
        images = load_dataset(data_options(folder, size, 0), 0).train_images
        first = time.perf_counter() - start
        assert isinstance(images, StoredImages)
        _require_equal(images, folder, size)
        passes: dict[str, Callable[[], int]] = {
            OURS: lambda: _pass_of_ours(images),
            TORCHVISION: lambda: _pass_of_torchvision(folder, size, workers),
        }
        rates: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(repeats):
            for name, whole_pass in passes.items():
                start = time.perf_counter()
                count = whole_pass()
                rates[name].append(count / (time.perf_counter() - start))
        return {"count": len(images), "first_pass": first, "rates": rates}


def _pass_of_ours(images: StoredImages) -> int:
    count = 0
    for rows in torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).split(BATCH):
        count += len(images[rows])
    return count


def _torchvision_images(folder: Path, size: int) -> Any:
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [transforms.Resize(size), transforms.CenterCrop(size), transforms.PILToTensor()]
    return ImageFolder(str(folder), transforms.Compose(steps))


def _pass_of_torchvision(folder: Path, size: int, workers: int) -> int:
    from torch.utils.data import DataLoader

    count = 0
    loader: Any = DataLoader(_torchvision_images(folder, size), BATCH, shuffle=True, num_workers=workers)
    for images, _ in loader:
        count += len(images)
    return count


def _require_equal(images: StoredImages, folder: Path, size: int) -> None:
    """Both sides' order is that of the folders and names."""
    theirs = _torchvision_images(folder, size)
    for row in range(0, len(images), max(1, len(images) // 20)):
        expected: Tensor = theirs[row][0]
        if not images[row].equal(expected):
            raise SystemExit(f"image {row} differs from torchvision's")


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def tables(result: dict[str, Any]) -> str:
    """What was measured, as Markdown."""
    memory, speed = result["memory"], result["speed"]
    ours, theirs = (statistics.median(speed["rates"][name]) for name in (OURS, TORCHVISION))
    lines = [
        "# Training on image files that do not fit into the memory",
        "",
        "Written by `python -m benchmarks.image_files FOLDER`; its first lines say what is measured.",
        "",
        f"{speed['count']:,} JPEGs of {result['size']} x {result['size']} pixels, {result['workers']} workers. "
        + ", ".join(f"{k}: {v}" for k, v in result["environment"].items()),
        "",
        "| memory | GB |",
        "| --- | ---: |",
        f"| the decoded images | {speed['count'] * 3 * result['size'] ** 2 / 1e9:.2f} |",
        f"| address space after the imports | {memory['imports'] / 1e9:.2f} |",
        f"| address space allowed above that; the run ended in it | {memory['limit'] / 1e9:.2f} |",
        f"| resident at the peak, imports included | {memory['peak'] / 1e9:.2f} |",
        "",
        "| batches of 128 | images per second (median; least to most) |",
        "| --- | ---: |",
    ]
    for name, rates in speed["rates"].items():
        lines.append(f"| {name} | {statistics.median(rates):,.0f}; {min(rates):,.0f} to {max(rates):,.0f} |")
    lines += [
        f"| first pass: decoding and writing the file | {speed['count'] / speed['first_pass']:,.0f} |",
        "",
        f"Rows of the decoded file against torchvision: {ours / theirs:.1f} times as fast. The decoding is paid for "
        f"after {speed['first_pass'] / max(1e-9, speed['count'] / theirs - speed['count'] / ours):.1f} epochs.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_files", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the made-up files are")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--limit", type=float, default=2.0, help="GB of address space above the imports'")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    folder = options.folder / f"{options.images}_of_{options.size}"
    if options.train:
        torch.set_num_threads(1)
        print(json.dumps(train_within(folder, options.size, options.limit)))
        return 0
    make_files(folder, options.images, options.size)
    command = [sys.executable, "-m", "benchmarks.image_files", str(options.folder), "--train"]
    command += ["--images", str(options.images), "--size", str(options.size), "--limit", str(options.limit)]
    with tempfile.TemporaryDirectory(dir=options.folder) as cache:
        run = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": cache}, stdout=subprocess.PIPE, text=True
        )
    if run.returncode:
        raise SystemExit("the run within the limit failed: what it said stands above")
    result = {
        "environment": environment(Settings(threads=1, repeats=options.repeats)),
        "size": options.size,
        "workers": options.workers,
        "memory": json.loads(run.stdout.splitlines()[-1]),
        "speed": speeds(folder, options.size, options.workers, options.repeats),
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "results.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (options.output / "results.md").write_text(tables(result), encoding="utf-8")
    print(tables(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
