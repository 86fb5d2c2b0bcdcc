"""Plants the faults of faults.py one at a time and tells which test finds each.

    python -m tests.mutants                 # all without a result in results.json; a second call goes on from there
    python -m tests.mutants NAME...         # these, whether or not they have a result
    python -m tests.mutants --table         # only print the table of the results so far

The sources are copied to build/mutants/, where faults are planted and compiled; the working tree stays as it is.
"""

import argparse
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.mutants.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "build" / "mutants"
RESULTS = ROOT / "tests" / "mutants" / "results.json"
COPIED = ("benchmarks", "csrc", "docs", "examples", "fedkernels", "fedssl", "tests", "setup.py", "pyproject.toml")
COPIED_FOR_SETUP = ("README.md", "LICENSE")
# One instruction set is compiled, which takes a third of the time, and no nvcc runs: CUDA's tests compile for the CPU.
BUILD = {"FEDKERNELS_CUDA": "0", "FEDKERNELS_CPU_INSTRUCTION_SETS": "baseline"}
TIME_LIMIT = 900  # seconds for the tests of a fault: a fault may make a solver endless, and then it is found


def key_of(fault: Fault) -> str:
    """Changes with the fault, its tests and the file that it is planted in."""
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    measured = [str(value) for name, value in fault._asdict().items() if name != "survives"]
    return hashlib.sha256("\0".join([*measured, text]).encode()).hexdigest()


def load_results() -> dict[str, str]:
    """By key_of(fault)."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return dict(kept.values())


def save_results(results: dict[str, str]) -> None:
    """What still holds, in the order of the faults: a fault, its key and its outcome."""
    kept = {fault.name: (key, results[key]) for fault in FAULTS if (key := key_of(fault)) in results}
    written = RESULTS.with_suffix(".new")
    written.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    written.replace(RESULTS)


def copy_where_different(source: str, target: str) -> str:
    """A file that is copied gets the time of now: so one that a killed run left with a fault is compiled again."""
    if not (Path(target).exists() and filecmp.cmp(source, target, shallow=False)):
        shutil.copyfile(source, target)
    return target


def copy_sources() -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "_C.missing")
    for name in (*COPIED, *COPIED_FOR_SETUP):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, COPY / name, copy_function=copy_where_different, ignore=ignored, dirs_exist_ok=True
            )
        else:
            copy_where_different(str(ROOT / name), str(COPY / name))


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the copy. Raises subprocess.TimeoutExpired."""
    environment = os.environ | {"PYTHONPATH": str(COPY), "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [sys.executable, *command], cwd=COPY, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT
    )


def build() -> str | None:
    """Compiles the copy's module. Returns None, or the end of the compiler's output where that failed."""
    done = run("setup.py", "build_ext", "--inplace", **BUILD)
    compiled = (COPY / "fedkernels" / "_C.abi3.so").exists() and not (COPY / "fedkernels" / "_C.missing").exists()
    return None if done.returncode == 0 and compiled else done.stdout[-2000:] + done.stderr[-2000:]


def measure(fault: Fault) -> str:
    """The test that finds the fault, or "survived"."""
    path = COPY / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        if fault.needs_build and (error := build()):
            raise SystemExit(f"{fault.name} does not compile:\n{error}")
        done = run("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests)
    except subprocess.TimeoutExpired:
        return f"the time limit of {TIME_LIMIT} seconds"
    finally:
        path.write_text(text, encoding="utf-8")
    if done.returncode == 0 and " passed" in done.stdout:
        return "survived"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return failed[1].replace("tests/", "", 1)
    if done.returncode < 0:
        return f"a crash of pytest {' '.join(fault.tests)}"
    raise SystemExit(f"pytest could not run the tests of {fault.name}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def table(results: dict[str, str]) -> str:
    """In Markdown, with a line for each fault."""
    lines = ["| fault | file | kind | found by |", "|---|---|---|---|"]
    for fault in FAULTS:
        outcome = results.get(key_of(fault), "not run")
        if outcome == "survived":
            outcome = f"**survived**: {fault.survives or 'without a known reason'}"
        elif outcome != "not run":
            outcome = f"`{outcome}`"
        lines.append(f"| {fault.name} | `{fault.file}` | {fault.kind} | {outcome} |".replace("||", "\\|\\|"))
    outcomes = [results[key] for fault in FAULTS if (key := key_of(fault)) in results]
    survived = outcomes.count("survived")
    missing = len(FAULTS) - len(outcomes)
    summary = f"{len(FAULTS)} faults: {len(outcomes) - survived} found, {survived} survived, {missing} not run."
    return "\n".join([summary, "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description="Plants faults one at a time and tells which test finds each.")
    parser.add_argument("names", nargs="*", help="faults to plant again (default: all that have no result yet)")
    parser.add_argument("--table", action="store_true", help="only print the results so far")
    parser.add_argument("--only", default="", help="only faults of files whose path starts like this, as in csrc/cpu")
    given = parser.parse_args()
    unknown = set(given.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"unknown faults {sorted(unknown)}; tests/mutants/faults.py lists them")
    results = load_results()
    chosen = [
        fault
        for fault in FAULTS
        if fault.file.startswith(given.only)
        and (fault.name in given.names if given.names else key_of(fault) not in results)
    ]
    if not given.table and chosen:
        COPY.mkdir(parents=True, exist_ok=True)
        copy_sources()
        if error := build():
            raise SystemExit(f"the sources do not compile:\n{error}")
        built = True
        for fault in chosen:
            if not built and not fault.needs_build and (error := build()):
                raise SystemExit(f"the sources do not compile:\n{error}")
            outcome = measure(fault)
            built = not fault.needs_build  # the module still holds a fault of csrc/cpu or csrc/ops
            results[key_of(fault)] = outcome
            save_results(results)
            print(f"{fault.name}: {outcome}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
