"""Digests of what the command line writes and prints, so that a change which moves code can show that nothing changed.

    python -m tests.goldens before.json
    python -m tests.goldens after.json --against before.json

runs every shipped recipe on a few digits, kills and resumes one, uses worker processes, Flower, a table, an
export, features, an evaluation, a report, a Flower app and a consortium's folders, and digests each file, `show` of all
recipes, every `--help` and the signature of every public name. Digests hold for one machine and one set of libraries.
Times, ports, keys and process numbers are left out. The second command exits with 1 and names what differs.
"""

import argparse
import hashlib
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from typer.main import get_command

from fedssl.cli import app
from tests.fedssl.cli.test_texts import commands
from tests.fedssl.test_shipped_recipes import SMALL, settings

PROGRAM = [sys.executable, "-m", "fedssl"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "SOURCE_DATE_EPOCH": "0"}
TABLE = {
    "name": "small",
    "description": "Two methods: of this file.",
    "seeds": [0, 1],
    "metrics": ["knn", "linear", "effective_rank"],
    "method": "aligned",
    "baselines": ["alone"],
    "settings": {"preset": "digits"},
    "rows": [{"label": "aligned", "recipe": "hetero_ssfl"}, {"label": "alone", "recipe": "local_only"}],
}
#: images of the file that an encoder embeds
SIZES = {"train": 20, "test": 9}
CONSORTIUM = {"name": "ours", "server": {"address": "localhost", "port": 8000}, "sites": ["hospital-a", "hospital-b"]}


def command(*arguments: str, folder: Path, expected: int = 0) -> str:
    """Run `fedssl ARGUMENTS` in `folder` and return what it printed."""
    done = subprocess.run(
        [*PROGRAM, *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode != expected:
        raise SystemExit(f"fedssl {' '.join(arguments)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def kill_and_resume(folder: Path) -> None:
    run = [*PROGRAM, "run", "fedema", *settings("fedema", "rounds=12"), "--output", "killed"]
    process = subprocess.Popen(run, cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    manifest = folder / "killed" / "checkpoints" / "manifest.json"
    while process.poll() is None and not (manifest.is_file() and json.loads(manifest.read_text())["round"] >= 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    command("run", "--resume", "killed", folder=folder)


def evaluated_and_exported(folder: Path) -> None:
    command("run", "fedsimclr", *settings("fedsimclr"), "--output", "finished", folder=folder)
    command("evaluate", "finished", "--semi-supervised", "0.5", "--fine-tune", "train", folder=folder)
    command("export", "finished", "encoder", folder=folder)
    random = np.random.default_rng(0)
    images = {f"x_{part}": random.integers(0, 256, (size, 8, 8), np.uint8) for part, size in SIZES.items()}
    np.savez(folder / "images.npz", **images, **{f"y_{part}": np.arange(size) % 2 for part, size in SIZES.items()})
    command("embed", "encoder", "images.npz", "--output", "features.npz", folder=folder)
    command("evaluate", "encoder", "--data", "name=npz,path=images.npz", folder=folder)
    command("report", "finished", folder=folder)


def work(folder: Path, processes: int) -> None:
    """Run everything that leaves files in `folder`."""

    def run_of(name: str, output: str, *more: str) -> str:
        return command("run", name, *settings(name, *more), "--output", output, folder=folder)

    names = [f.stem for f in sorted((Path(__file__).parent.parent / "fedssl" / "recipes").glob("*.yaml"))]
    (folder / "table.yaml").write_text(yaml.safe_dump(TABLE))
    (folder / "consortium.yaml").write_text(yaml.safe_dump(CONSORTIUM))
    jobs: list[Any] = [
        lambda: run_of("fedu2", "on-ray", "engine=flower-simulation"),
        lambda: kill_and_resume(folder),
        lambda: evaluated_and_exported(folder),
        lambda: command("run-table", "table.yaml", *SMALL, "partition={name: iid, clients: 2}", folder=folder),
        lambda: run_of("fedu", "two-workers", "clients_parallel=2"),
        lambda: command("app", "fedbyol", "app", *SMALL, "partition={name: iid, clients: 2}", folder=folder),
        lambda: command("provision", "consortium.yaml", folder=folder),
    ]
    jobs += [partial(run_of, name, f"runs/{name}") for name in names]
    with ThreadPoolExecutor(processes) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
    printed = folder / "printed"
    printed.mkdir()
    for name in names:
        (printed / f"show {name}").write_text(command("show", name, folder=folder))
        (printed / f"show --yaml {name}").write_text(command("show", name, "--yaml", folder=folder))
    listed = ["recipes"], ["presets"], ["tables"]
    for others in (*listed, ["partition", "fedbyol", *settings("fedbyol")], ["cost", "fedu2", *settings("fedu2")]):
        (printed / " ".join(others)[:60].replace("/", "|")).write_text(command(*others, folder=folder))
    for name in commands(get_command(app)):
        path = name.split()[1:]
        (printed / f"--help {' '.join(path)}").write_text(command(*path, "--help", folder=folder))


def content(path: Path, folder: Path) -> bytes:
    """Read a file without what differs from one run to the next."""
    if path.name.startswith("events.out.tfevents"):
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        events = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
        return repr([(e.step, [(v.tag, v.tensor) for v in e.summary.value]) for e in events]).encode()
    data = path.read_bytes()
    if path.suffix in {".safetensors", ".npz", ".png", ".onnx"}:
        return data
    if path.suffix in {".key", ".crt", ".pub"}:
        return b""
    text = re.sub(
        r"SHA256:[\w+/]+|\b([0-9A-F]{2}:){5,}[0-9A-F]{2}\b", "FINGERPRINT", data.decode().replace(str(folder), "FOLDER")
    )
    if path.name == "timings.csv":
        return text.splitlines()[0].encode()
    if path.suffix == ".html":
        text = re.sub(r"\d{4}-\d\d-\d\d(T| )\d\d:\d\d(:\d\d)?|<td>[\d.]+ (s|min|h)</td>", "TIME", text)
    return text.encode()


def shape(path: Path) -> str:
    """Return a file's name, without a process number or a time in it."""
    return re.sub(r"tfevents\..*", "tfevents", str(path))


def public_names() -> dict[str, str]:
    found = {}
    for module in ("fedssl", "fedkernels", "fedkernels.nn", "fedkernels.reference", "fedkernels.distributed"):
        loaded = importlib.import_module(module)
        for name in getattr(loaded, "__all__", []):
            value = getattr(loaded, name)
            try:
                found[f"{module}.{name}"] = str(inspect.signature(value))
            except (TypeError, ValueError):  # a module, or a class of C's
                found[f"{module}.{name}"] = type(value).__name__
    return found


def digests(folder: Path) -> dict[str, str]:
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != "table.yaml"]
    found = {shape(f.relative_to(folder)): hashlib.sha256(content(f, folder)).hexdigest() for f in files}
    return found | public_names()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier output")
    parser.add_argument("--keep", type=Path, help="folder for the files, which stay there")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        work(folder, options.jobs)
        found = digests(folder)
    options.output.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} digests in {options.output}")
    if options.against:
        before = json.loads(options.against.read_text())
        differing = [name for name in before if name in found and found[name] != before[name]]
        missing, added = [n for n in before if n not in found], [n for n in found if n not in before]
        for title, names in (("differs", differing), ("is missing", missing), ("is new", added)):
            for name in names:
                print(f"{name} {title}")
        print(f"{len(before) - len(differing) - len(missing)} of {len(before)} equal")
        if differing or missing:
            sys.exit(1)


if __name__ == "__main__":
    main()
