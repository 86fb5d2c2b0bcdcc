"""What setup.py compiles again after a change, and what an error gives: with compilers that only pretend."""

import importlib.util
import os
import platform
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.build_tree import ROOT, BuildTree

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64", reason="the instruction sets are those of x86-64"
)

SETS = ("avx2", "avx512", "baseline")
ONE = [f"cxx {name}/one.cpp" for name in SETS]
TWO = [f"cxx {name}/two.cpp" for name in SETS]
OPERATORS = ["cxx ops/module.cpp", "cxx ops/one.cpp"]
CUDA = ["nvcc cuda/one.cu", "nvcc cuda/two.cu"]
LINK = ["cxx linked"]
MODULE = "fedkernels/_C.abi3.so"
LINKER = "import pathlib, sys\npathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text(repr(sys.argv))\n"
OF_CUDA = "cuda/", "one_cuda", "libcudart_static"  # in the arguments of a link
EVERYTHING = sorted([*ONE, *TWO, *OPERATORS, "cxx ops/one_cuda.cpp", *CUDA, *LINK])


@pytest.fixture
def tree(tmp_path: Path) -> BuildTree:
    return BuildTree(tmp_path)


@pytest.fixture(scope="module")
def complete_build(tmp_path_factory: pytest.TempPathFactory) -> tuple[BuildTree, Path]:
    """A tree that is built, and a copy of it."""
    tree, copy = BuildTree(tmp_path_factory.mktemp("built")), tmp_path_factory.mktemp("copies") / "copy"
    assert tree.build() == EVERYTHING
    # With the hidden static runtime of CUDA.
    wanted = "lib64/libcudart_static.a", "-Wl,--version-script=csrc/exports.map", "-Wl,--no-as-needed"
    assert [text for text in wanted if text not in module(tree)] == []
    return tree, shutil.copytree(tree.folder, copy)


@pytest.fixture
def built(complete_build: tuple[BuildTree, Path]) -> BuildTree:
    """The same folder for each test, for absolute paths are part of the commands."""
    tree, copy = complete_build
    shutil.rmtree(tree.folder)
    shutil.copytree(copy, tree.folder)  # with the files' times
    return tree


def module(tree: BuildTree) -> str:
    return (tree.folder / MODULE).read_text()


def note(tree: BuildTree) -> str:
    return (tree.folder / "fedkernels/_C.missing").read_text()


def object_of(tree: BuildTree, name: str) -> str:
    (path,) = (tree.folder / "build/native").glob(f"*/{name}")
    return path.read_text()


def test_a_changed_file_compiles_what_includes_it(built: BuildTree) -> None:
    for changed, compiled in {
        ("csrc/cpu/two.cpp", "csrc/cuda/two.cu"): [*TWO, "nvcc cuda/two.cu"],
        ("csrc/cpu/kernel.h",): [*ONE, "cxx ops/one.cpp"],
        ("csrc/cuda/launch.h",): ["cxx ops/one.cpp", "cxx ops/one_cuda.cpp", "nvcc cuda/one.cu"],
    }.items():
        for name in changed:
            built.touch(name)
        assert built.build() == sorted([*compiled, *LINK]), changed
    before = (built.folder / MODULE).stat().st_mtime_ns
    assert built.build() == []
    assert (built.folder / MODULE).stat().st_mtime_ns == before


def test_added_and_removed_sources_and_headers(built: BuildTree) -> None:
    built.write("csrc/ops/new.cpp", '#include "ops/new.h"\n')
    built.write("csrc/ops/new.h", "")
    assert built.build() == ["cxx linked", "cxx ops/new.cpp"]
    built.write("csrc/ops/new.cpp", "")
    built.touch("csrc/ops/new.cpp")
    (built.folder / "csrc/ops/new.h").unlink()
    assert built.build() == ["cxx linked", "cxx ops/new.cpp"]
    (built.folder / "csrc/ops/new.cpp").unlink()
    assert built.build() == LINK
    assert "new.o" not in module(built)


