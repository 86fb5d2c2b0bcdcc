"""Prints what limits the main loop of a compiled kernel: a model, made from the machine code (SASS) without a GPU.

    python csrc/cuda/model.py build/.../contrastive_tensor_cores.o --architecture 90 --kernel Li256E

For each kernel with products on the tensor cores it finds the loop around them and counts the instructions that one
block issues in one turn, which is one tile, by the pipe that executes them. For each pipe it prints the cycles that
one multiprocessor needs for these at least. The largest is the limiter.

The model knows no latency of memory, no bank conflict, no wait at a barrier and no clock. `serial` is a figure of
another kind: each instruction carries a count of cycles for which its warp must not issue the next one. Their sum,
times the warps that share a scheduler, is what the tile takes where these warps never overlap. A card takes a time
between the limiter and `serial`, plus the waits that the model does not know.

Rates of one multiprocessor in a cycle:
  tensor     products of 16-bit values: 1024 (8.0), 512 (8.6, 8.9), 2048 (9.0); tf32 has half. NVIDIA A100, Ampere GA102
             and H100 whitepapers. On 9.0 only wgmma reaches it: mma.sync, which these kernels use, was measured at 62 %
             (Luo et al., arXiv 2402.13499).
  shared     128 bytes: 32 banks of 4 bytes. CUDA C++ programming guide, section on compute capabilities.
  global     64 bytes from the second-level cache. NVIDIA A100 whitepaper.
  special    16 results of the special function unit; float 128 (8.0: 64) results of float32 additions and
             multiplications; other 64 results of all else. CUDA C++ programming guide, arithmetic instructions.
  issue      4 instructions, one a scheduler.

cuobjdump comes from the CUDA toolkit or from PyPI, in the package nvidia-cuda-cuobjdump; it needs nvidia-cuda-nvdisasm.
`pip install '.[machine-code]'` installs both.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

SCHEDULERS = 4  # of a multiprocessor
WARPS = 8  # of a block of each kernel whose loop is modelled
REGISTERS = 65536
TENSOR_RATE = {"80": 1024, "86": 512, "89": 512, "90": 2048}
FLOAT_RATE = {"80": 64, "86": 128, "89": 128, "90": 128}
PIPES = "tensor", "shared", "global", "special", "float", "other", "issue"

_CODE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/")
_CONTROL = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_REGISTER = re.compile(r"\bR(\d+)\b")
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str  # with its predicate and operands
    stall: int  # cycles for which the warp issues nothing afterwards

    @property
    def name(self) -> str:
        """As in HMMA.16816.F32.BF16."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]

    @property
    def target(self) -> int | None:
        match = re.search(r"0x([0-9a-f]+)", self.text) if self.kind == "BRA" else None
        return int(match[1], 16) if match else None


@dataclass(frozen=True)
class Kernel:
    name: str  # mangled
    architecture: str  # as in "90"
    registers: int
    stack: int  # bytes of a thread, where spilled registers lie
    code: tuple[Instruction, ...]

    @property
    def label(self) -> str:
        if match := re.search(r"TilesINS\w+?\d([A-Z]\w+?)ELi(\d+)E.*Lb([01])E", self.name):
            return f"{match[1]} d={match[2]}, {'loss and query gradient' if match[3] == '1' else 'loss'}"
        return self.name

    @property
    def blocks_by_registers(self) -> int:
        """How many blocks a multiprocessor has registers for; a warp takes them in units of 256."""
        return REGISTERS // (-(-self.registers * 32 // 256) * 256 * WARPS)


@dataclass(frozen=True)
class Loop:
    """One turn of a main loop, as a warp executes it away from the edges of the matrices."""

    code: tuple[Instruction, ...]
    branches: int  # in the loop, its own among them
    skipped: int  # instructions that only the tiles at the edges execute

    def count(self, kind: str) -> int:
        return sum(instruction.kind == kind for instruction in self.code)


