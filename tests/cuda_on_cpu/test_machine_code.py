"""What the compiler made of the main loops: csrc/cuda/model.py, and the machine code of the contrastive kernels.

Needs nvcc and cuobjdump (`pip install '.[machine-code]'`), and no GPU.
"""

import functools
import importlib.util
import re
import runpy
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.cuda_on_cpu.emulation import ROOT, SANITIZED

TILES = re.compile(r"TilesI.*?Li(\d+)E.*?Lb([01])E")


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.spec_from_file_location("cuda_model", ROOT / "csrc/cuda/model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its data classes look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def compiled(model, tmp_path_factory):
    """compiled(name, architecture) -> the kernels of csrc/cuda/<name>.cu."""
    build = runpy.run_path(str(ROOT / "csrc/cuda_compiler.py"))
    nvcc, cuobjdump = build["nvcc_path"](), model.cuobjdump_path()
    if SANITIZED:
        pytest.skip("once is enough")
    if nvcc is None or cuobjdump is None:
        pytest.skip(f"no {'nvcc' if nvcc is None else 'cuobjdump'}")

    @functools.cache
    def kernels(name, architecture):
        target = tmp_path_factory.mktemp("machine_code") / f"{name}_{architecture}.cubin"
        flags = [*build["NVCC_FLAGS"], f"-gencode=arch=compute_{architecture},code=sm_{architecture}"]
        command = [nvcc, *flags, "-cubin", str(ROOT / f"csrc/cuda/{name}.cu"), "-o", str(target)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return model.kernels_of(target, architecture, cuobjdump)

    return kernels


@pytest.fixture(scope="module")
def kernels(model, compiled):
    """kernels(architecture) -> the main loops of contrastive_tensor_cores.cu by (width, with the gradient)."""

    @functools.cache
    def main_loops(architecture):
        return [
            (tuple(map(int, TILES.search(kernel.name).groups())), kernel, model.main_loop(kernel))
            for kernel in compiled("contrastive_tensor_cores", architecture)
            if "contrastive_kernel" in kernel.name
        ]

    return main_loops


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_main_loops(model, kernels, architecture):
    found = kernels(architecture)
    assert sorted(tiles for tiles, *_ in found) == sorted(2 * [(w, g) for w in (64, 128, 256) for g in (0, 1)])
    for (width, gradient), kernel, loop in found:
        label = f"{kernel.label} on {architecture}"
        assert loop is not None, label
        assert loop.branches == 2, label  # its own, and one ahead of what only the edges need
        assert loop.skipped > 0, label
        assert kernel.stack == 0, label
        assert kernel.registers <= 255, label
        # Of 8 warps and 128 x 64 logits: nothing is multiplied twice, and no load of fragments is made twice.
        assert loop.count("HMMA") == (1 + gradient) * 128 * 64 * width // (16 * 8 * 16) // 8, label
        assert loop.count("LDSM") == width // 16 * 4 + gradient * (4 * 2 + 4 * width // 32), label
        # The next tile is on its way, 16 bytes a copy, before the first product.
        names = [i.name for i in loop.code]
        first_product = next(i for i, name in enumerate(names) if name.startswith("HMMA"))
        copies = sum(".128" in name and name.startswith("LDGSTS") for name in names[:first_product])
        assert copies == 64 * width * 2 // 16 // 256, label
        # Not in the loop: divisions, and loads from device memory that are waited for.
        assert not any(name.startswith(("LDG.", "I2F", "MUFU.RCP")) for name in names), label
        # Fragments are loaded a step ahead of the products that need them.
        assert statistics.median(model.products_ahead(loop)) >= 4, label
        assert loop.count("MUFU") == 2 * 4 * 4 + 2 * 2, label  # one instruction an exponential


# Cycles a tile by the stall counts of sm_90.
@pytest.mark.nightly
@pytest.mark.parametrize(("width", "serial", "limiter"), [(128, 3200, 2300), (256, 5000, 4000)])
def test_cycles_of_bfloat16(model, kernels, width, serial, limiter):
    for tiles, kernel, loop in kernels("90"):
        if tiles == (width, 1) and "BFloat16" in kernel.name:
            cycles = model.cycles(kernel, loop)
            assert cycles["serial"] <= serial
            assert max(cycles[pipe] for pipe in model.PIPES) <= limiter
            return
    raise AssertionError("no such kernel")


def warps_by_registers(model, kernel):
    return model.REGISTERS // (-(-kernel.registers * 32 // 256) * 256)


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_a_team_loads_entries_ahead_of_their_use(model, compiled, architecture):
    (kernel,) = compiled("unbalanced_ot_team", architecture)
    place = {instruction.address: index for index, instruction in enumerate(kernel.code)}
    ends = {index: place.get(instruction.target or 0, index + 1) for index, instruction in enumerate(kernel.code)}
    loops = [kernel.code[start : end + 1] for end, start in ends.items() if start < end < start + 1000]
    # the passes over the entries: four rows' costs, plan, point and row's dual; one load at a time had 12 to 24 bytes
    passes = [loop for loop in loops if sum(instruction.kind == "LDG" for instruction in loop) >= 24]
    assert len(passes) >= 4
    assert min(model.bytes_in_flight(replace(kernel, code=loop)) for loop in passes) >= 32
    assert warps_by_registers(model, kernel) >= 12
    assert kernel.stack == 0


CODE = """
		Function : kernel
        /*0000*/                   MOV R1, c[0x0][0x28] ;                  /* 0x00000a0000017a02 */
                                                                           /* 0x000fe20000000f00 */
        /*0010*/                   LDSM.16.M88.4 R4, [R20] ;               /* 0x000000001404783b */
                                                                           /* 0x000e280000000200 */
        /*0020*/                   LDSM.16.M88.4 R8, [R20+0x10] ;          /* 0x000000001404783b */
                                                                           /* 0x000e280000000200 */
        /*0030*/               @P0 BRA 0x60 ;                              /* 0x0000000000007947 */
                                                                           /* 0x000fea0003800000 */
        /*0040*/                   FADD R0, R0, 1 ;                        /* 0x3f80000000007421 */
                                                                           /* 0x000fc40000000000 */
        /*0050*/                   FADD R0, R0, 1 ;                        /* 0x3f80000000007421 */
                                                                           /* 0x000fc40000000000 */
        /*0060*/                   HMMA.16816.F32.BF16 R12, R4, R24, R12 ; /* 0x000000180c0c723c */
                                                                           /* 0x001fec000004180c */
        /*0070*/                   HMMA.16816.F32.BF16 R12, R8, R24, R12 ; /* 0x000000180c0c723c */
                                                                           /* 0x001fec000004180c */
        /*0080*/              @!P1 BRA 0x10 ;                              /* 0x0000000000007947 */
                                                                           /* 0x000fea000383ffff */
"""


def test_the_model_reads_a_loop(model):
    ((name, code),) = model._functions(CODE.splitlines())
    kernel = model.Kernel(name, "90", 100, 0, tuple(code))
    loop = model.main_loop(kernel)
    assert [instruction.kind for instruction in loop.code] == ["LDSM", "LDSM", "BRA", "HMMA", "HMMA", "BRA"]
    assert (loop.branches, loop.skipped) == (2, 2)
    assert [instruction.stall for instruction in loop.code] == [4, 4, 5, 6, 6, 5]
    assert model.products_ahead(loop) == [0, 1]
    cycles = model.cycles(kernel, loop)  # of 8 warps, two a scheduler
    assert cycles["serial"] == 2 * 30
    assert cycles["tensor"] == 8 * 2 * 16 * 8 * 16 / 2048
    assert cycles["shared"] == 8 * 2 * 4
    assert cycles["issue"] == 8 * 6 / 4
    assert "| kernel | 16 | 64 |" in model.table([kernel])


def test_the_model_counts_loads_under_way(model):
    texts = [
        "LDG.E.128.CONSTANT R4, [R2.64]",
        "@!P0 LDG.E.64 R8, [R2.64+0x10]",
        "FADD R0, R0, 1",
        "FADD R0, R0, R6",  # waits for the first
        "LDG.E.U16 R5, [R2.64]",
        "@P1 BRA 0x10",
        "LDG.E R5, [R2.64]",
        "STG.E.64 [R2.64], R4",  # a pair, whose second half has been loaded
        "LDG.E R5, [R2.64]",
    ]

    def in_flight(texts):
        code = tuple(model.Instruction(16 * k, text, 1) for k, text in enumerate(texts))
        return model.bytes_in_flight(model.Kernel("kernel", "90", 100, 0, code))

    assert in_flight(texts) == 24
    assert in_flight(texts[3:]) == 4
    assert in_flight(texts[6:]) == 4
    assert in_flight([texts[8], texts[4].replace("R5", "R20")]) == 6
    assert in_flight([texts[2]]) == 0


def test_the_model_without_a_loop(model):
    kernel = model.Kernel("kernel", "90", 100, 0, (model.Instruction(0, "EXIT", 1),))
    assert model.main_loop(kernel) is None
    assert len(model.table([kernel]).splitlines()) == 2
