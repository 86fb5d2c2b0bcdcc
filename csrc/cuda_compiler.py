"""nvcc and the static CUDA runtime, for the kernels of csrc/cuda."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Compute capabilities of a complete build, of which nvcc may not know the newest.
ARCHITECTURES = "80 86 89 90 100 120"
NVCC_FLAGS = [
    *("-std=c++20", "-O3", "-Icsrc", "-DNDEBUG"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"),
]
NVCC_WERROR = ["-Werror", "all-warnings", "-Xcompiler", "-Werror"]


@dataclass(frozen=True)
class CudaCompiler:
    nvcc: str
    version: str  # what nvcc says of itself
    runtime: Path  # libcudart_static.a
    architectures: list[str]

    @property
    def targets(self) -> str:
        """What the kernels are compiled for, as in "sm_80 sm_90 compute_90"."""
        ptx = newest_for_all_later(self.architectures)
        return " ".join([*(f"sm_{name}" for name in self.architectures), *([f"compute_{ptx}"] if ptx else [])])

    @property
    def left_out(self) -> list[str]:
        """Architectures of a complete build that this one does not compile for, as in "sm_86"."""
        return [f"sm_{name}" for name in ARCHITECTURES.split() if name not in self.architectures]

    def command(self, source: Path, output: Path) -> tuple[str, ...]:
        flags = [*NVCC_FLAGS, *architecture_flags(self.architectures), "-MMD", "-MF", f"{output}.d"]
        flags += NVCC_WERROR * warnings_are_errors()
        return (self.nvcc, *flags, "-c", str(source), "-o", str(output))


def warnings_are_errors() -> bool:
    """FEDKERNELS_WERROR, which developers' builds set: a user's newer compiler may warn of what none warned of before.

    An invalid value ends the build.
    """
    given = os.environ.get("FEDKERNELS_WERROR") or "0"
    if given not in ("0", "1"):
        raise SystemExit(f"FEDKERNELS_WERROR must be 0 or 1, got {given!r}")
    return given == "1"


def find_cuda_compiler() -> CudaCompiler:
    """Raises RuntimeError where nvcc or its static runtime is missing or nvcc does not run."""
    nvcc = nvcc_path()
    if nvcc is None:
        raise RuntimeError("no nvcc was found")
    root = _toolkit_root(nvcc)
    folders = [root / name for name in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib")]
    runtime = next((path / "libcudart_static.a" for path in folders if (path / "libcudart_static.a").is_file()), None)
    if runtime is None:
        raise RuntimeError(f"libcudart_static.a was not found below {root}")
    return CudaCompiler(nvcc, _output(nvcc, "--version"), runtime, architectures(nvcc))


def nvcc_path() -> str | None:
    """CUDA_HOME's nvcc, else the first in PATH, else that of the usual folder."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [f"{home}/bin"] if home else [*os.get_exec_path(), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def architectures(nvcc: str) -> list[str]:
    """FEDKERNELS_CUDA_ARCHITECTURES in ascending order; by default those of a complete build that nvcc knows.

    The variable holds compute capabilities, as in "80 86" or "8.0;8.6", or "native" for those of this machine's GPUs.
    An invalid value ends the build.
    """
    given = os.environ.get("FEDKERNELS_CUDA_ARCHITECTURES") or " ".join(_known(nvcc))
    if given.strip() == "native":
        given = _of_this_machine()
    names = {name.replace(".", "").removeprefix("sm_") for name in re.split(r"[\s,;]+", given) if name}
    if not names or not all(re.fullmatch(r"\d{2,3}[af]?", name) for name in names):
        raise SystemExit(f"FEDKERNELS_CUDA_ARCHITECTURES must be native, or a list as in '80 90', got {given!r}")
    return sorted(names, key=lambda name: (int(name.rstrip("af")), name))


def newest_for_all_later(names: Sequence[str]) -> str | None:
    """The architecture whose PTX is compiled in, from which later GPUs compile for themselves.

    PTX of an architecture with a suffix, as in "90a", runs on that architecture (or its family) alone.
    """
    return next((name for name in reversed(names) if name.isdigit()), None)


def architecture_flags(names: Sequence[str]) -> list[str]:
    """nvcc's arguments for machine code of each architecture, and PTX of the newest that all later GPUs run."""
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    ptx = newest_for_all_later(names)
    return [*flags, f"-gencode=arch=compute_{ptx},code=compute_{ptx}"] if ptx else flags


def _known(nvcc: str) -> list[str]:
    """The architectures of a complete build that this nvcc knows; all where it does not say which it knows."""
    try:
        listed = _output(nvcc, "--list-gpu-code").split()
    except RuntimeError:
        return ARCHITECTURES.split()
    return [name for name in ARCHITECTURES.split() if f"sm_{name}" in listed]


def _of_this_machine() -> str:
    """The compute capabilities of the GPUs that nvidia-smi shows, as in "9.0 8.6"; ends the build if there is none."""
    try:
        shown = _output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split()
    except RuntimeError:
        shown = []
    if not shown:
        raise SystemExit(
            "FEDKERNELS_CUDA_ARCHITECTURES=native needs a GPU that nvidia-smi shows, and there is none; give its "
            "compute capability instead, as in FEDKERNELS_CUDA_ARCHITECTURES=9.0"
        )
    return " ".join(shown)


def _toolkit_root(nvcc: str) -> Path:
    """The toolkit's folder; `nvcc` may be a script that calls one elsewhere."""
    top = re.search(r"^#\$ TOP=(.+)$", _output(nvcc, "--dryrun", "-x", "cu", os.devnull), re.MULTILINE)
    return Path(top[1] if top else Path(nvcc).resolve().parent.parent)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["it gave no message"]
        first = next((line for line in lines if "error" in line or "fatal" in line), lines[0])
        raise RuntimeError(f"nvcc does not run: {first}")
    return done.stdout + done.stderr
