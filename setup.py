"""Compiles csrc/ into the module fedkernels._C; everything else is in pyproject.toml. See csrc/README.md."""

import filecmp
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc"))
from build_backend import torch_folder
from cuda_compiler import CudaCompiler, find_cuda_compiler, warnings_are_errors
from ninja_build import Step, StepError, run, write_if_changed

# The oldest torch that the module loads into: only what its stable ABI holds is used. Two bytes, 2 and 11.
TARGET = "0x020b000000000000"
NAME = "fedkernels._C"
NOTE = "_C.missing"  # written into the package where the module is left out; holds the reason

# csrc/cpu is compiled once for each of these, and the best that the processor has is chosen at run time.
INSTRUCTION_SETS: dict[str, list[str]] = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS["avx2"] = ["-mavx2", "-mfma"]
    INSTRUCTION_SETS["avx512"] = [
        *("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma"),
        "-mprefer-vector-width=512",
    ]
FLAGS = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
KERNEL_FLAGS = [*FLAGS, "-fno-math-errno", "-fno-exceptions", "-fno-rtti"]
JOBS = max(1, min(8, os.cpu_count() or 1))  # compilers at a time


def instruction_sets() -> list[str]:
    """FEDKERNELS_CPU_INSTRUCTION_SETS, names as in "avx512" or "avx2 avx512", and always the baseline."""
    given = os.environ.get("FEDKERNELS_CPU_INSTRUCTION_SETS") or " ".join(INSTRUCTION_SETS)
    names = {name for name in re.split(r"[\s,;]+", given) if name}
    if not names or not names <= set(INSTRUCTION_SETS):
        known = ", ".join(INSTRUCTION_SETS)
        raise SystemExit(f"FEDKERNELS_CPU_INSTRUCTION_SETS must be a list of some of {known}, got {given!r}")
    return [name for name in INSTRUCTION_SETS if name in names | {"baseline"}]


def oldest_glibc() -> str:
    """FEDKERNELS_GLIBC, as in "2.28"; "" for the glibc of this machine. An invalid value ends the build."""
    version = os.environ.get("FEDKERNELS_GLIBC", "")
    if version and not re.fullmatch(r"2\.\d+", version):
        raise SystemExit(f"FEDKERNELS_GLIBC must be a version of glibc as in '2.28', got {version!r}")
    if version and importlib.util.find_spec("ziglang") is None:
        raise SystemExit(f"FEDKERNELS_GLIBC={version} needs zig to link the module: pip install ziglang")
    return version


def supported_torch() -> Path:
    """The folder of the torch whose headers are used; RuntimeError where there is none or it is too old."""
    folder = torch_folder()
    if folder is None:
        raise RuntimeError("torch's headers were not found; install torch first")
    version = (folder / "include/torch/headeronly/version.h").read_text(encoding="utf-8")
    major, minor = (int(re.findall(rf"define TORCH_VERSION_{part} (\d+)", version)[0]) for part in ("MAJOR", "MINOR"))
    if (major, minor) < (2, 11):
        raise RuntimeError(f"torch 2.11 or newer is needed, but torch {major}.{minor} was found")
    return folder


def compiler_version(name: str) -> str:
    """The path and version of a compiler; RuntimeError where it is missing."""
    path = shutil.which(name)
    if path is None:
        raise RuntimeError(f"the C++ compiler {name} was not found")
    return f"{path}\n{subprocess.run([path, '--version'], capture_output=True, text=True).stdout}"


def replace_where_different(source: Path, target: Path) -> None:
    """Copies `source` where its content differs; a process that has loaded `target` keeps the file that it has."""
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.copy(source, temporary)
    temporary.replace(target)


@dataclass(frozen=True)
class Plan:
    """What is compiled, and where to."""

    folder: Path
    torch: Path
    sets: list[str]  # instruction sets
    cuda: CudaCompiler | None
    why_no_cuda: str = ""
    glibc: str = ""  # the oldest glibc that the module loads with, as in "2.28"; "": this machine's

    @property
    def cuda_targets(self) -> str:
        return self.cuda.targets if self.cuda else f"none ({self.why_no_cuda})"

    @property
    def left_out(self) -> list[str]:
        """The instruction sets and architectures of a complete build that this one does not compile for."""
        return [
            *(name for name in INSTRUCTION_SETS if name not in self.sets),
            *(self.cuda.left_out if self.cuda else []),
        ]


