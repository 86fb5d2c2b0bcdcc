"""`python -m fedkernels.self_test`: exit code 1 if a kernel did not pass, else 0."""

import argparse
import os
import sys

from fedkernels.internal.first_contact import TIME_LIMIT
from fedkernels.internal.self_test_outcomes import PASSED
from fedkernels.internal.self_test_process import run_as_child
from fedkernels.self_test import self_test


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fedkernels.self_test",
        description="Test the CUDA kernels of fedkernels on each kind of GPU that is visible, and print a table.",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT,
        metavar="SECONDS",
        help="for the test of an operator; a child process has 120 s at least to start (default: %(default)g)",
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_as_child(int(options.child[0]), options.child[1:])
        os._exit(0)  # CUDA may crash or hang where its libraries are unloaded after an error
    return int(any(result.outcome != PASSED for result in self_test(time_limit=options.time_limit)))


if __name__ == "__main__":
    sys.exit(main())
