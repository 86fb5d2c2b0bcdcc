"""`python -m fedkernels.self_test`: exit code 1 if a kernel did not pass, else 0."""

import argparse
import sys

from fedkernels.self_test import PASSED, run_as_child, self_test


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fedkernels.self_test",
        description="Test the CUDA kernels of fedkernels on each kind of GPU that is visible, and print a table.",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="for the tests of a child process (default: 180)",
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_as_child(int(options.child[0]), options.child[1:])
        return 0
    return int(any(result.outcome != PASSED for result in self_test(time_limit=options.time_limit)))


if __name__ == "__main__":
    sys.exit(main())