class BuildNative(build_ext):
    """Leaves the module out, and says why, where it cannot be compiled: fedkernels then works on its references."""

    def build_extension(self, ext: Extension) -> None:
        module = Path(self.get_ext_fullpath(ext.name))
        note = module.parent / NOTE
        strict = warnings_are_errors()
        try:
            compiled = self._compile()
        except Exception as error:  # a missing compiler, header or library: each has its own exception
            if strict and isinstance(error, StepError):
                raise SystemExit(f"FEDKERNELS_WERROR=1, but {error}") from error
            if os.environ.get("FEDKERNELS_CUDA") == "1":
                raise SystemExit(f"FEDKERNELS_CUDA=1, but {error}") from error
            module.parent.mkdir(parents=True, exist_ok=True)
            module.unlink(missing_ok=True)  # of an earlier state of csrc/
            note.write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
            self.warn(f"{NAME} is left out, fedkernels works on its slower references: {error}")
        else:
            replace_where_different(compiled, module)
            note.unlink(missing_ok=True)

    def copy_extensions_to_source(self) -> None:  # for an editable installation and for --inplace
        module = Path(self.get_ext_filename(self.get_ext_fullname(NAME)))
        note = module.parent / NOTE
        if (Path(self.build_lib) / note).exists():
            replace_where_different(Path(self.build_lib) / note, note)
            for stale in module.parent.glob("_C.*.so"):  # of an earlier state of csrc/
                stale.unlink()
        else:
            replace_where_different(Path(self.build_lib) / module, module)
            note.unlink(missing_ok=True)

    def _compile(self) -> Path:
        """-> the module, in the build folder."""
        torch, sets, glibc = supported_torch(), instruction_sets(), oldest_glibc()
        folder = self._build_folder(torch)
        if self.force:
            shutil.rmtree(folder, ignore_errors=True)
        cuda, why_no_cuda = self._find_cuda()
        plan = Plan(folder, torch, sets, cuda, why_no_cuda, glibc)
        try:
            run(self._steps(plan), folder, JOBS)
        except StepError as error:
            if error.step.output.parent != folder / "cuda" or warnings_are_errors():
                raise
            self._refuse_to_leave_out_cuda(error)
            plan = Plan(folder, torch, sets, None, str(error), glibc)
            run(self._steps(plan), folder, JOBS)
        print(
            f"{NAME}: CPU kernels for {' '.join(sets)}; CUDA kernels for {plan.cuda_targets}; "
            f"left out: {', '.join(plan.left_out) or 'nothing'}",
            flush=True,
        )
        return self._module(folder)

    def _build_folder(self, torch: Path) -> Path:
        """One for each Python and torch; an isolated build gets the same one, for its own folders are temporary."""
        environment = "\n".join([*self.compiler.include_dirs, str(torch)])
        name = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        digest = hashlib.sha256(environment.encode()).hexdigest()[:8]
        return Path(self.get_finalized_command("build").build_base) / "native" / f"{name}-{digest}"

    def _find_cuda(self) -> tuple[CudaCompiler | None, str]:
        """-> nvcc, or None and the reason."""
        wanted = os.environ.get("FEDKERNELS_CUDA") or "auto"
        if wanted not in ("auto", "0", "1"):
            raise SystemExit(f"FEDKERNELS_CUDA must be auto, 0 or 1, got {wanted!r}")
        if wanted == "0":
            return None, "FEDKERNELS_CUDA=0"
        try:
            return find_cuda_compiler(), ""
        except RuntimeError as error:
            self._refuse_to_leave_out_cuda(error)
            return None, str(error)

    def _refuse_to_leave_out_cuda(self, error: Exception) -> None:
        """Ends the build where FEDKERNELS_CUDA=1 asks for CUDA; a warning otherwise."""
        if os.environ.get("FEDKERNELS_CUDA") == "1":
            raise SystemExit(f"FEDKERNELS_CUDA=1, but {error}") from error
        self.warn(f"{NAME} is compiled without CUDA: {error}")

    # Steps: one for each object, and the module's link at the end

    def _steps(self, plan: Plan) -> list[Step]:
        # A new version in the place of an old one changes no command, and its files may be older than the objects.
        compiler = write_if_changed(plan.folder / "compiler.txt", compiler_version(self.compiler.compiler_so_cxx[0]))
        steps = [
            *self._cuda_steps(plan, compiler),
            *self._operator_steps(plan, compiler),
            *self._kernel_steps(plan, compiler),
        ]
        return [*steps, self._link_step(plan, [step.output for step in steps], compiler)]

    def _cuda_steps(self, plan: Plan, compiler: Path) -> list[Step]:
        if plan.cuda is None:
            return []
        version = write_if_changed(plan.folder / "nvcc.txt", plan.cuda.version)
        # The longest first, so that no processor is left with it in the end.
        sources = sorted(Path("csrc/cuda").glob("*.cu"), key=lambda path: path.stat().st_size, reverse=True)
        steps = []
        for source in sources:
            output = plan.folder / "cuda" / f"{source.stem}.o"
            steps.append(Step("compile", output, (source,), plan.cuda.command(source, output), (version, compiler)))
        return steps

    def _operator_steps(self, plan: Plan, compiler: Path) -> list[Step]:
        torch = write_if_changed(plan.folder / "torch.txt", (plan.torch / "version.py").read_text(encoding="utf-8"))
        flags = ["-isystem", str(plan.torch / "include"), *FLAGS]  # a compiler does not warn of torch's headers
        flags += [f"-DTORCH_TARGET_VERSION={TARGET}", "-DPy_LIMITED_API=0x030a0000", "-DNDEBUG"]
        flags += [f"-DFEDKERNELS_{name.upper()}=baseline" for name in INSTRUCTION_SETS if name not in plan.sets]
        about = {  # strings of csrc/ops/isa.cpp and module.cpp
            "FEDKERNELS_ISAS": " ".join(plan.sets),
            "FEDKERNELS_CUDA": re.sub(r"[^a-zA-Z0-9_ .,:;/()=+-]", "", plan.cuda_targets)[:300],
            "FEDKERNELS_LEFT_OUT": " ".join(plan.left_out),
        }
        of_module = [f'-D{name}="{text}"' for name, text in about.items()]
        return [
            self._compile_step(
                source, plan.folder / "ops", flags + of_module * (source.stem in ("isa", "module")), (compiler, torch)
            )
            for source in sorted(Path("csrc/ops").glob("*.cpp"))
            if plan.cuda or not source.stem.endswith("_cuda")
        ]

    def _kernel_steps(self, plan: Plan, compiler: Path) -> list[Step]:
        flags = ["-DNDEBUG", *KERNEL_FLAGS]
        return [
            self._compile_step(
                source, plan.folder / name, [f"-DFEDKERNELS_ISA={name}", *flags, *INSTRUCTION_SETS[name]], (compiler,)
            )
            for name in plan.sets
            for source in sorted(Path("csrc/cpu").glob("*.cpp"))
        ]

    def _compile_step(self, source: Path, folder: Path, flags: list[str], depends: tuple[Path, ...]) -> Step:
        output = folder / f"{source.stem}.o"
        include = ["-Icsrc", *(f"-I{path}" for path in self.compiler.include_dirs)]
        command = [*self.compiler.compiler_so_cxx, *include, "-c", str(source), "-o", str(output), *flags]
        command += ["-Werror"] * warnings_are_errors()
        return Step("compile", output, (source,), (*command, "-MMD", "-MF", f"{output}.d"), depends)

    def _link_step(self, plan: Plan, objects: list[Path], compiler: Path) -> Step:
        before, after, depends = [], [], [compiler]
        # The compiler for C++ with its flags, then the linker's flags, as setuptools itself links C++.
        linker = [*self.compiler.compiler_cxx, *self.compiler.linker_so_cxx[1:]]
        if sys.platform.startswith("linux"):
            # Found by name in the process, which has loaded torch before: no path to this torch is kept. Through
            # libtorch a torch with CUDA shows its functions for streams, which are weak symbols here.
            before, after = ["-Wl,--no-as-needed"], [f"-L{plan.torch / 'lib'}", "-ltorch_cpu", "-ltorch"]
            exports = Path("csrc/exports.map")
            after.append(f"-Wl,--version-script={exports}")
            depends.append(exports)
        if plan.cuda:
            # Static, so that the module loads where there is no CUDA.
            runtime = plan.cuda.runtime
            after += [str(runtime), "-ldl", "-lrt", "-lpthread"]
            depends.append(runtime)
        if plan.glibc:
            # zig knows which functions each glibc has, and this machine's compiler has made the objects as in every
            # other build: the results are the same to the last bit.
            target = f"{platform.machine()}-linux-gnu.{plan.glibc}"
            linker = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-shared", "-s"]
            # libgcc.a: the functions that ask the processor what it has are others in zig's library of this name.
            libraries = ("libstdc++.so", "libgcc_s.so.1", "libgcc.a")
            after += ["-ldl", *map(self._library_of_compiler, libraries), "-lm"]
        module = self._module(plan.folder)
        command = [*linker, *before, *map(str, objects), *after, "-o", str(module)]
        return Step("link", module, tuple(objects), tuple(command), tuple(depends))

    def _library_of_compiler(self, name: str) -> str:
        """The path of a library that the C++ compiler brings."""
        compiler = self.compiler.compiler_so_cxx[0]
        return subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()

    def _module(self, folder: Path) -> Path:
        return folder / "_C.so"


setup(
    ext_modules=[Extension(NAME, sources=[], py_limited_api=True, optional=True)],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
