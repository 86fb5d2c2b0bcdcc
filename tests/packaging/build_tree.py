"""A small copy of the project that setup.py builds with compilers that only pretend: tests see what is run when."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Each writes its arguments to calls.txt, the object, and the headers that the source includes as compilers do by -MMD.
COMPILER = """#!{python} -IS
import os, pathlib, re, sys
arguments, name = sys.argv[1:], pathlib.Path(sys.argv[0]).name
if "--version" in arguments:
    print(name, os.environ.get("VERSION_OF_COMPILERS", "1"))
    sys.exit()
if "--list-gpu-code" in arguments:
    print(os.environ.get("ARCHITECTURES_OF_NVCC", "sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_120").replace(" ", "\\n"))
    sys.exit()
if arguments[0].startswith("-print-file-name="):
    print("/lib/" + arguments[0].partition("=")[2])
    sys.exit()
if "--dryrun" in arguments:
    print("#$ TOP={toolkit}", file=sys.stderr)
    sys.exit()
output = pathlib.Path(arguments[arguments.index("-o") + 1])
source = pathlib.Path(arguments[arguments.index("-c") + 1]) if "-c" in arguments else None
with open("{calls}", "a") as calls:
    print(name, "linked" if source is None else f"{{output.parent.name}}/{{source.name}}", file=calls)
broken = os.environ.get("BROKEN_SOURCE")
if source is not None and broken == source.as_posix():
    print("some remark", file=sys.stderr)
    print(f"{{source}}(1): error: pretended", file=sys.stderr)
    sys.exit(1)
if source is not None and os.environ.get("WARNING_IN_SOURCE") == source.as_posix():
    strict = "-Werror" in arguments
    print(f"{{source}}(1): {{'error' if strict else 'warning'}}: pretended", file=sys.stderr)
    if strict:
        sys.exit(1)
output.write_text(repr(arguments))
if source is not None:
    headers, left = set(), [source]
    while left:
        path = left.pop()
        for name in re.findall(r'#include "(.+)"', path.read_text()):
            header = pathlib.Path("csrc") / name
            if header not in headers:
                headers.add(header)
                left.append(header)
    depfile = arguments[arguments.index("-MF") + 1]
    pathlib.Path(depfile).write_text(f"{{output}}: {{source}} {{' '.join(map(str, sorted(headers)))}}\\n")
"""

SOURCES = {
    "cpu/kernel.h": "",
    "cpu/one.cpp": '#include "cpu/kernel.h"\n',
    "cpu/two.cpp": "",
    "ops/module.cpp": "",
    "ops/one.cpp": '#include "cpu/kernel.h"\n#include "cuda/launch.h"\n',
    "ops/one_cuda.cpp": '#include "cuda/launch.h"\n',
    "cuda/launch.h": "",
    "cuda/one.cu": '#include "cuda/launch.h"\n',
    "cuda/two.cu": "",
    "exports.map": "",
}


class BuildTree:
    def __init__(self, folder: Path) -> None:
        self.folder, self.printed = folder, ""
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.folder)
        for name, text in SOURCES.items():
            self.write(f"csrc/{name}", text)
        self.write("fedkernels/__init__.py", "")
        for path in (ROOT / "csrc").glob("*.py"):
            shutil.copy(path, self.folder / "csrc")
        self.make_torch()
        toolkit = self.folder / "toolkit"
        self.write("toolkit/lib64/libcudart_static.a", "")
        text = COMPILER.format(python=sys.executable, calls=self.folder / "calls.txt", toolkit=toolkit)
        for name in ("cxx", "nvcc"):
            self.write(f"toolkit/bin/{name}", text)
            path = toolkit / "bin" / name
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def make_torch(self, version: str = "2.15.0", folder: str = "site") -> None:
        """A torch that has the headers which setup.py looks for."""
        major, minor, _ = version.split(".")
        self.write(f"{folder}/torch/__init__.py", "")
        self.write(f"{folder}/torch/version.py", f"__version__ = '{version}'\n")
        self.write(f"{folder}/torch/include/torch/csrc/stable/library.h", "")
        text = f"#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {minor}\n"
        self.write(f"{folder}/torch/include/torch/headeronly/version.h", text)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def touch(self, name: str) -> None:
        os.utime(self.folder / name)

    def build(self, *options: str, torch: str = "site", fails: bool = False, **environment: str) -> list[str]:
        """-> what the compilers were asked for in this build, as in "cxx avx2/one.cpp", sorted.

        What the build printed is kept in ``printed``.
        """
        calls = self.folder / "calls.txt"
        calls.write_text("")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FEDKERNELS_")}
        compilers = {"CC": "cxx", "CXX": "cxx", "CUDA_HOME": str(self.folder / "toolkit"), "CFLAGS": "", "CXXFLAGS": ""}
        path = os.pathsep.join([str(self.folder / "toolkit/bin"), os.environ["PATH"]])
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace", *options],
            cwd=self.folder,
            env={**kept, **compilers, "PATH": path, "PYTHONPATH": str(self.folder / torch), **environment},
            capture_output=True,
            text=True,
        )
        self.printed = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, self.printed
        return sorted(calls.read_text().splitlines())
