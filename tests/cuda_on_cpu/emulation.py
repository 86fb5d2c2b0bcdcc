"""Compiles files of csrc/cuda by g++ for the CPU and calls them. See README.md in this folder."""

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CUDA, OPS = ROOT / "csrc/cuda", ROOT / "csrc/ops"
TORCH = Path(torch.__file__).resolve().parent
TORCH_FLAGS = ("-isystem", TORCH / "include", "-DTORCH_TARGET_VERSION=0x020b000000000000")  # as in setup.py
SANITIZED = os.environ.get("FEDKERNELS_SANITIZED") == "1"  # in the process that test_emulation.py starts

COMPILER = shutil.which("g++") or shutil.which("clang++")
_FLAGS = (
    *("-std=c++20", "-g1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", f"-I{HERE / 'include'}", f"-I{ROOT / 'csrc'}"),
    *(("-fsanitize=address", "-fsanitize-recover=address", "-fno-omit-frame-pointer") if SANITIZED else ()),
)
_KEPT = ROOT / "build/cuda_on_cpu"
_WEEK = 7 * 24 * 3600  # seconds
# What memory starts as (NaN in every dtype, or large finite numbers), and whether warps and blocks run from the last to
# the first, blocks in turn. Results must be the same to the last bit.
ORDERS = ((0x7FFF, False), (0x4B4B, True))


def set_up(
    library: ctypes.CDLL,
    order: tuple[int, bool],
    multiprocessors: int = 4,
    shared_limit: int = 227 << 10,
    grid_limit: int = 65535,
) -> None:
    """The order of the threads, and the device, for the calls that follow.

    `grid_limit`: the most blocks on the second and third side of a grid.
    """
    library.cuda_on_cpu_settings(order[0], int(order[1]), multiprocessors, ctypes.c_size_t(shared_limit), grid_limit)


def assert_same(found: Any, again: Any) -> None:
    """Tensors, or lists of them, of the two orders."""
    if isinstance(found, Tensor):
        assert torch.equal(found.nan_to_num(nan=-7e77), again.nan_to_num(nan=-7e77)), (
            "the result depends on the order of the threads or on what memory held before"
        )
    else:
        for one, other in zip(found, again, strict=True):
            assert_same(one, other)


class Compiler:
    """Compiles each file once, for all processes. What it makes is kept until it has not been used for a week."""

    def __init__(self) -> None:
        if COMPILER is None:
            pytest.skip("no C++ compiler")
        version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True).stdout
        state = hashlib.sha256(f"{COMPILER} {version} {TORCH} {torch.__version__}".encode())
        for header in sorted(header for folder in (HERE, ROOT / "csrc") for header in folder.rglob("*.h")):
            state.update(f"\0{header}\0".encode() + header.read_bytes())
        self.state = state.hexdigest()
        _KEPT.mkdir(parents=True, exist_ok=True)
        for path in _KEPT.iterdir():
            with suppress(OSError):  # another process may do the same
                if path.stat().st_mtime < time.time() - _WEEK:
                    path.unlink()

    def _make(self, name: str, *flags: object, text: str | None = None) -> Path:
        """What the compiler makes with these flags, of `text` or of the objects among them."""
        arguments = [*map(str, (*_FLAGS, *flags)), *(["-shared"] if text is None else ["-c", "-x", "c++", "-"])]
        digest = hashlib.sha256("\0".join([self.state, *arguments, text or ""]).encode()).hexdigest()
        made = _KEPT / f"{name}-{digest[:16]}"
        with open(f"{made}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
            if not made.exists():
                # Preloaded, AddressSanitizer would watch the compiler too, which then takes several times as long.
                environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
                command = [str(COMPILER), *arguments, "-o", f"{made}.new"]
                done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True)
                if done.returncode:
                    raise AssertionError(f"{' '.join(command)}\n{done.stderr}")
                os.replace(f"{made}.new", made)
            os.utime(made)
        return made

    def _runtime(self) -> Path:
        return self._make("runtime", "-O1", text=(HERE / "runtime.cpp").read_text(encoding="utf-8"))

    def bindings(self, library: str, kernels: dict[str, str]) -> Path:
        """csrc/ops/*_cuda.cpp over kernels, by name their texts, as operators torch.ops.<library> for the CPU."""
        require_headers_of_torch()
        objects = [self._make(name, "-O1", text=text) for name, text in kernels.items()]
        # Of all files at once, for torch's headers are most of the work. It takes half the time without -O1.
        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(OPS.glob("*_cuda.cpp")))
        flags = ("-fvisibility=hidden", f"-DCUDA_ON_CPU_LIBRARY={library}", *TORCH_FLAGS)
        objects += [self._make(library, *flags, text=text), self._runtime()]
        return self._make(f"{library}.so", *objects, f"-L{TORCH / 'lib'}", "-ltorch_cpu")


def text_of(source: Path) -> str:
    """The file with the header that is its other half, if it has one, in the place where it includes that."""

    def half(included: re.Match[str]) -> str:
        return (source.parent / included[1]).read_text(encoding="utf-8").replace("#pragma once\n", "")

    return re.sub(rf'#include "cuda/({source.stem}_\w+\.h)"\n', half, source.read_text(encoding="utf-8"))


def require_headers_of_torch() -> None:
    if not (TORCH / "include/torch/csrc/stable/library.h").is_file():
        pytest.skip("no C++ headers of torch")
