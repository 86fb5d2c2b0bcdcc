"""A copy of the sources, in which faults are planted and compiled; the working tree stays as it is."""

import filecmp
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "mutants"
COPIED = (
    *("benchmarks", "csrc", "docs", "examples", "fedkernels", "fedssl", "tests", "website"),
    *("setup.py", "pyproject.toml", "README.md", "LICENSE"),
)
# One instruction set is compiled, which takes a third of the time, and no nvcc runs: CUDA's tests compile for the CPU.
BUILD = {"FEDKERNELS_CUDA": "0", "FEDKERNELS_CPU_INSTRUCTION_SETS": "baseline"}


def copy_where_different(source: str, target: str) -> str:
    """A file that is copied gets the time of now: so one that a killed run left with a fault is compiled again."""
    if not (Path(target).exists() and filecmp.cmp(source, target, shallow=False)):
        shutil.copyfile(source, target)
    return target


def copy_sources(compiled: bool = False) -> None:
    """Copy what differs, take away what is gone; `compiled` also copies the compiled module, else `build` makes it."""
    ignored = shutil.ignore_patterns("__pycache__", "_C.missing", *([] if compiled else ["*.so"]))
    for name in COPIED:
        if (ROOT / name).is_dir():
            for path in list((COPY / name).rglob("*")):
                if path.is_file() and path.suffix != ".so" and not (ROOT / path.relative_to(COPY)).exists():
                    path.unlink()
            shutil.copytree(
                ROOT / name, COPY / name, copy_function=copy_where_different, ignore=ignored, dirs_exist_ok=True
            )
        else:
            copy_where_different(str(ROOT / name), str(COPY / name))


def run(*command: str, limit: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the copy for at most `limit` seconds. Raises subprocess.TimeoutExpired."""
    environment = os.environ | {"PYTHONPATH": str(COPY), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [sys.executable, *command], cwd=COPY, env=environment, capture_output=True, text=True, timeout=limit
    )


def build(limit: float) -> str | None:
    """Compiles the copy's module. Returns None, or the end of the compiler's output where that failed."""
    done = run("setup.py", "build_ext", "--inplace", limit=limit, **BUILD)
    compiled = (COPY / "fedkernels" / "_C.abi3.so").exists() and not (COPY / "fedkernels" / "_C.missing").exists()
    return None if done.returncode == 0 and compiled else done.stdout[-2000:] + done.stderr[-2000:]


def found_by(file: str, changed: str, asked: list[list[str]], limit: float, compiled: bool = False) -> str:
    """Which test finds that the copy's file has the changed text, of those that are asked in turn; or "survived"."""
    path = COPY / file
    text = path.read_text(encoding="utf-8")
    path.write_text(changed, encoding="utf-8")
    try:
        if compiled and (error := build(limit)):
            raise SystemExit(f"{file} does not compile:\n{error}")
        for tests in asked:
            done = run("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not nightly", *tests, limit=limit)
            if "ImportError while loading conftest" in done.stderr:
                return "conftest.py, which cannot be imported any more"
            if done.returncode == 4:
                raise SystemExit(f"pytest could not run {' '.join(tests)}:\n{done.stderr}")
            if done.returncode not in (0, 5):  # 5: all are left out
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                return failed[1].removeprefix("tests/") if failed else "the tests end early"
    except subprocess.TimeoutExpired:
        return f"the time limit of {limit} seconds"
    finally:
        path.write_text(text, encoding="utf-8")
    return "survived"
