"""Plants the faults that comments of csrc/cpu describe, one at a time, and tells which test finds each.

    python -m tests.mutants.kernels                # all without a result in kernels.json; a second call goes on
    python -m tests.mutants.kernels nt_xent.cpp    # those of these files, whether or not they have a result

A comment such as `// fault: r <= c -> r < c` stands above the line that it changes, and moves with it. The sources are
copied to build/mutants/, where the faults are planted and compiled; the working tree stays as it is.
"""

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

from tests.mutants.copied_tree import COPY, ROOT, copy_sources, found_by

RESULTS = Path(__file__).with_name("kernels.json")
MARK = re.compile(r"^ *// fault: (.+?) ->(?: (.+))?$")
# Asked next: what is tested of all operators.
OF_THE_TABLE = [f"tests/fedkernels/test_{name}.py" for name in ("properties", "adversarial", "compiled_operators")]
TIME_LIMIT = 900  # seconds for a file of tests: a fault may make a solver endless, and then it is found
# Sources whose tests do not have their name, by the tests that find their faults.
OF_TESTS = {
    "accumulate_cka": ("add_products", "hsic_pairwise", "linear_cka_matrices"),
    "contrastive": (
        *("all_logits", "clip_loss", "info_nce", "logits", "nt_xent", "sigmoid_loss", "similarity_logsumexp"),
        "supervised_contrastive_loss",
    ),
    "deltas": ("apply_deltas", "delta_gram"),
    "linear_cka": ("linear_cka_feature_space",),
    "two_views": ("view_parameters",),
    "unbalanced_ot": ("_transport_problem",),
    "unbalanced_ot_stiff": ("_transport_interior_point", "unbalanced_ot_interior_point"),
}
TESTS = {source: tests for tests, sources in OF_TESTS.items() for source in sources}


class Fault(NamedTuple):
    file: str
    line: int  # that is changed, from 1
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.old} -> {self.new}".rstrip()

    @property
    def tests(self) -> str:
        stem = Path(self.file).stem
        return f"tests/fedkernels/test_{TESTS.get(stem, stem)}.py"


def faults() -> list[Fault]:
    found = []
    for path in sorted((ROOT / "csrc" / "cpu").iterdir()):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if mark := MARK.match(line):
                found.append(Fault(str(path.relative_to(ROOT)), number + 1, mark[1], mark[2] or ""))
    return found


def planted(fault: Fault, text: str) -> str:
    lines = text.splitlines(keepends=True)
    line = lines[fault.line - 1]
    if line.count(fault.old) != 1:
        raise ValueError(f"{fault.file}:{fault.line} must hold {fault.old!r} once, got {line.strip()!r}")
    lines[fault.line - 1] = line.replace(fault.old, fault.new)
    return "".join(lines)


def measure(fault: Fault) -> str:
    """The test that finds the fault, or "survived"."""
    text = (COPY / fault.file).read_text(encoding="utf-8")
    asked = [[name] for name in (fault.tests, *OF_THE_TABLE)]
    return found_by(fault.file, planted(fault, text), asked, TIME_LIMIT, compiled=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plants the faults of csrc/cpu and tells which test finds each.")
    parser.add_argument("files", nargs="*", help="names of files, as in nt_xent.cpp (default: what has no result yet)")
    given = parser.parse_args()
    if unknown := set(given.files) - {Path(fault.file).name for fault in faults()}:
        parser.error(f"no fault is marked in {', '.join(sorted(unknown))}; expected names of files in csrc/cpu")
    kept: dict[str, list[str]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results = {}
    COPY.mkdir(parents=True, exist_ok=True)
    copy_sources()
    for fault in faults():
        texts = ((ROOT / name).read_bytes() for name in (fault.file, fault.tests))
        digest = hashlib.sha256(b"".join(texts)).hexdigest()[:16]
        outcome = kept.get(fault.name, ["", ""])
        if Path(fault.file).name in given.files or (not given.files and outcome[0] != digest):
            outcome = [digest, measure(fault)]
            print(f"{fault.name}: {outcome[1]}", flush=True)
        if outcome[0]:
            results[fault.name] = outcome
        RESULTS.write_text(json.dumps(kept | results, indent=1) + "\n", encoding="utf-8")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    survived = [name for name, (_, found) in results.items() if found == "survived"]
    print(f"{len(results)} faults, {len(survived)} survived", *survived, sep="\n")


if __name__ == "__main__":
    main()
