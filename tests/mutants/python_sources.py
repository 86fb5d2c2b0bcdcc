"""Changes Python sources at random, one place at a time, and tells which changes no test finds.

    python -m tests.mutants.python_sources                       # a sample of 200 from all sources below
    python -m tests.mutants.python_sources --survivors           # only print what survived
    python -m tests.mutants.python_sources fedssl/guard.py --tests tests/fedssl/test_guard.py --sample 12

The changes are those of cosmic-ray: a comparison turned round, a number one more, a condition negated, a loop that does
nothing. Asked are the tests of the mirrored file, of its folder, of all files that name the source, and of all recipes.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

from tests.mutants.copied_tree import COPY, ROOT, copy_sources, found_by
from tests.mutants.kernels import TESTS

RESULTS = Path(__file__).with_name("python_sources.json")
SOURCES = (
    "fedkernels/reference/*.py",
    "fedssl/objectives/*.py",
    "fedssl/regularizers/*.py",
    "fedssl/schedules/*.py",
    "fedssl/aggregators/*.py",
    "fedssl/local_updates/*.py",
    "fedssl/augmentations/*.py",
    "fedssl/guard.py",
    "fedssl/untrusted.py",
    "fedssl/data/*.py",
    "fedssl/export/*.py",
    "fedssl/engines/rounds.py",
    "fedssl/client.py",
    "fedssl/method.py",
    "fedssl/federation.py",
    "fedssl/training.py",
)
# Of cosmic-ray's operators those whose change is seldom without an effect. Others turn "str | None" into "str + None".
OPERATORS = [
    f"core/{name}"
    for name in (
        *("ReplaceBinaryOperator_" + pair for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "Pow_Mul")),
        *("ReplaceBinaryOperator_" + pair for pair in ("FloorDiv_Mul", "Mod_FloorDiv", "BitAnd_BitOr")),
        *("ReplaceComparisonOperator_" + pair for pair in ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE")),
        *("ReplaceComparisonOperator_" + pair for pair in ("GtE_Gt", "Lt_GtE", "Gt_LtE", "Is_IsNot", "IsNot_Is")),
        *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
        *("ReplaceUnaryOperator_Delete_USub", "ReplaceUnaryOperator_Delete_Not", "NumberReplacer"),
        *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    )
]
TIME_LIMIT = 300  # seconds for one run of tests: an endless loop is found by it


class Change(NamedTuple):
    file: str
    operator: str
    occurrence: int
    line: int


def name_of(change: Change) -> str:
    return f"{change.file} {change.operator} {change.occurrence}"


def changes_of(file: str) -> list[Change]:
    nodes = list(ast_nodes(get_ast((ROOT / file).read_text(encoding="utf-8"))))
    found = []
    for name in OPERATORS:
        places = (start for node in nodes for start, _ in get_operator(name)().mutation_positions(node))
        found += [Change(file, name, occurrence, line) for occurrence, (line, _) in enumerate(places)]
    return found


def tests_of(file: str) -> list[list[str]]:
    """The tests that may find a change of the file, in the order in which to ask them."""
    path = Path("tests") / file.replace("/reference/", "/")  # an operator's tests are those of its reference
    folder = path.parent
    stem = TESTS.get(path.stem, path.stem) if folder == Path("tests/fedkernels") else path.stem
    mirrored = folder / f"test_{stem}.py"
    module = file.removesuffix(".py").replace("/", ".")
    naming = [
        str(test.relative_to(ROOT))
        for test in sorted((ROOT / "tests/fedssl").rglob("test_*.py"))
        if module in test.read_text(encoding="utf-8") and test.parent != ROOT / folder
    ]
    asked = [[str(mirrored)]] if (ROOT / mirrored).exists() else []
    if file == "fedssl/training.py":  # rounds of training by hand stand under other names
        asked.append(["tests/fedssl/test_local_training.py", "tests/fedssl/local_updates"])
    elif folder != Path("tests/fedssl"):
        asked.append([str(folder), f"--ignore={mirrored}"])
    return [
        *asked,
        *([naming] if naming else []),
        ["tests/fedssl/test_shipped_recipes.py", "tests/fedssl/engines/test_in_process.py"],
    ]


def outcome(change: Change, asked: list[list[str]]) -> str:
    """The test that finds the change, or "survived"."""
    text = (COPY / change.file).read_text(encoding="utf-8")
    changed = mutate_code(text, get_operator(change.operator)(), change.occurrence)
    if changed in (None, text):
        raise SystemExit(f"{change} changes nothing")
    return found_by(change.file, changed, asked, TIME_LIMIT)


def shown(change: Change) -> str:
    """The line before and after."""
    text = (ROOT / change.file).read_text(encoding="utf-8")
    changed = mutate_code(text, get_operator(change.operator)(), change.occurrence) or ""
    pairs = zip(text.splitlines(), changed.splitlines(), strict=False)
    differing = [f"    - {old.strip()}\n    + {new.strip()}" for old, new in pairs if old != new]
    return f"{change.file}:{change.line} {change.operator.removeprefix('core/')}\n" + "\n".join(differing)


def main() -> None:
    parser = argparse.ArgumentParser(description="Changes Python sources at random and tells which no test finds.")
    parser.add_argument("files", nargs="*", help="sources (default: the parts, guard, data, export and rounds)")
    parser.add_argument("--tests", help="arguments of pytest (default: the tests that mirror or name the source)")
    parser.add_argument("--sample", type=int, default=200, help="how many changes (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--survivors", action="store_true", help="only print what survived so far")
    given = parser.parse_args()
    kept: dict[str, str] = {}
    if not given.files and RESULTS.exists():
        kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    files = given.files or [str(path.relative_to(ROOT)) for pattern in SOURCES for path in ROOT.glob(pattern)]
    changes = [change for file in sorted(files) for change in changes_of(file)]
    changes = sorted(random.Random(given.seed).sample(changes, min(given.sample, len(changes))))
    if not given.survivors:
        COPY.mkdir(parents=True, exist_ok=True)
        copy_sources(compiled=True)
    for change in changes:
        key = name_of(change)
        if key not in kept and not given.survivors:
            began = time.perf_counter()
            kept[key] = outcome(change, [given.tests.split()] if given.tests else tests_of(change.file))
            print(f"{key}: {kept[key]} ({time.perf_counter() - began:.0f} s)", flush=True)
            if not given.files:
                RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        if kept.get(key) == "survived":
            print(shown(change))
    outcomes = [kept[name_of(change)] for change in changes if name_of(change) in kept]
    print(f"{len(outcomes)} of {len(changes)} changes tried, {outcomes.count('survived')} survived")


if __name__ == "__main__":
    main()
