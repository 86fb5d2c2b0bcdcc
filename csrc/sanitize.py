"""Runs the tests of fedkernels over CPU kernels that AddressSanitizer and UndefinedBehaviorSanitizer watch.

    python csrc/sanitize.py                                     # every instruction set that this processor has
    python csrc/sanitize.py avx2 -- tests/fedkernels/test_native.py -x        # one of them; the rest goes to pytest

It needs Linux, g++ with its sanitizer libraries, and the environment that `make test` makes. The sources are copied to
build/sanitize/ and compiled there, so the module in use stays as it is. A second run compiles only what has changed.
The first error ends the run.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "sanitize"
COPIED = ("csrc", "fedkernels", "fedssl", "tests", "setup.py", "pyproject.toml", "README.md", "LICENSE")
# -fno-rtti, which the kernels are compiled with, leaves nothing for the check of virtual tables.
FLAGS = "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer"
# Left out: the references are PyTorch alone, a build inside a watched process would watch the compiler, and each
# instruction set has its own run here.
LEFT_OUT = "not reference and not without_a_compiler and not every_instruction_set"


def copy_sources() -> None:
    """Files keep their times, so that only what has changed is compiled again; files that are gone leave the copy."""
    for name in COPIED:
        source, target = ROOT / name, COPY / name
        if source.is_dir():
            for path in list(target.rglob("*")):
                gone = not (source / path.relative_to(target)).exists()
                if gone and path.is_file() and path.suffix != ".so":
                    path.unlink()
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "_C.missing")
            shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)


def build() -> None:
    module = COPY / "fedkernels" / "_C.abi3.so"
    flags = {name: f"{os.environ.get(name, '')} {FLAGS}" for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS")}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    print(f"compiling in {COPY}; the first time takes minutes", flush=True)
    done = subprocess.run(
        command, cwd=COPY, env=os.environ | flags | {"FEDKERNELS_CUDA": "0"}, capture_output=True, text=True
    )
    if not module.exists() or b"__asan_report_load8" not in module.read_bytes():
        sys.exit(f"{done.stdout}{done.stderr}the module was not compiled with the sanitizers")


def library(name: str) -> str:
    path = subprocess.run(
        [os.environ.get("CXX", "g++"), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(path).is_absolute():
        sys.exit(f"g++ has no {name}; install its sanitizer libraries")
    return path


def environment(instruction_set: str) -> dict[str, str]:
    return os.environ | {
        # The sanitizer comes before everything else in the process, and the C++ library at once after it: it looks for
        # __cxa_throw when it starts.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python and torch keep much until the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "FEDKERNELS_CPU": instruction_set,
        "PYTHONPATH": str(COPY),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }


def info(instruction_set: str, key: str) -> str:
    code = f"import fedkernels; print(fedkernels.__file__); print(fedkernels.build_info()[{key!r}])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=COPY, env=environment(instruction_set), capture_output=True, text=True
    )
    path, _, value = done.stdout.strip().partition("\n")
    if done.returncode or Path(path).parent.parent != COPY:
        sys.exit(f"the module in {COPY} does not load:\n{done.stdout}{done.stderr}")
    return value


def main() -> None:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("instruction_sets", nargs="*", help="baseline, avx2, avx512 (default: all that are compiled)")
    wanted = parser.parse_args(arguments[:split]).instruction_sets
    tests = arguments[split + 1 :] or ["tests/fedkernels"]

    COPY.mkdir(parents=True, exist_ok=True)
    copy_sources()
    build()
    for name in wanted or info("", "cpu_compiled").split():
        if info(name, "cpu_used") != name:
            print(f"{name}: not compiled, or this processor does not have it", flush=True)
            continue
        print(f"{name}: pytest {' '.join(tests)}", flush=True)
        # The sanitizers write to the file descriptor and end the process: pytest must not catch that.
        quiet = ("-q", "-p", "no:cacheprovider", "--capture=sys")
        command = [sys.executable, "-m", "pytest", *quiet, "-k", LEFT_OUT, *tests]
        if code := subprocess.run(command, cwd=COPY, env=environment(name)).returncode:
            sys.exit(code)


if __name__ == "__main__":
    main()
