"""The Makefile, tried with a shell script in place of Python, so that nothing is downloaded."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import of_the_build, size
from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parents[2]

FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) echo {version} ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/lint-imports" ;;
    "-m pip") test "$3" = --version || exit "${{PIP_EXIT:-0}}" ;;
    "-m tests.of_the_build") test $# = 2 && echo --ignore=left_out || echo "ran $*" ;;
    *) echo "ran $*"; case "$*" in *"${{FAILS:-nothing}}"*) exit 1 ;; esac ;;
esac
"""


def make(
    folder: Path, *goals: str, version: str = "3.12", pip_exit: str = "0", fails: str = "nothing"
) -> subprocess.CompletedProcess[str]:
    """`make` in the repository with VENV inside `folder`, and PYTHON a stand-in of that version."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    fake = folder / "python"
    fake.write_text(FAKE_PYTHON.format(version=version))
    fake.chmod(0o755)
    # Within `make test` these would hand this call the outer one's options.
    env = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"}}
    env |= {"PIP_EXIT": pip_exit, "FAILS": fails}
    command = ["make", *goals, f"PYTHON={fake}", f"VENV={folder / 'venv'}"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.14", ""])
def test_make_refuses_other_pythons_in_one_line(tmp_path: Path, version: str) -> None:
    done = make(tmp_path, "test", version=version)
    assert done.returncode != 0
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "Python 3.10 to 3.13 is needed" in line
    assert not (tmp_path / "venv").exists()


def test_make_refuses_a_python_that_differs_from_the_environment(tmp_path: Path) -> None:
    assert make(tmp_path, "lint", version="3.12").returncode == 0
    for version in ("3.11", ""):
        done = make(tmp_path, "lint", version=version)
        assert done.returncode != 0
        assert "has Python 3.12" in done.stderr


def test_make_test_installs_once_and_ends_with_types(tmp_path: Path) -> None:
    first = make(tmp_path, "test")
    assert first.returncode == 0, first.stderr
    assert "pip install" in first.stdout
    *style, parallel, passed, alone, types = [line for line in first.stdout.splitlines() if line.startswith("ran ")]
    assert style == ["ran -m ruff check .", "ran -m ruff format --check .", "ran --no-cache"]
    assert (passed, types) == ("ran -m tests.of_the_build --passed", "ran -m mypy")
    processes = "3.12"  # what the stand-in prints whatever it is asked
    options = f"-m not nightly -n {processes} --dist loadfile --no-loadscope-reorder --ignore=left_out"
    assert parallel.startswith(f"ran -m pytest {options} --ignore=")
    files = alone.removeprefix("ran -m pytest -m not nightly ").split()
    assert parallel.split()[-len(files) :] == [f"--ignore={file}" for file in files]
    assert all((ROOT / file).is_file() for file in files)
    assert first.stdout.splitlines()[-2:] == [alone, types]
    assert "pip" not in make(tmp_path, "test").stdout


@pytest.mark.parametrize("fails", ["--dist loadfile", "nightly tests/fedssl/engines/flower/test_deployment.py", "mypy"])
def test_make_test_fails_where_one_of_its_three_parts_does_and_shows_all(tmp_path: Path, fails: str) -> None:
    done = make(tmp_path, "test", fails=fails)
    assert done.returncode != 0
    assert sum(line.startswith(("ran -m pytest", "ran -m mypy")) for line in done.stdout.splitlines()) == 3
    assert ("ran -m tests.of_the_build --passed" in done.stdout) == (fails != "--dist loadfile")


def test_tests_of_the_build_run_where_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("csrc", "tests/packaging"):
        (tmp_path / name).mkdir(parents=True)
    source = tmp_path / "csrc" / "one.cpp"
    source.write_text("int one;")
    monkeypatch.setattr(of_the_build, "ROOT", tmp_path)
    monkeypatch.setattr(of_the_build, "PASSED", tmp_path / "passed.txt")
    monkeypatch.delenv("CI", raising=False)
    assert of_the_build.options() == []
    of_the_build.PASSED.write_text(of_the_build.digest())
    assert of_the_build.options() == [f"--ignore={name}" for name in of_the_build.TESTS]
    monkeypatch.setenv("CI", "true")
    assert of_the_build.options() == []
    monkeypatch.delenv("CI")
    source.rename(source.with_name("two.cpp"))
    assert of_the_build.options() == []


def test_what_is_named_here_exists() -> None:
    assert all((ROOT / name).exists() for name in of_the_build.DEPENDS_ON)
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


@pytest.mark.parametrize("folder", of_the_build.TESTS)
def test_what_the_tests_of_the_build_import_of_others_lets_them_run(folder: str) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / folder).glob("*.py"))
    found = re.findall(r"^from (tests[.\w]*) import (.+)$", text, re.MULTILINE)
    names = [f"{module}.{name}" for module, imported in found for name in imported.split(", ")]
    assert names
    named = tuple(one.removesuffix(".py").replace("/", ".") for one in of_the_build.DEPENDS_ON)
    assert [name for name in names if not name.startswith(named)] == []


def test_failed_installation_is_tried_again(tmp_path: Path) -> None:
    failed = make(tmp_path, "test", pip_exit="1")
    assert failed.returncode != 0
    assert "ran " not in failed.stdout
    again = make(tmp_path, "test")
    assert again.returncode == 0
    assert "pip install" in again.stdout


def test_the_lines_of_a_file_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""What\nit is."""\n\n# why\nTEXT = """\n\n"""\n\n\ndef f():\n    """Do."""\n    return (\n        1\n    )\n'
    )
    assert size.counted(file) == (14, 7, 3)