def test_another_version_of_torch_compiles_the_operators(built: BuildTree) -> None:
    """Also an older one, and where an installer gives its files times before the build."""
    built.make_torch("2.14.0")
    for path in (built.folder / "site").rglob("*.*"):
        os.utime(path, (1, 1))
    assert built.build() == ["cxx linked", *OPERATORS, "cxx ops/one_cuda.cpp"]


@pytest.mark.parametrize(
    ("options", "newer", "expected"),
    [(["--force"], "none", EVERYTHING), ([], "cxx", EVERYTHING), ([], "nvcc", [*LINK, *CUDA])],
)
def test_force_and_another_version_of_a_compiler_compile_what_it_makes(
    built: BuildTree, options: list[str], newer: str, expected: list[str]
) -> None:
    """nvcc calls the C++ compiler, so a new version of that one makes everything."""
    assert built.build(*options, **{f"VERSION_OF_{newer}": "2"}) == expected


def test_two_torches_keep_their_own_objects(built: BuildTree) -> None:
    built.make_torch("2.12.0", folder="other")
    assert built.build(torch="other") == EVERYTHING
    of_other = module(built)
    assert "other/torch/lib" in of_other
    assert built.build() == []
    assert "site/torch/lib" in module(built)
    assert built.build(torch="other") == []
    assert module(built) == of_other


def test_an_isolated_build_uses_the_same_objects(built: BuildTree, tmp_path: Path) -> None:
    """pip's editable installation has a build_temp and a build_lib of its own each time."""
    folders = ("--build-temp", str(tmp_path / "temp"), "--build-lib", str(tmp_path / "lib"))
    built.touch("csrc/ops/one.cpp")
    assert built.build(*folders) == ["cxx linked", "cxx ops/one.cpp"]
    assert built.build() == []


def cuda_compiler(tree: BuildTree, monkeypatch: pytest.MonkeyPatch, given: str, known: str = "") -> Any:
    """What the builds of this tree use with FEDKERNELS_CUDA_ARCHITECTURES as given and an nvcc that knows these."""
    monkeypatch.setenv("CUDA_HOME", str(tree.folder / "toolkit"))
    monkeypatch.setenv("PATH", str(tree.folder / "toolkit/bin"), prepend=os.pathsep)
    monkeypatch.setenv("FEDKERNELS_CUDA_ARCHITECTURES", given)
    if known:
        monkeypatch.setenv("ARCHITECTURES_OF_NVCC", known)
    return runpy.run_path(str(ROOT / "csrc/cuda_compiler.py"))["find_cuda_compiler"]()


@pytest.mark.parametrize(
    ("known", "given", "compiled", "left_out"),
    [
        ("sm_70 sm_80 sm_86 sm_89 sm_90", "", "sm_80 sm_86 sm_89 sm_90 compute_90", "sm_100 sm_120"),
        ("", "9.0", "sm_90 compute_90", "sm_80 sm_86 sm_89 sm_100 sm_120"),
        ("", "90a", "sm_90a", "sm_80 sm_86 sm_89 sm_90 sm_100 sm_120"),  # its PTX would run there alone
        ("", "12.0 9.0;8.6", "sm_86 sm_90 sm_120 compute_120", "sm_80 sm_89 sm_100"),
    ],
)
def test_architectures_are_those_that_nvcc_knows_or_that_are_given(
    tree: BuildTree, monkeypatch: pytest.MonkeyPatch, known: str, given: str, compiled: str, left_out: str
) -> None:
    """With PTX for all later GPUs."""
    compiler = cuda_compiler(tree, monkeypatch, given, known)
    assert (compiler.targets, " ".join(compiler.left_out)) == (compiled, left_out)
    command = " ".join(compiler.command(Path("x.cu"), Path("x.o")))
    assert re.findall(r",code=(\w+)", command) == compiled.split()