def cuobjdump_path() -> str | None:
    """Of PyPI's package, else the first in PATH, else that of the usual folder."""
    folders = [*os.get_exec_path(), "/usr/local/cuda/bin"]
    package = find_spec("nvidia")
    for root in package.submodule_search_locations or () if package else ():
        folders = [*(str(path) for path in sorted(Path(root).glob("*/bin"))), *folders]
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def kernels_of(file: Path, architecture: str, cuobjdump: str) -> list[Kernel]:
    """The kernels of a cubin, an object file or a library that are compiled for `architecture`, as in "90".

    Raises RuntimeError where cuobjdump fails or there are none.
    """
    usage = _output(cuobjdump, "-arch", f"sm_{architecture}", "-res-usage", str(file))
    resources = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage)
    code = dict(_functions(_output(cuobjdump, "-arch", f"sm_{architecture}", "-sass", str(file)).splitlines()))
    kernels = [
        Kernel(name, architecture, int(registers), int(stack), tuple(code[name]))
        for name, registers, stack in resources
        if name in code
    ]
    if not kernels:
        raise RuntimeError(f"{file} holds no kernel for sm_{architecture}")
    return kernels


def main_loop(kernel: Kernel) -> Loop | None:
    """The outermost loop around products on the tensor cores, or None where there is no such loop.

    A branch ahead, within the loop, is taken to skip what only edges need.
    """
    place = {instruction.address: index for index, instruction in enumerate(kernel.code)}
    spans = []
    for end, instruction in enumerate(kernel.code):
        start = place.get(instruction.target or 0, end + 1) if instruction.target is not None else end + 1
        if start < end and any(i.kind == "HMMA" for i in kernel.code[start:end]):
            spans.append((end - start, start, end))
    if not spans:
        return None
    _, start, end = max(spans)
    code, skipped, index = [], 0, start
    while index <= end:
        instruction = kernel.code[index]
        code.append(instruction)
        ahead = place.get(instruction.target or 0, 0)
        if instruction.target is not None and index < ahead <= end:
            skipped += ahead - index - 1
            index = ahead
        else:
            index += 1
    branches = sum(instruction.kind == "BRA" for instruction in kernel.code[start : end + 1])
    return Loop(tuple(code), branches, skipped)


def products_ahead(loop: Loop) -> list[int]:
    """For each load of fragments: how many products are issued between it and the first that needs it."""
    ahead = []
    for index, instruction in enumerate(loop.code):
        if instruction.kind != "LDSM":
            continue
        first = int((_REGISTER.search(instruction.text) or ["", "0"])[1])
        width = int(instruction.name.rsplit(".", 1)[1]) if instruction.name[-1].isdigit() else 1
        loaded, between = set(range(first, first + width)), 0
        for other in loop.code[index + 1 :]:
            if other.kind != "HMMA":
                continue
            _, a, b, _ = _operands(other)
            if loaded & {a, a + 1, a + 2, a + 3, b, b + 1}:
                ahead.append(between)
                break
            between += 1
    return ahead


