"""What needs an NVIDIA GPU, in calls of under ten minutes, on a machine that has torch with CUDA and no network.

    benchmarks/on_gpu.sh pack [CIFAR10.npz]   # here: what that machine lacks, into build/gpu (sm_90, Python 3.12)
    benchmarks/on_gpu.sh tests                # there: the self-test, then the operators' tests
    benchmarks/on_gpu.sh sanitizer            # compute-sanitizer on the small cases of test_cuda.py
    benchmarks/on_gpu.sh operators [NAME ...] # the operators, or some of them, beside their peers
    benchmarks/on_gpu.sh simulation           # whole runs by phase, and beside peers
    benchmarks/on_gpu.sh training             # FedBYOL and FedU2 on the packed images, ten rounds each

A stage needs no other one. It writes STAGE.txt (what was printed), STAGE.json (each step's outcome) and at most two
files of results into the folder OUT (default: benchmarks/results/gpu). REHEARSE=1 runs it on the CPU, with tiny sizes.
Without build/gpu the module is compiled in place, for the card that is there. Exit code: 0 where all steps passed, 1
where one did not, 2 where the stage cannot begin.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
PACK = ROOT / "build" / "gpu"
LARGEST = 64 << 20  # bytes of the tracked files and the pack
SECONDS = 540  # of a stage
# What an image with torch, scipy, timm and pytest lacks, with what it requires; then those that need nothing more.
WITH_REQUIREMENTS = ("pydantic>=2.10", "tensorboard>=2.18")
POT_AND_PEERS = ("POT==0.9.5", "quadprog", "kornia", "kornia_rs", "open_clip_torch", "ftfy", "wcwidth", "torch_cka")
PLATFORMS = tuple(f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 17))
CHECK = """
import importlib.util, json, platform, sys, torch
names = {"ot": "POT", "sklearn": "scikit-learn", "yaml": "pyyaml"}
wanted = "hypothesis numpy ot pydantic pytest quadprog rich safetensors scipy sklearn"
wanted = f"{wanted} tensorboard timm typer yaml".split()
missing = [names.get(name, name) for name in wanted if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"missing: {', '.join(missing)}; call `benchmarks/on_gpu.sh pack` elsewhere and bring build/gpu")
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("torch finds no CUDA device; REHEARSE=1 runs the stage on the CPU")
from fedkernels.internal import native, self_test_outcomes
unusable = native.module.cuda_unusable(0) if native.CUDA and sys.argv[1] == "cuda" else ""
if unusable or not native.CUDA:
    sys.exit(f"the module has no CUDA kernels for this card: {unusable or native.build_info()}")