def test_other_architectures_compile_cuda_again_and_what_is_left_out_is_told(built: BuildTree) -> None:
    assert built.build(FEDKERNELS_CUDA_ARCHITECTURES="90a 80") == ["cxx linked", "cxx ops/module.cpp", *CUDA]
    left_out = "sm_86 sm_89 sm_90 sm_100 sm_120"
    assert f"CUDA kernels for sm_80 sm_90a compute_80; left out: {left_out.replace(' ', ', ')}\n" in built.printed
    assert f'-DFEDKERNELS_LEFT_OUT="{left_out}"' in object_of(built, "ops/module.o")
    assert re.findall(r",code=(\w+)", object_of(built, "cuda/one.o")) == ["sm_80", "sm_90a", "compute_80"]
    built.build()
    assert "sm_100 sm_120 compute_120; left out: nothing\n" in built.printed


def test_architectures_of_this_machine(tree: BuildTree, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tree.folder / "toolkit/bin/nvidia-smi"
    script.write_text("#!/bin/sh\n[ $1 = --query-gpu=compute_cap ] && printf '9.0\\n8.6\\n9.0\\n'\n")
    script.chmod(0o755)
    assert cuda_compiler(tree, monkeypatch, "native").architectures == ["86", "90"]
    script.write_text("#!/bin/sh\necho no devices were found; exit 6\n")
    with pytest.raises(SystemExit, match="=native needs a GPU that nvidia-smi shows, and there is none"):
        cuda_compiler(tree, monkeypatch, "native")


def test_instruction_sets_that_are_left_out(built: BuildTree) -> None:
    """The operators call the baseline in their place."""
    compiled = built.build(FEDKERNELS_CPU_INSTRUCTION_SETS="avx512")
    assert compiled == ["cxx linked", *OPERATORS, "cxx ops/one_cuda.cpp"]
    assert "CPU kernels for baseline avx512; " in built.printed
    assert "left out: avx2\n" in built.printed
    assert "/avx2/" not in module(built)
    assert "-DFEDKERNELS_AVX2=baseline" in object_of(built, "ops/one.o")
    assert "-DFEDKERNELS_AVX512=baseline" not in object_of(built, "ops/one.o")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FEDKERNELS_CUDA", "yes", " must be auto, 0 or 1, got 'yes'"),
        ("FEDKERNELS_CUDA_ARCHITECTURES", "hopper", " must be native, or a list as in '80 90', got 'hopper'"),
        ("FEDKERNELS_GLIBC", "old", " must be a version of glibc as in '2.28', got 'old'"),
        pytest.param(
            *("FEDKERNELS_GLIBC", "2.28", "=2.28 needs zig to link the module: pip install ziglang"),
            marks=pytest.mark.skipif(importlib.util.find_spec("ziglang") is not None, reason="ziglang is installed"),
        ),
        ("FEDKERNELS_WERROR", "yes", " must be 0 or 1, got 'yes'"),
        ("FEDKERNELS_CPU_INSTRUCTION_SETS", "sse", " must be a list of some of baseline, avx2, avx512, got 'sse'"),
    ],
)
def test_an_invalid_value_ends_the_build(tree: BuildTree, name: str, value: str, expected: str) -> None:
    assert tree.build(fails=True, **{name: value}) == []
    assert tree.printed.rstrip().endswith(name + expected)


def test_a_source_that_fails_leaves_the_module_out(built: BuildTree) -> None:
    built.touch("csrc/cpu/two.cpp")
    built.build(BROKEN_SOURCE="csrc/cpu/two.cpp")
    assert note(built) == "StepError: cxx failed on csrc/cpu/two.cpp: csrc/cpu/two.cpp(1): error: pretended\n"
    assert not list((built.folder / "fedkernels").glob("*.so"))
    assert not list((built.folder / "build").glob("lib*/fedkernels/*.so"))  # what a wheel would take
    assert "fedkernels._C is left out" in built.printed
    assert built.build() == sorted([*TWO, *LINK])
    assert not (built.folder / "fedkernels/_C.missing").exists()


