"""The distribution: versions agree, the sdist and the wheel are complete, the Makefile's set-up is sound."""

import ast
import importlib.metadata
import importlib.resources
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from packaging.specifiers import SpecifierSet

from tests.conftest import LONGEST

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTION = "fedkernels-fedssl"
PACKAGES = ("fedkernels", "fedssl")


class Built(NamedTuple):
    sdist: set[str]
    wheel: set[str]
    metadata: Message
    module: str  # the compiled one, or the note that says why there is none


# In place of the C++ compiler: it reads each file with all that it includes, which takes a tenth of compiling it, and
# writes an empty module. That the files compile, the installation has shown.
READING_COMPILER = """#!/bin/sh
case " $* " in
    *" -shared "*) for module; do :; done; : >"$module" ;;
    *) exec {compiler} "$@" -E ;;
esac
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    env = os.environ | variables
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of a copy of the sources, and the wheel of that sdist: no build output lands in the tree."""
    folder = tmp_path_factory.mktemp("packaging")
    copy = folder / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    for name in ("CONTRIBUTING.md", "Makefile"):
        shutil.copy(ROOT / name, copy)
    for name in (*PACKAGES, "csrc", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))

    build_sdist = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build_sdist, folder, cwd=copy)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        sdist = {name.partition("/")[2] for name in tar.getnames()}
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # not in every 3.10 and 3.11
        tar.extractall(folder / "unpacked")

    (unpacked,) = (folder / "unpacked").iterdir()
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    compiler, module = shutil.which("g++") or shutil.which("clang++"), "fedkernels/_C.missing"
    variables = {"FEDKERNELS_CUDA": "0", "FEDKERNELS_CPU_INSTRUCTION_SETS": "baseline"}
    if compiler and (Path(torch.__file__).parent / "include/torch/csrc/stable/library.h").is_file():
        reading, module = folder / "reading_compiler", "fedkernels/_C.abi3.so"
        reading.write_text(READING_COMPILER.format(compiler=compiler))
        reading.chmod(0o755)
        variables |= {"CC": str(reading), "CXX": str(reading)}
    run(*pip, "--wheel-dir", folder, unpacked, cwd=folder, **variables)
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        names = set(wheel.namelist())
        (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return Built(sdist, names, Parser().parsestr(wheel.read(path).decode()), module)


def project_version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def package_files() -> set[str]:
    """Every source and data file of both packages, relative to the root."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix()
        for path in found
        if "__pycache__" not in path.parts
        and path.suffix not in {".so", ".pyc", ".missing"}
        and path.name != "README.md"
    }


def test_installed_version_is_the_project_version() -> None:
    assert importlib.metadata.version(DISTRIBUTION) == project_version()


def test_newest_changelog_entry_is_the_project_version() -> None:
    entries = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == project_version()


@pytest.mark.parametrize("folder", ["recipes", "tables"])
def test_package_data_is_readable_as_resources(folder: str) -> None:
    folder_files = importlib.resources.files("fedssl").joinpath(folder).iterdir()
    files = [file for file in folder_files if file.name.endswith(".yaml")]
    assert files
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict), file.name


def test_sdist_is_complete(built: Built) -> None:
    assert package_files() <= built.sdist
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py"} <= built.sdist
    assert {"csrc/README.md", "tests/test_packaging.py"} <= built.sdist


def test_wheel_holds_the_two_packages_and_nothing_else(built: Built) -> None:
    outside = {name for name in built.wheel if ".dist-info/" not in name}
    # The compiled module is one for all Pythons; without a compiler a note says why there is none.
    assert outside - package_files() == {built.module}
    assert package_files() <= outside
    assert {"fedkernels/py.typed", "fedssl/py.typed"} <= outside


def test_wheel_metadata(built: Built) -> None:
    assert built.metadata["Version"] == project_version()
    assert built.metadata["License-Expression"] == "Apache-2.0"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in built.wheel)
    assert str(built.metadata.get_payload()).strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_the_tests_that_are_started_first_exist() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_requires_python_is_what_the_makefile_accepts(built: Built) -> None:
    found = re.search(r"^PYTHONS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    accepted = SpecifierSet(built.metadata["Requires-Python"])
    assert [f"3.{minor}" for minor in range(30) if f"3.{minor}.1" in accepted] == found[1].split()
    assert found[1].split() == ["3.10", "3.11", "3.12", "3.13"]


IMPORT_ALL_OF_FEDKERNELS = """
import importlib, pkgutil, sys
import fedkernels
for module in pkgutil.walk_packages(fedkernels.__path__, "fedkernels."):
    importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_importing_fedkernels_needs_torch_alone() -> None:
    loaded = set(run(sys.executable, "-c", IMPORT_ALL_OF_FEDKERNELS, cwd=ROOT).split())
    assert {"fedkernels", "torch"} <= loaded
    assert not loaded & {
        "fedssl",
        "torchvision",
        "timm",
        "pydantic",
        "sklearn",
        "matplotlib",
        "typer",
        "tensorboard",
    }


def test_no_file_of_fedkernels_imports_fedssl() -> None:
    files = list((ROOT / "fedkernels").rglob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] == "fedssl" for name in names), file