def bytes_in_flight(kernel: Kernel) -> int:
    """The most bytes of device memory that a thread has asked for before it waits for any of them.

    Within code without branches and barriers: a load is on its way until an instruction reads one of its registers.
    """
    most, under_way, waited_for = 0, 0, set[int]()
    for instruction in kernel.code:
        operands = instruction.text.split(instruction.name, 1)[1]
        target, _, sources = operands.partition(",")
        read = {int(number) for number in _REGISTER.findall(operands if "[" in target else sources)}
        read |= {number + 1 for number in read}  # half of the operands are pairs
        if instruction.kind in ("BRA", "BAR", "EXIT", "CALL", "RET", "BSYNC", "WARPSYNC") or read & waited_for:
            under_way, waited_for = 0, set()
        if instruction.kind == "LDG" and (match := _REGISTER.search(target)):
            size = next((bytes for part, bytes in _BYTES.items() if part in instruction.name.split(".")), 4)
            waited_for |= set(range(int(match[1]), int(match[1]) + -(-size // 4)))
            under_way += size
            most = max(most, under_way)
    return most


def cycles(kernel: Kernel, loop: Loop) -> dict[str, float]:
    """Cycles of one multiprocessor, with one block on it, for a tile: of each pipe, and `serial`."""
    of_pipes: Counter[str] = Counter()
    for instruction in loop.code:
        for pipe, amount in _work(instruction, kernel.architecture):
            of_pipes[pipe] += WARPS * amount
    of_scheduler = -(-WARPS // SCHEDULERS)
    return {**{pipe: of_pipes[pipe] for pipe in PIPES}, "serial": of_scheduler * sum(i.stall for i in loop.code)}


def table(kernels: Sequence[Kernel]) -> str:
    """In Markdown: a line for each kernel that has a main loop."""
    columns = [*PIPES, "limiter", "serial", "instructions", "products", "loads", "branches", "registers", "stack"]
    lines = ["| kernel | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for kernel in sorted(kernels, key=lambda kernel: (len(kernel.label), kernel.label)):
        loop = main_loop(kernel)
        if loop is None:
            continue
        found = cycles(kernel, loop)
        entries = [
            *(f"{found[pipe]:.0f}" for pipe in PIPES),
            max(PIPES, key=lambda pipe: found[pipe]),
            f"{found['serial']:.0f}",
            *(str(n) for n in (len(loop.code), loop.count("HMMA"), loop.count("LDSM"), loop.branches)),
            *(str(n) for n in (kernel.registers, kernel.stack)),
        ]
        lines.append(f"| {kernel.label} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def _work(instruction: Instruction, architecture: str) -> Iterator[tuple[str, float]]:
    """Cycles of the pipes of a multiprocessor for an instruction of one warp."""
    name, kind = instruction.name, instruction.kind
    yield "issue", 1 / SCHEDULERS
    if kind == "HMMA":
        depth = {"16816": 16, "1688": 8, "1684": 4}[name.split(".")[1]]
        yield "tensor", 16 * 8 * depth * (2 if "TF32" in name else 1) / TENSOR_RATE[architecture]
    elif kind == "LDSM":
        yield "shared", int(name.rsplit(".", 1)[1]) if name[-1].isdigit() else 1
    elif kind in ("LDS", "STS", "LDGSTS", "LDG", "STG"):
        size = next((int(part) for part in name.split(".") if part in ("64", "128")), 32)
        if kind in ("LDS", "STS", "LDGSTS"):
            yield "shared", size / 32
        if kind in ("LDGSTS", "LDG", "STG"):
            yield "global", 2 * size / 32
    elif kind == "MUFU":
        yield "special", 32 / 16
    elif kind in ("FADD", "FMUL", "FFMA"):
        yield "float", 32 / FLOAT_RATE[architecture]
    elif kind not in ("BRA", "BAR", "NOP", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "BSSY", "BSYNC"):
        yield "other", 32 / 64


def _operands(product: Instruction) -> list[int]:
    """The first registers of the result and of a, b and c of an HMMA; -1 for the zero register."""
    operands = product.text.split(product.name, 1)[1].split(",")
    return [int(match[1]) if (match := _REGISTER.search(operand)) else -9 for operand in operands[:4]]


def _functions(lines: Sequence[str]) -> Iterator[tuple[str, list[Instruction]]]:
    name, code = "", []
    address, text = 0, ""
    for line in lines:
        if match := re.search(r"Function : (\S+)", line):
            if name:
                yield name, code
            name, code = match[1], []
        elif match := _CODE.match(line):
            address, text = int(match[1], 16), match[2]
        elif (match := _CONTROL.match(line)) and text:
            code.append(Instruction(address, text, int(match[1], 16) >> 41 & 15))
            text = ""
    if name:
        yield name, code


def _output(*command: str) -> str:
    # cuobjdump calls nvdisasm, which lies beside it.
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(command[0]).parent), *os.get_exec_path()])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description="Models the main loops of compiled kernels.")
    parser.add_argument("file", type=Path, help="a cubin, an object file of nvcc's, or the built module")
    parser.add_argument("--architecture", default="90", choices=sorted(TENSOR_RATE))
    parser.add_argument("--kernel", default="", help="only kernels whose mangled name contains this text")
    options = parser.parse_args()
    cuobjdump = cuobjdump_path()
    if cuobjdump is None:
        sys.exit("cuobjdump is missing; install it with `pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`")
    print("A model made from the machine code, not a measurement: cycles of a multiprocessor for one tile.\n")
    kernels = kernels_of(options.file, options.architecture, cuobjdump)
    print(table([kernel for kernel in kernels if options.kernel in kernel.name]))


if __name__ == "__main__":
    main()
