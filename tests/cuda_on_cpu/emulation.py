"""Compiles files of csrc/cuda by g++ for the CPU and calls them. See README.md in this folder."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
TORCH = Path(torch.__file__).resolve().parent
TORCH_TARGET = "0x020b000000000000"  # as in setup.py
SANITIZED = os.environ.get("FEDKERNELS_SANITIZED") == "1"  # in the process that test_emulation.py starts
DTYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum class DType

_COMPILER = next((path for name in ("g++", "clang++") if (path := shutil.which(name))), None)
_FLAGS = [
    *("-std=c++20", "-O1", "-g1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    *(["-fsanitize=address", "-fsanitize-recover=address", "-fno-omit-frame-pointer"] if SANITIZED else []),
]
# What memory starts as (NaN in every dtype, or large finite numbers), and whether warps and blocks run from the last to
# the first, blocks in turn. Results must be the same to the last bit.
ORDERS = ((0x7FFF, False), (0x4B4B, True))
_fresh_memory = 0x7FFF  # of the order that runs


class EmulationError(AssertionError):
    """The emulation found a fault, or a kernel's host function reported one."""


class Array(ctypes.Structure):
    """struct Array of csrc/cpu/dtype.h."""

    _fields_ = (("data", ctypes.c_void_p), ("dtype", ctypes.c_int))


def arrays(tensors: Sequence[Tensor]) -> Any:
    return (Array * len(tensors))(*(Array(tensor.data_ptr(), DTYPES[tensor.dtype]) for tensor in tensors))


def integers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


