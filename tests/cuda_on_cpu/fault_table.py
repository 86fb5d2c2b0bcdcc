"""The faults that test_self_test.py plants, as a table of which were caught and served by the reference.

python -m tests.cuda_on_cpu.fault_table               # all of them, minutes
python -m tests.cuda_on_cpu.fault_table -k linear_cka # pytest's arguments choose some
"""

import sys

import pytest

from tests.cuda_on_cpu.emulation import ROOT

FILE = ROOT / "tests/cuda_on_cpu/test_self_test.py"
# A test passes where the fault was caught and the reference served, in one process or with the test in a child.
TESTS = {
    "test_a_fault_is_found_and_the_reference_serves": "at first use",
    "test_a_child_process_meets_what_no_process_survives": "in a child process",
}


class Outcomes:
    """A plugin of pytest that collects a row for each planted fault."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "call" and item.originalname in TESTS:
            fault = item.callspec.params["fault"]
            outcome = "yes" if report.passed else f"**{report.outcome}**"
            seconds = f"{report.duration:.0f}"
            where = TESTS[item.originalname]
            self.rows.append((f"`{fault.kernel}`", fault.family, fault.operator, where, outcome, seconds))
        return report


def main() -> int:
    outcomes = Outcomes()
    tests = " or ".join(TESTS)
    chosen = sys.argv[1:]
    if "-k" in chosen:
        at = chosen.index("-k") + 1
        chosen[at] = f"({chosen[at]}) and ({tests})"
    else:
        chosen += ["-k", tests]
    code = pytest.main(["-q", "-p", "no:cacheprovider", str(FILE), *chosen], plugins=[outcomes])
    print("\n| kernel or error | concerns | operator | tested | caught and served | seconds, emulated |")
    print("|---|---|---|---|---|---:|")
    for row in outcomes.rows:
        print("| " + " | ".join(row) + " |")
    caught = sum(row[4] == "yes" for row in outcomes.rows)
    print(f"\n{len(outcomes.rows)} faults, {caught} caught by the self-test and served by the reference.")
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
