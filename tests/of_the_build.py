"""Whether to run the tests of what is compiled and packed: `make test` does where that has changed since they passed.

    python -m tests.of_the_build            # prints pytest's options that leave them out, or nothing
    python -m tests.of_the_build --passed   # keeps in the environment that they have passed

In continuous integration, where the variable CI is set, they always run. They also read fedssl/ and CHANGELOG.md, which
nearly every change touches: for these alone they run there only.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/cuda_on_cpu", "tests/packaging")
DEPENDS_ON = (
    *("csrc", "distributions", "fedkernels", "tests/fedkernels", "tests/fedssl/small_models.py", *TESTS),
    *("tests/conftest.py", "tests/of_the_build.py", "tests/size.py"),
    *("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", "README.md", "CITATION.cff", "mkdocs.yml"),
)
PASSED = Path(sys.prefix) / "tests_of_the_build_passed.txt"


def files() -> Iterator[Path]:
    for name in DEPENDS_ON:
        path = ROOT / name
        yield from [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def digest() -> str:
    """Of the sources, whatever they are called and hold; compiled files are left out."""
    whole = hashlib.sha256()
    for path in files():
        if path.suffix not in {".pyc", ".so", ".missing"}:
            whole.update(f"{path.relative_to(ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def options() -> list[str]:
    passed = PASSED.read_text() if PASSED.exists() else ""
    return [f"--ignore={name}" for name in TESTS] if passed == digest() and not os.environ.get("CI") else []


if __name__ == "__main__":
    if sys.argv[1:] == ["--passed"]:
        PASSED.write_text(digest())
    else:
        print(*options())