card = self_test_outcomes.card_of(0)._asdict() if sys.argv[1] == "cuda" else {"name": "none: a rehearsal on the CPU"}
versions = {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "python": platform.python_version()}
print(json.dumps({**card, **versions, "build": native.build_info()}))
"""


def pack(data: str | None) -> int:
    """Fills build/gpu with the module for sm_90, wheels for Python 3.12 and the data, and tells its size."""
    shutil.rmtree(PACK, ignore_errors=True)
    PACK.mkdir(parents=True)
    environment = {**os.environ, "FEDKERNELS_CUDA": "1", "FEDKERNELS_CUDA_ARCHITECTURES": "90"}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(PACK)]
    subprocess.run(build, cwd=ROOT, env=environment, check=True)
    for names in (WITH_REQUIREMENTS, ("--no-deps", *POT_AND_PEERS, "pytorch-metric-learning")):
        target = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *PLATFORMS]
        download = [sys.executable, "-m", "pip", "download", "-q", *target, "-d", str(PACK / "wheels"), *names]
        subprocess.run(download, check=True)
    if data is not None:
        shutil.copy(data, PACK / "cifar10.npz")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    packed = sum(path.stat().st_size for path in PACK.rglob("*") if path.is_file())
    total = packed + sum((ROOT / name).stat().st_size for name in tracked.split("\0") if name)
    print(f"build/gpu: {packed / 2**20:.1f} MiB; with all tracked files {total / 2**20:.1f} of {LARGEST >> 20} MiB")
    return int(total > LARGEST)


def steps(stage: str, names: list[str], device: str, folder: Path, temporary: Path) -> dict[str, list[str]]:
    """By name the commands of a stage; `names` are operators."""
    python, rehearse = sys.executable, device == "cpu"
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    pytest += ["--timeout", "60"] if importlib.util.find_spec("pytest_timeout") else []
    workers = ["-n", "6"] if importlib.util.find_spec("xdist") else []
    if stage == "tests":
        both = ["tests/fedkernels", "tests/fedssl/data/test_batches.py"]
        selection = ["tests/fedkernels/test_cuda.py"] if rehearse else ["-m", "gpu", *both]
        return {"self-test": [python, "-m", "fedkernels.self_test"], "tests": [*pytest, *workers, *selection]}
    if stage == "sanitizer":
        cases = [*pytest, "tests/fedkernels/test_cuda.py", "-k", "small_case"]
        options = ["--kernel-name", "kernel_substring=fedkernels", "--report-api-errors", "no", "--error-exitcode", "9"]
        # Without torch's cache each tensor is an allocation of its own, and what lies beyond it is out of bounds.
        command = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer", *options, "--tool"]
        return {tool: [*command, tool, *cases] for tool in ("memcheck", "racecheck", "synccheck")}
    output = ["--output", str(folder), "--seconds", str(SECONDS - 60)]
    if stage == "operators":
        return {stage: [python, "-m", "benchmarks", *names, "--device", "cuda", *["--rehearse"] * rehearse, *output]}
    if stage == "simulation":
        return {stage: [python, "-m", "benchmarks.simulation", "--device", device, *["--quick"] * rehearse, *output]}
    settings = ["preset=paper:fedu2", "data.name=npz", f"data.path={PACK / 'cifar10.npz'}", f"device={device}"]
    if rehearse:
        settings += ["rounds=1", "training.local_epochs=1", "training.batch_size=8", "architectures=[small_convnet]"]
        settings += ["data.train_limit=500", "data.test_limit=100", "partition.min_samples=8"]
    else:
        settings += ["rounds=10"]
    return {
        recipe: [python, "-m", "fedssl", "run", recipe, *settings, "--output", str(temporary / recipe)]
        for recipe in ("fedbyol", "fedu2")
    }


def run(stage: str, names: list[str], device: str, folder: Path, temporary: Path) -> int:
    """Runs the steps of a stage one after the other, whatever becomes of them. -> the exit code"""
    start, environment = time.monotonic(), prepare(device, temporary)
    checked = subprocess.run([sys.executable, "-c", CHECK, device], env=environment, capture_output=True, text=True)
    if checked.returncode:
        print(f"on_gpu.sh {stage}: {(checked.stderr.strip().splitlines() or ['no reason'])[-1]}", file=sys.stderr)
        return 2
    # The self-test is a step of `tests`. All else is of the kernels, not of references, and no tool watches that test.
    environment["FEDKERNELS_SELF_TEST"] = "0"
    commands = steps(stage, names, device, folder, temporary)
    outcomes = []
    with (folder / f"{stage}.txt").open("w", encoding="utf-8") as printed:
        for index, (name, command) in enumerate(commands.items()):
            limit = round((SECONDS - (time.monotonic() - start)) / (len(commands) - index))
            print(f"\n==== {name}: {' '.join(command)}", file=printed, flush=True)
            began = time.monotonic()
            outcome = outcome_of(command, limit, environment, printed)
            outcomes.append({"step": name, "outcome": outcome, "seconds": f"{time.monotonic() - began:.1f}"})
            print(f"{name}: {outcome}", flush=True)
            if (temporary / name / "metrics.csv").exists():
                shutil.copy(temporary / name / "metrics.csv", folder / f"{name}.csv")
    report = {"stage": stage, "environment": json.loads(checked.stdout.splitlines()[-1]), "steps": outcomes}
    (folder / f"{stage}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(any(one["outcome"].startswith("failed") for one in outcomes))


def prepare(device: str, temporary: Path) -> dict[str, str]:
    """Unpacks what was packed, or compiles the module where nothing was. -> the environment of all commands"""
    site = temporary / "site"
    for wheel in sorted((PACK / "wheels").glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(site)
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), str(site)]  # what is there goes first
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2"}
    environment["PATH"] += f"{os.pathsep}/usr/local/cuda/bin"
    if device == "cuda":
        environment["FEDKERNELS_GPU"] = "1"  # a test that finds no GPU fails and is not skipped
    for module in (PACK / "fedkernels").glob("_C*"):
        shutil.copy(module, ROOT / "fedkernels")
    if not PACK.exists():
        environment.setdefault("FEDKERNELS_CUDA_ARCHITECTURES", "native")
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, env=environment)
    return environment


def outcome_of(command: list[str], limit: int, environment: dict[str, str], printed: IO[str]) -> str:
    """Runs a command for so many seconds at most. -> "passed", or why not"""
    if "compute-sanitizer" in command and shutil.which("compute-sanitizer", path=environment["PATH"]) is None:
        return "skipped: no compute-sanitizer"
    limited = ["timeout", "-k", "5", str(max(limit, 1)), *command]
    code = subprocess.run(limited, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT).returncode
    if code in (124, 137):
        return f"failed: not ready after {limit} s"
    return f"failed: exit code {code}" if code else "passed"


def main() -> int:
    stages = ("tests", "sanitizer", "operators", "simulation", "training")
    stage, *more = sys.argv[1:] or [""]
    if stage == "pack" and len(more) < 2:
        return pack(more[0] if more else None)
    if stage not in stages or (more and stage != "operators"):
        print(f"on_gpu.sh: expected pack [CIFAR10.npz], operators [NAME ...], {', '.join(stages)}", file=sys.stderr)
        return 2
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results" / "gpu").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        device = "cpu" if os.environ.get("REHEARSE") == "1" else "cuda"
        return run(stage, more, device, folder, Path(temporary))


if __name__ == "__main__":
    sys.exit(main())