# The Makefile is tried with a shell script in place of Python, so that nothing is downloaded.

FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) echo {version} ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/lint-imports" ;;
    "-m pip") test "$3" = --version || exit "${{PIP_EXIT:-0}}" ;;
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


def test_make_without_a_target_shows_the_help(tmp_path: Path) -> None:
    done = make(tmp_path)
    assert done.returncode == 0
    assert all(f"make {target}" in done.stdout for target in ("demo", "test", "lint", "wheels", "clean"))
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.14", ""])
def test_make_refuses_other_pythons_in_one_line(tmp_path: Path, version: str) -> None:
    done = make(tmp_path, "test", version=version)
    assert done.returncode != 0
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "Python 3.10 to 3.13 is needed" in line
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("version", ["3.11", ""])
def test_make_refuses_a_python_that_differs_from_the_environment(tmp_path: Path, version: str) -> None:
    assert make(tmp_path, "lint", version="3.12").returncode == 0
    done = make(tmp_path, "lint", version=version)
    assert done.returncode != 0
    assert "has Python 3.12" in done.stderr


def test_make_test_installs_once_and_ends_with_pytest(tmp_path: Path) -> None:
    first = make(tmp_path, "test")
    assert first.returncode == 0, first.stderr
    assert "pip install" in first.stdout
    *style, parallel, alone, types = [line for line in first.stdout.splitlines() if line.startswith("ran ")]
    assert style == ["ran -m ruff check .", "ran -m ruff format --check .", "ran --no-cache"]
    assert types == "ran -m mypy"
    processes = "3.12"  # what the stand-in prints whatever it is asked
    options = f"-m not nightly -n {processes} --dist loadfile --no-loadscope-reorder"
    assert parallel.startswith(f"ran -m pytest {options} --ignore=")
    files = alone.removeprefix("ran -m pytest -m not nightly ").split()
    assert parallel.split()[-len(files) :] == [f"--ignore={file}" for file in files]
    assert all((ROOT / file).is_file() for file in files)
    assert first.stdout.splitlines()[-2:] == [alone, types]
    assert "pip" not in make(tmp_path, "test").stdout


@pytest.mark.parametrize("fails", ["--dist loadfile", "nightly tests/fedssl/engines/flower/test_simulation.py", "mypy"])
def test_make_test_fails_where_one_of_its_three_parts_does_and_shows_all(tmp_path: Path, fails: str) -> None:
    done = make(tmp_path, "test", fails=fails)
    assert done.returncode != 0
    assert sum(line.startswith(("ran -m pytest", "ran -m mypy")) for line in done.stdout.splitlines()) == 3


def test_make_wheels_builds_both_distributions(tmp_path: Path) -> None:
    done = make(tmp_path, "wheels")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ran -m distributions.build"


def test_failed_installation_is_tried_again(tmp_path: Path) -> None:
    failed = make(tmp_path, "test", pip_exit="1")
    assert failed.returncode != 0
    assert "ran " not in failed.stdout
    again = make(tmp_path, "test")
    assert again.returncode == 0
    assert "pip install" in again.stdout
