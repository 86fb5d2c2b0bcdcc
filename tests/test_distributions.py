"""fedkernels and fedssl as distributions of their own: what each holds and needs, and the wheels that are built."""

import ast
import os
import platform
import re
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

import fedkernels
from distributions import build

ROOT = Path(__file__).resolve().parent.parent
# The extras of those who change the packages; the others are their users'.
FOR_DEVELOPMENT = ("test", "benchmarks", "browser", "docs", "drop-in", "wheels")


class Built(NamedTuple):
    sdist: Path
    files: set[str]  # of the sdist, relative to its root
    metadata: Message


@pytest.fixture(scope="module")
def sdists(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    folder = tmp_path_factory.mktemp("sdists")
    built = {}
    for name in build.SOURCES:
        path = build.build_sdist(name, folder / "work", folder / "dist")
        with tarfile.open(path) as tar:
            files = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
            top = path.name.removesuffix(".tar.gz")
            text = tar.extractfile(f"{top}/PKG-INFO")
            assert text is not None
            built[name] = Built(path, files, Parser().parsestr(text.read().decode()))
    return built


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


def pyproject(folder: Path) -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def test_versions_agree() -> None:
    versions = {pyproject(ROOT / "distributions" / name)["project"]["version"] for name in build.SOURCES}
    assert versions | {pyproject(ROOT)["project"]["version"]} == {fedkernels.__version__}


def test_fedkernels_needs_torch_alone(sdists: dict[str, Built]) -> None:
    assert sdists["fedkernels"].metadata.get_all("Requires-Dist") == ["torch>=2.11"]


def test_no_file_of_fedkernels_imports_another_package_than_torch() -> None:
    """At its import, unless it goes on without: a picture's function may ask for matplotlib when it is called."""
    for file in (ROOT / "fedkernels").rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            packages = {name.partition(".")[0] for name in names}
            assert packages <= {*sys.stdlib_module_names, "torch", "fedkernels"}, file


def test_fedssl_is_described_as_in_the_installation_from_source() -> None:
    both, alone = pyproject(ROOT), pyproject(ROOT / "distributions/fedssl")
    wanted, project = both["project"], alone["project"]
    assert project["dependencies"] == [f"fedkernels=={wanted['version']}", *wanted["dependencies"]]
    extras = wanted["optional-dependencies"]
    assert project["optional-dependencies"] == {name: extras[name] for name in extras if name not in FOR_DEVELOPMENT}
    for key in ("requires-python", "license", "authors", "scripts"):
        assert project[key] == wanted[key]
    data = both["tool"]["setuptools"]["package-data"]
    assert alone["tool"]["setuptools"]["package-data"] == {"fedssl": data["fedssl"]}


def test_fedkernels_is_described_as_in_the_installation_from_source() -> None:
    both, alone = pyproject(ROOT), pyproject(ROOT / "distributions/fedkernels")
    assert alone["build-system"] == both["build-system"]
    for key in ("requires-python", "license", "authors"):
        assert alone["project"][key] == both["project"][key]
    data = both["tool"]["setuptools"]["package-data"]
    assert alone["tool"]["setuptools"]["package-data"] == {"fedkernels": data["fedkernels"]}


def test_source_distribution_of_fedkernels(sdists: dict[str, Built]) -> None:
    files = sdists["fedkernels"].files
    assert package_files("fedkernels") | package_files("csrc") | {"csrc/README.md", "setup.py", "LICENSE"} <= files
    assert not [name for name in files if name.startswith("fedssl") or name.endswith((".so", ".pyc"))]


def test_source_distribution_of_fedssl(sdists: dict[str, Built]) -> None:
    files = sdists["fedssl"].files
    assert package_files("fedssl") | {"LICENSE"} <= files
    assert not [name for name in files if name.startswith(("fedkernels", "csrc")) or name == "setup.py"]


def test_wheel_of_fedssl(sdists: dict[str, Built], tmp_path: Path) -> None:
    wheel = build.build_wheel(sdists["fedssl"].sdist, tmp_path / "work", tmp_path / "dist")
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


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build.main(["fedkernel"])
    assert "NAME must be one of fedkernels, fedssl, got 'fedkernel'" in capsys.readouterr().err


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
def test_wheel_of_fedkernels(sdists: dict[str, Built], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for the baseline and AVX2, which takes some minutes."""
    for tool in ("auditwheel", "ziglang"):
        pytest.importorskip(tool)
    monkeypatch.setenv("FEDKERNELS_CUDA", "0")
    if platform.machine() == "x86_64":
        monkeypatch.setenv("FEDKERNELS_CPU_INSTRUCTION_SETS", "avx2")
    wheel = build.build_wheel(sdists["fedkernels"].sdist, tmp_path / "work", tmp_path / "dist")
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
