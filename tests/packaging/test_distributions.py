"""The distributions: both packages in one, and fedkernels and fedssl on their own. What each holds and needs."""

import ast
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packaging.specifiers import SpecifierSet

import fedkernels
from distributions import build
from tests.packaging.build_tree import write_compiler

ROOT = Path(__file__).resolve().parents[2]
# The extras of those who change the packages; the others are their users'.
FOR_DEVELOPMENT = ("test", "benchmarks", "browser", "docs", "drop-in", "wheels")


class Both(NamedTuple):
    sdist: set[str]
    wheel: set[str]
    metadata: Message
    module: str  # the compiled one, or the note that says why there is none


class Sdist(NamedTuple):
    path: Path
    files: set[str]  # relative to its root
    metadata: Message


def package_files(name: str) -> set[str]:
    """Every source and data file of a package, relative to the root."""
    paths = (path for path in (ROOT / name).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    left_out = {".so", ".pyc", ".missing"}
    return {
        path.relative_to(ROOT).as_posix() for path in paths if path.suffix not in left_out and path.name != "README.md"
    }


def contents(wheel: Path) -> tuple[set[str], Message]:
    """-> the files outside the metadata, and the metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        files = {name for name in names if ".dist-info/" not in name and not name.endswith("/")}
        return files, Parser().parsestr(archive.read(metadata).decode())


def read_sdist(path: Path) -> Sdist:
    with tarfile.open(path) as tar:
        files = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
        text = tar.extractfile(f"{path.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert text is not None
        return Sdist(path, files, Parser().parsestr(text.read().decode()))


def pyproject(folder: Path) -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """The sdist of a copy of the sources, and the wheel of that sdist: no build output lands in the tree."""
    folder = tmp_path_factory.mktemp("packaging")
    copy = folder / "copy"
    copy.mkdir()
    of_root = "pyproject.toml setup.py MANIFEST.in README.md LICENSE CHANGELOG.md CITATION.cff mkdocs.yml Makefile"
    for name in of_root.split():
        shutil.copy(ROOT / name, copy)
    for name in ("fedkernels", "fedssl", "csrc", "tests", "website"):
        shutil.copytree(ROOT / name, copy / name, ignore=build.NOT_SOURCES)
    sdist = read_sdist(build._call_setuptools("build_sdist", copy, folder, folder / "made"))

    # That the files compile, the installation has shown: a compiler that only pretends looks for all that they include.
    compiler, module = folder / "compiler", "fedkernels/_C.abi3.so"
    write_compiler(compiler, folder / "calls.txt")
    if not (Path(torch.__file__).parent / "include/torch/csrc/stable/library.h").is_file():
        module = "fedkernels/_C.missing"
    variables = {"FEDKERNELS_CUDA": "0", "FEDKERNELS_CPU_INSTRUCTION_SETS": "baseline"}
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    command = [*pip, "--wheel-dir", folder, build._unpack(sdist.path, folder / "unpacked")]
    environment = os.environ | variables | {"CC": str(compiler), "CXX": str(compiler)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        return Both(sdist.files, set(wheel.namelist()), contents(archive)[1], module)


@pytest.fixture(scope="module")
def sdists(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sdist]:
    folder = tmp_path_factory.mktemp("sdists")
    paths = {name: build.build_sdist(name, folder / "work", folder / "dist") for name in build.SOURCES}
    return {name: read_sdist(path) for name, path in paths.items()}


def test_versions_agree() -> None:
    folders = ROOT, *(ROOT / "distributions" / name for name in build.SOURCES)
    versions = {pyproject(folder)["project"]["version"] for folder in folders}
    newest = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions | {newest, cited, importlib.metadata.version("fedkernels-fedssl")} == {fedkernels.__version__}


def test_both_in_one(both: Both) -> None:
    files = package_files("fedkernels") | package_files("fedssl")
    outside = {name for name in both.wheel if ".dist-info/" not in name}
    # The compiled module is one for all Pythons; without a compiler a note says why there is none.
    assert outside == files | {both.module}
    for_the_tests = "CHANGELOG.md CITATION.cff csrc/README.md fedssl/data/README.md mkdocs.yml tests/of_the_build.py"
    for_the_tests += " LICENSE website/hooks.py website/quoted_results.yaml"
    assert files | package_files("csrc") | set(for_the_tests.split()) <= both.sdist
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in both.wheel)
    assert both.metadata["License-Expression"] == "Apache-2.0"
    assert str(both.metadata.get_payload()).strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_requires_python_is_what_the_makefile_accepts(both: Both) -> None:
    found = re.search(r"^PYTHONS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    accepted = SpecifierSet(both.metadata["Requires-Python"])
    assert [f"3.{minor}" for minor in range(30) if f"3.{minor}.1" in accepted] == found[1].split()


def test_no_file_of_fedkernels_imports_another_package_than_torch() -> None:
    """At its import, unless it goes on without: a picture's function may ask for matplotlib when it is called."""
    for file in (ROOT / "fedkernels").rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            packages = {name.partition(".")[0] for name in names}
            assert packages <= {*sys.stdlib_module_names, "torch", "fedkernels"}, file


def test_each_is_described_as_in_the_installation_from_source() -> None:
    both = pyproject(ROOT)
    for name in build.SOURCES:
        alone = pyproject(ROOT / "distributions" / name)
        for key in ("requires-python", "license", "authors"):
            assert alone["project"][key] == both["project"][key]
        data = both["tool"]["setuptools"]["package-data"][name]
        assert alone["tool"]["setuptools"]["package-data"] == {name: data}
    assert pyproject(ROOT / "distributions/fedkernels")["build-system"] == both["build-system"]
    wanted, project = both["project"], alone["project"]  # of fedssl, the last
    assert project["dependencies"] == [f"fedkernels=={wanted['version']}", *wanted["dependencies"]]
    extras = wanted["optional-dependencies"]
    assert project["optional-dependencies"] == {name: extras[name] for name in extras if name not in FOR_DEVELOPMENT}
    assert project["scripts"] == wanted["scripts"]


def test_source_distributions(sdists: dict[str, Sdist]) -> None:
    assert sdists["fedkernels"].metadata.get_all("Requires-Dist") == ["torch>=2.11"]
    files = sdists["fedkernels"].files
    assert package_files("fedkernels") | package_files("csrc") | {"csrc/README.md", "setup.py", "LICENSE"} <= files
    assert not [name for name in files if name.startswith("fedssl") or name.endswith((".so", ".pyc"))]
    files = sdists["fedssl"].files
    assert package_files("fedssl") | {"LICENSE"} <= files
    assert not [name for name in files if name.startswith(("fedkernels", "csrc")) or name == "setup.py"]


def test_wheel_of_fedssl(sdists: dict[str, Sdist], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wheel = build.build_wheel(sdists["fedssl"].path, Path("work"), Path("dist"))
    assert wheel.name == f"fedssl-{fedkernels.__version__}-py3-none-any.whl"
    files, metadata = contents(wheel)
    assert files == package_files("fedssl")
    assert f"fedkernels=={fedkernels.__version__}" in metadata.get_all("Requires-Dist", [])


def test_a_wheel_without_the_module_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "fedkernels.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fedkernels/_C.missing", "RuntimeError: no compiler\n")
    with pytest.raises(RuntimeError, match=r"needs the compiled module: RuntimeError: no compiler$"):
        build._require_module(wheel)


# In an environment of its own, which sees torch: nothing of this repository's folder may be imported there.
TRY_FEDKERNELS = """
import pathlib, sys, warnings
import torch
warnings.filterwarnings("error", message="fedkernels runs")
import fedkernels
assert pathlib.Path(fedkernels.__file__).is_relative_to(sys.prefix), fedkernels.__file__
assert fedkernels.build_info()["native"] == "used", fedkernels.build_info()
assert fedkernels.build_info()["cpu_used"] == sys.argv[1], fedkernels.build_info()
exec(sys.argv[2])
"""


@pytest.mark.nightly
def test_wheel_of_fedkernels(sdists: dict[str, Sdist], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for the baseline and AVX2, which takes some minutes."""
    for tool in ("auditwheel", "ziglang"):
        pytest.importorskip(tool)
    monkeypatch.setenv("FEDKERNELS_CUDA", "0")
    if platform.machine() == "x86_64":
        monkeypatch.setenv("FEDKERNELS_CPU_INSTRUCTION_SETS", "avx2")
    wheel = build.build_wheel(sdists["fedkernels"].path, tmp_path / "work", tmp_path / "dist")
    machine = sysconfig.get_platform().rpartition("-")[2]
    assert wheel.name == f"fedkernels-{fedkernels.__version__}-cp310-abi3-manylinux_2_28_{machine}.whl"
    files, metadata = contents(wheel)
    assert files == package_files("fedkernels") | {"fedkernels/_C.abi3.so"}
    assert metadata.get_all("Requires-Dist") == ["torch>=2.11"]

    environment = tmp_path / "environment"
    python = environment / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True)
    (packages,) = environment.glob("lib/*/site-packages")
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    example = re.findall(
        r"```python\n(.+?)```", (ROOT / "fedkernels/README.md").read_text(encoding="utf-8"), re.DOTALL
    )[0]
    best = "avx2" if torch.backends.cpu.get_cpu_capability().startswith("AVX") else "baseline"
    subprocess.run([python, "-c", TRY_FEDKERNELS, best, example], cwd=tmp_path, env=clean, check=True)
    subprocess.run([python, "-m", "fedkernels.self_test"], cwd=tmp_path, env=clean, check=True)
