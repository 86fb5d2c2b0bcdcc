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

PRECISIONS = "bfloat16", "float16", "tf32"
TILES = re.compile(r"ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E.*PassKindE(\d)")
SUMS, SUMS_AND_GRADIENT, GIVEN_COLUMNS, GIVEN_BOTH = range(4)


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
    """kernels(precision, architecture) -> the main loops of contrastive_<precision>.cu by (width, rows, kind)."""

    @functools.cache
    def main_loops(precision, architecture):
        return [
            (tuple(map(int, TILES.search(kernel.name).groups())), kernel, model.main_loop(kernel))
            for kernel in compiled(f"contrastive_{precision}", architecture)
            if "contrastive_kernel" in kernel.name
        ]

    return main_loops


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["80", "90"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_main_loops(model, kernels, precision, architecture):
    found = kernels(precision, architecture)
    assert len(found) == (32 if precision == "tf32" else 36)
    widths = {64, 128, 256, 512, *(() if precision == "tf32" else (768, 1024))}
    assert {tiles[0] for tiles, *_ in found} == widths
    size, depth = (4, 8) if precision == "tf32" else (2, 16)
    for (width, down, across, of_rows, columns, kind), kernel, loop in found:
        label = f"{kernel.label} on {architecture}"
        assert loop is not None, label
        rows, warps, products = 16 * down * of_rows, down * across, 1 if kind == SUMS else 2
        # Its own branch, and one ahead of what only the edges need. Where one warp copies the sums of the columns, the
        # compiler may lead the others around that.
        assert loop.branches in {2, 3 if kind in (GIVEN_COLUMNS, GIVEN_BOTH) and columns == 32 else 2}, label
        assert loop.skipped > 0, label
        assert kernel.stack == 0, label
        assert kernel.registers <= 255, label
        assert kernel.blocks_by_registers >= (1 if kernel.registers > 128 else 2) * (8 // warps), label
        # Nothing is multiplied twice, and no load of fragments is made twice.
        assert loop.count("HMMA") == products * rows * columns * width // (16 * 8 * depth) // warps, label
        of_columns, steps = columns // (8 * across), width // depth
        of_logits = steps * of_rows + (steps * of_columns + 1) // 2
        of_values = columns // depth * of_rows + (0 if size == 4 else columns // 16 * width // (16 * across))
        assert loop.count("LDSM") == of_logits + (kind != SUMS) * of_values, label
        # The next tile is on its way, 16 bytes a copy, before the first product.
        copies = columns * width * size // 16 // (32 * warps)
        names = [i.name for i in loop.code]
        first_product = next(i for i, name in enumerate(names) if name.startswith("HMMA"))
        assert sum(".128" in name and name.startswith("LDGSTS") for name in names[:first_product]) == copies, label
        # Not in the loop: divisions, and loads from device memory that are waited for.
        assert not any(name.startswith(("LDG.", "I2F", "MUFU.RCP")) for name in names), label
        # Fragments are loaded a step ahead of the products that need them.
        ahead = model.products_ahead(loop)
        assert statistics.median(ahead) >= min(4, of_rows * of_columns), label
        # One instruction an exponential.
        exponentials = of_rows * of_columns * 4 * (2 if kind == GIVEN_BOTH else 1)
        factors = 0 if kind in (GIVEN_COLUMNS, GIVEN_BOTH) else 2 * of_rows
        assert loop.count("MUFU") == exponentials + factors, label


# Cycles a tile by the stall counts of sm_90; in brackets those of the kernels before their widths were parameters.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("width", "columns", "kind", "serial", "limiter"),
    [
        (256, 64, SUMS_AND_GRADIENT, 5000, 4000),  # [12,000]
        (256, 64, GIVEN_COLUMNS, 4800, 4000),  # [14,400]
        (512, 32, SUMS_AND_GRADIENT, 2700, 3600),  # [7,100]
        (512, 64, SUMS_AND_GRADIENT, 4700, 5300),  # [2 x 7,100]
        (512, 64, GIVEN_COLUMNS, 4400, 5300),
        (768, 32, SUMS_AND_GRADIENT, 2300, 3800),
        (1024, 32, SUMS_AND_GRADIENT, 2800, 4900),
    ],
)
def test_cycles_of_bfloat16(model, kernels, width, columns, kind, serial, limiter):
    ((kernel, loop),) = (
        (kernel, loop)
        for tiles, kernel, loop in kernels("bfloat16", "90")
        if (tiles[0], *tiles[-2:]) == (width, columns, kind)
    )
    cycles = model.cycles(kernel, loop)
    assert cycles["serial"] <= serial
    assert max(cycles[pipe] for pipe in model.PIPES) <= limiter


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
