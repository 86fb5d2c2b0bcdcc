"""A small copy of the project that setup.py builds with compilers that only pretend: tests see what is run when."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Each writes its arguments to calls.txt, the object, and the headers that the source includes as compilers do by -MMD.
COMPILER = """#!{python} -IS
import os, re, sys
arguments, name = sys.argv[1:], os.path.basename(sys.argv[0])
if "--version" in arguments:
    print(name, os.environ.get("VERSION_OF_" + name, "1"))
    sys.exit()
if "--list-gpu-code" in arguments:
    print(os.environ.get("ARCHITECTURES_OF_NVCC", "sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_120").replace(" ", "\\n"))
    sys.exit()
if arguments[0].startswith("-print-file-name="):
    print("/lib/" + arguments[0].partition("=")[2])
    sys.exit()
if "--dryrun" in arguments:
    print("#$ TOP=" + os.path.dirname(os.path.dirname(sys.argv[0])), file=sys.stderr)
    sys.exit()
output = arguments[arguments.index("-o") + 1]
source = arguments[arguments.index("-c") + 1] if "-c" in arguments else None
with open("{calls}", "a") as calls:
    folder = os.path.basename(os.path.dirname(output))
    print(name, f"{{folder}}/{{os.path.basename(source)}}" if source else "linked", file=calls)
if source and os.environ.get("BROKEN_SOURCE") == source:
    print("some remark", file=sys.stderr)
    print(f"{{source}}(1): error: pretended", file=sys.stderr)
    sys.exit(1)
if source and source in os.environ.get("WARNING_IN_SOURCE", "").split():
    strict = "-Werror" in arguments
    print(f"{{source}}(1): {{'error' if strict else 'warning'}}: pretended", file=sys.stderr)
    if strict:
        sys.exit(1)
with open(output, "w") as file:
    file.write(repr(arguments))
if source:
    headers, left = set(), [source]
    while left:
        path = left.pop()
        for name in re.findall(r'#include "(.+)"', open(path).read()):
            beside = os.path.normpath(os.path.join(os.path.dirname(path), name))
            header = beside if os.path.exists(beside) else f"csrc/{{name}}"
            if header not in headers:
                headers.add(header)
                left.append(header)
    with open(arguments[arguments.index("-MF") + 1], "w") as file:
        file.write(f"{{output}}: {{source}} {{' '.join(sorted(headers))}}\\n")
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


def write_compiler(path: Path, calls: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(COMPILER.format(python=sys.executable, calls=calls), encoding="utf-8")
    path.chmod(0o755)


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
        for name in ("cxx", "nvcc"):
            write_compiler(toolkit / "bin" / name, self.folder / "calls.txt")

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