def poison(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Memory that a kernel has to fill. It differs in the two orders, so that what is read unwritten shows."""
    entry = bytearray(_fresh_memory.to_bytes(2, "little") * (dtype.itemsize // 2))
    return torch.frombuffer(entry, dtype=dtype).expand(shape).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Library:
    """One .cu file and the emulation, loaded."""

    handle: ctypes.CDLL
    kernel: Path  # the object file of the .cu file alone

    def call(self, function: str, *arguments: object) -> None:
        """Calls once. A tensor goes as its address; None is a null pointer, also the stream."""
        call = getattr(self.handle, function)
        call.restype = ctypes.c_char_p
        error = call(*(_plain(argument) for argument in arguments))
        if error is not None:
            raise EmulationError(error.decode())

    def ask(self, function: str, *arguments: object) -> int:
        """A number from the host, such as how much memory a kernel works in."""
        call = getattr(self.handle, function)
        call.restype = ctypes.c_int64
        return int(call(*(_plain(argument) for argument in arguments)))

    def settings(self, poison: int, reversed_: bool, multiprocessors: int, shared_limit: int) -> None:
        self.handle.cuda_on_cpu_settings(poison, int(reversed_), multiprocessors, ctypes.c_size_t(shared_limit))

    def results(
        self, run: Callable[[Callable[..., None]], Any], multiprocessors: int = 4, shared_limit: int = 227 << 10
    ) -> Any:
        """run(call) in each order of the threads, on a device like this; -> its tensors, which must be equal."""
        global _fresh_memory
        found = []
        for poison, reversed_ in ORDERS:
            _fresh_memory = poison
            self.settings(poison, reversed_, multiprocessors, shared_limit)

            def call(function: str, *arguments: object, order: tuple[int, bool] = (poison, reversed_)) -> None:
                self.settings(*order, multiprocessors, shared_limit)
                self.call(function, *arguments)

            found.append(run(call))
        for one, other in zip(_flat(found[0]), _flat(found[1]), strict=True):
            assert torch.equal(one.nan_to_num(nan=-7e77), other.nan_to_num(nan=-7e77)), (
                "the result depends on the order of the threads or on what memory held before"
            )
        return found[0]


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for part in value for tensor in _flat(part)]


def _plain(argument: object) -> object:
    if isinstance(argument, Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, bool) or argument is None:
        return ctypes.c_int(argument) if isinstance(argument, bool) else ctypes.c_void_p(None)
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return argument


class Compiler:
    """Compiles each file once in a session; `load` waits for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.libraries: dict[str, Library | EmulationError] = {}

    def load(self, source: str) -> Library:
        """`source`: the name of a file in csrc/cuda, or a path below the root."""
        if source not in self.libraries:
            path = ROOT / source if "/" in source else ROOT / "csrc/cuda" / source
            try:
                self.libraries[source] = self.compile(path.read_text(encoding="utf-8"), path.stem)
            except EmulationError as error:
                self.libraries[source] = error
        library = self.libraries[source]
        if isinstance(library, EmulationError):
            raise library
        return library

    def compile(self, text: str, name: str) -> Library:
        folder = Path(tempfile.mkdtemp(prefix=name, dir=self.folder))
        (folder / f"{name}.cpp").write_text(text, encoding="utf-8")
        include = [f"-I{HERE / 'include'}", f"-I{ROOT / 'csrc'}"]
        jobs = [("kernel.o", folder / f"{name}.cpp")]
        runtime = self.folder / "runtime.o"
        if not runtime.exists():
            jobs.append((str(runtime), HERE / "runtime.cpp"))
        with ThreadPoolExecutor() as pool:
            commands = [[_COMPILER, *_FLAGS, *include, "-c", source, "-o", folder / out] for out, source in jobs]
            list(pool.map(_run, commands))
        library = folder / f"{name}.so"
        _run([_COMPILER, *_FLAGS, "-shared", folder / "kernel.o", runtime, "-o", library])
        return Library(ctypes.CDLL(str(library)), folder / "kernel.o")

    def mutant(self, source: str, old: str, new: str) -> Library:
        """The file with a fault planted: `old`, which it holds once, becomes `new`."""
        path = ROOT / source if "/" in source else ROOT / "csrc/cuda" / source
        return self.compile(planted(path, old, new), path.stem)

    def bindings(self, text: str, name: str, kernels: str = "*.cu") -> ctypes.CDLL:
        """C++ of csrc/ops for CUDA with emulated kernels. Its operators are torch.ops.<name>'s, for the CPU."""
        require_headers_of_torch()
        kernel_files = [self.load(path.name).kernel for path in sorted((ROOT / "csrc/cuda").glob(kernels))]
        folder = Path(tempfile.mkdtemp(prefix=name, dir=self.folder))
        (folder / "bindings.cpp").write_text(text, encoding="utf-8")
        flags = [flag for flag in _FLAGS if flag != "-O1"]  # they compile in half the time without
        flags += ["-fvisibility=hidden", f"-DCUDA_ON_CPU_LIBRARY={name}", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
        include = [f"-I{HERE / 'include'}", f"-I{ROOT / 'csrc'}", "-isystem", TORCH / "include"]
        _run([_COMPILER, *flags, *include, "-c", folder / "bindings.cpp", "-o", folder / "bindings.o"])
        objects = [folder / "bindings.o", *kernel_files, self.folder / "runtime.o"]
        library = folder / f"{name}.so"
        _run([_COMPILER, *_FLAGS, "-shared", *objects, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-o", library])
        return ctypes.CDLL(str(library))


def planted(path: Path, old: str, new: str) -> str:
    """The file's text with `old`, which it holds once, as `new`."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path} holds {text.count(old)} times: {old}"
    return text.replace(old, new)


def _run(command: Sequence[Any]) -> None:
    # Preloaded, AddressSanitizer would watch the compiler too, which then takes several times as long.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise EmulationError(f"{' '.join(str(part) for part in command)}\n{done.stderr}")


def require_compiler() -> None:
    if _COMPILER is None:
        pytest.skip("no C++ compiler")


def require_headers_of_torch() -> None:
    if not (TORCH / "include/torch/csrc/stable/library.h").is_file():
        pytest.skip("no C++ headers of torch")