def test_a_kernel_that_nvcc_refuses_leaves_cuda_out_of_a_build_that_does_not_ask_for_it(built: BuildTree) -> None:
    built.touch("csrc/cuda/one.cu")
    built.build(BROKEN_SOURCE="csrc/cuda/one.cu")
    failed = "nvcc failed on csrc/cuda/one.cu"
    assert f"compiled without CUDA: {failed}: csrc/cuda/one.cu(1): error: pretended" in built.printed
    assert f"CUDA kernels for none ({failed}" in built.printed
    assert not [text for text in OF_CUDA if text in module(built)]
    for source, compiler in (("cuda/one.cu", "nvcc"), ("ops/one.cpp", "cxx")):
        built.touch(f"csrc/{source}")
        built.build(fails=True, BROKEN_SOURCE=f"csrc/{source}", FEDKERNELS_CUDA="1")
        assert f"FEDKERNELS_CUDA=1, but {compiler} failed on csrc/{source}: " in built.printed


def test_a_warning_ends_a_build_of_developers_alone(built: BuildTree) -> None:
    """A user's newer compiler may warn of what none warned of before: it leaves nothing out."""
    sources = "csrc/ops/one.cpp", "csrc/cuda/one.cu"
    for source in sources:
        built.touch(source)
    built.build(WARNING_IN_SOURCE=" ".join(sources))
    assert "CUDA kernels for sm_80" in built.printed
    for source in sources:
        built.touch(source)
        built.build(fails=True, WARNING_IN_SOURCE=source, FEDKERNELS_WERROR="1")
        assert f" failed on {source}: " in built.printed
        assert "FEDKERNELS_WERROR=1, but " in built.printed


def test_no_cuda_by_choice_or_without_the_static_runtime(built: BuildTree) -> None:
    assert built.build(FEDKERNELS_CUDA="0") == ["cxx linked", "cxx ops/module.cpp"]
    assert "CUDA kernels for none (FEDKERNELS_CUDA=0); left out: nothing\n" in built.printed
    assert not [text for text in OF_CUDA if text in module(built)]
    (built.folder / "toolkit/lib64/libcudart_static.a").unlink()
    assert not set(CUDA) & set(built.build())
    assert "libcudart_static.a was not found below" in built.printed


def test_a_module_for_an_old_glibc_is_linked_by_zig(built: BuildTree) -> None:
    built.write("site/ziglang/__init__.py", "")
    built.write("site/ziglang/__main__.py", LINKER)
    assert built.build(FEDKERNELS_GLIBC="2.28") == []  # no other object, and no call of the C++ compiler
    text = module(built)
    assert f"'-target', '{platform.machine()}-linux-gnu.2.28', '-shared', '-s'" in text
    assert all(
        option in text
        for option in ("-Wl,--version-script=csrc/exports.map", "/lib/libstdc++.so", "/lib/libgcc.a", "-ltorch_cpu")
    )
    assert built.build() == LINK


def test_what_is_missing_or_too_old_leaves_the_module_out_and_is_noted(tree: BuildTree) -> None:
    assert tree.build(CC="no-such-compiler", CXX="no-such-compiler", FEDKERNELS_CUDA="0") == []
    assert "no-such-compiler" in note(tree)
    assert "fedkernels._C is left out" in tree.printed
    ninja = tree.folder / "csrc/ninja_build.py"
    ninja.write_text(ninja.read_text().replace('shutil.which("ninja"', 'shutil.which("no-such-ninja"'))
    assert tree.build() == []
    assert note(tree) == "RuntimeError: ninja was not found; install it with `pip install ninja`\n"
    tree.make_torch("2.10.0")
    assert tree.build() == []
    assert note(tree) == "RuntimeError: torch 2.11 or newer is needed, but torch 2.10 was found\n"
