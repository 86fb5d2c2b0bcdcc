"""Plants the faults of faults.py one at a time and tells which test finds each.

    python -m tests.mutants                 # all without a result in results.json; a second call goes on from there
    python -m tests.mutants NAME...         # these, whether or not they have a result
    python -m tests.mutants --table         # only print the table of the results so far

The sources are copied to build/mutants/, where faults are planted and compiled; the working tree stays as it is.
"""

import argparse
import hashlib
import json
import re
import subprocess
from pathlib import Path

from tests.mutants.copied_tree import COPY, ROOT, build, copy_sources, run
from tests.mutants.faults import FAULTS, Fault

RESULTS = Path(__file__).with_name("results.json")
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


def measure(fault: Fault) -> str:
    """The test that finds the fault, or "survived"."""
    path = COPY / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        if fault.needs_build and (error := build(TIME_LIMIT)):
            raise SystemExit(f"{fault.name} does not compile:\n{error}")
        done = run("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *fault.tests, limit=TIME_LIMIT)
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
            if not built and not fault.needs_build and (error := build(TIME_LIMIT)):
                raise SystemExit(f"the sources do not compile:\n{error}")
            outcome = measure(fault)
            built = not fault.needs_build  # the module still holds a fault of csrc/cpu or csrc/ops
            results[key_of(fault)] = outcome
            save_results(results)
            print(f"{fault.name}: {outcome}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
