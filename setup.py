"""Compiles csrc/ into the module fedkernels._C; everything else stands in pyproject.toml. See csrc/README.md."""

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc"))
from build_backend import torch_folder

# The oldest torch that the module loads into: only what its stable ABI holds is used. Two bytes, 2 and 11.
TARGET = "0x020b000000000000"
NAME = "fedkernels._C"
NOTE = "_C.missing"  # beside the package where the module is left out: why

# csrc/cpu is compiled once for each of these, and the best that the processor has is chosen at run time.
INSTRUCTION_SETS = {"baseline": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS["avx2"] = ["-mavx2", "-mfma"]
    INSTRUCTION_SETS["avx512"] = [
        *("-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mavx2", "-mfma"),
        "-mprefer-vector-width=512",
    ]
FLAGS = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
KERNEL_FLAGS = [*FLAGS, "-fno-math-errno", "-fno-exceptions", "-fno-rtti"]

# csrc/cuda, where there is an nvcc. PTX of the newest architecture lets later GPUs compile for themselves.
ARCHITECTURES = "80 86 89 90"
NVCC_FLAGS = [
    *("-std=c++20", "-O3", "-Icsrc", "-DNDEBUG", "-Werror", "all-warnings"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Werror"),
]


def nvcc_path() -> str | None:
    """CUDA_HOME's, else the one in PATH, else that of the usual folder."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [f"{home}/bin"] if home else [*os.get_exec_path(), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def architectures() -> list[str]:
    """FEDKERNELS_CUDA_ARCHITECTURES, compute capabilities as in "80 86" or "8.0;8.6", in order."""
    given = os.environ.get("FEDKERNELS_CUDA_ARCHITECTURES") or ARCHITECTURES
    found = {name.replace(".", "").removeprefix("sm_") for name in re.split(r"[\s,;]+", given) if name}
    if not found or not all(re.fullmatch(r"\d{2,3}[af]?", name) for name in found):
        raise RuntimeError(f"FEDKERNELS_CUDA_ARCHITECTURES must be a list as in '80 90', got {given!r}")
    return sorted(found, key=lambda name: int(name.rstrip("af")))


def architecture_flags(names: list[str]) -> list[str]:
    flags = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    return [*flags, f"-gencode=arch=compute_{names[-1]},code=compute_{names[-1]}"]


class BuildNative(build_ext):
    """Leaves the module out, and says why, where it cannot be compiled: fedkernels then works on its references."""

    def build_extension(self, ext: Extension) -> None:
        module = Path(self.get_ext_fullpath(ext.name))
        note = module.parent / NOTE
        try:
            self._compile(ext, module)
        except Exception as error:  # a missing compiler, header or library: each has its own exception
            module.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
            self.warn(f"{NAME} is left out, fedkernels works on its slower references: {error}")
        else:
            note.unlink(missing_ok=True)

    def copy_extensions_to_source(self) -> None:  # an editable installation
        super().copy_extensions_to_source()
        made = Path(self.build_lib) / "fedkernels" / NOTE
        kept = Path("fedkernels") / NOTE
        if made.exists():
            kept.write_text(made.read_text(encoding="utf-8"), encoding="utf-8")
            for stale in Path("fedkernels").glob("_C.*.so"):  # of an earlier state of csrc/
                stale.unlink()
        else:
            kept.unlink(missing_ok=True)

    def _compile(self, ext: Extension, module: Path) -> None:
        folder = torch_folder()
        if folder is None:
            raise RuntimeError("torch's headers were not found; install torch first")
        version = (folder / "include/torch/headeronly/version.h").read_text(encoding="utf-8")
        major, minor = (
            int(re.findall(rf"define TORCH_VERSION_{part} (\d+)", version)[0]) for part in ("MAJOR", "MINOR")
        )
        if (major, minor) < (2, 11):
            raise RuntimeError(f"torch {major}.{minor} was found, 2.11 or newer is needed")

        cuda_objects, cuda_folder, cuda = self._compile_cuda()

        sets = " ".join(INSTRUCTION_SETS)
        jobs = [  # source, folder of its object, macros, flags
            (source, "ops", [("TORCH_TARGET_VERSION", TARGET), ("Py_LIMITED_API", "0x030a0000")], FLAGS)
            for source in sorted(str(path) for path in Path("csrc/ops").glob("*.cpp"))
            if cuda_objects or not source.endswith("_cuda.cpp")
        ]
        for name, extra in INSTRUCTION_SETS.items():
            for source in sorted(str(path) for path in Path("csrc/cpu").glob("*.cpp")):
                jobs.append((source, name, [("FEDKERNELS_ISA", name)], KERNEL_FLAGS + extra))

        def compile_one(job: tuple[str, str, list[tuple[str, str]], list[str]]) -> list[str]:
            source, name, macros, flags = job
            include = ["csrc", str(folder / "include")] if name == "ops" else ["csrc"]
            return self.compiler.compile(
                [source],
                output_dir=str(Path(self.build_temp) / name),
                macros=[*macros, ("FEDKERNELS_ISAS", f'"{sets}"'), ("FEDKERNELS_CUDA", f'"{cuda}"'), ("NDEBUG", None)],
                include_dirs=[*include, *self.compiler.include_dirs],
                extra_postargs=flags,
            )

        with ThreadPoolExecutor(max_workers=max(1, min(8, cpu_count() or 1))) as pool:
            objects = [path for paths in pool.map(compile_one, jobs) for path in paths]
        module.parent.mkdir(parents=True, exist_ok=True)
        linux, static = sys.platform.startswith("linux"), []
        if cuda_objects:
            # Static, so that the module loads where there is no CUDA; hidden, so that it is not taken for torch's.
            static = ["-Wl,--exclude-libs,libcudart_static.a", f"{cuda_folder}/libcudart_static.a"]
            static += ["-ldl", "-lrt", "-lpthread"]
        self.compiler.link_shared_object(
            [*objects, *cuda_objects],
            str(module),
            # Found by name in the process, which has loaded torch before: no path to this torch is kept. Through
            # libtorch a torch with CUDA shows its functions for streams, which are weak symbols here.
            libraries=["torch_cpu", "torch"] if linux else [],
            library_dirs=[str(folder / "lib")],
            extra_preargs=["-Wl,--no-as-needed"] if linux else [],
            extra_postargs=static,
            build_temp=self.build_temp,
            target_lang="c++",
        )

    def _compile_cuda(self) -> tuple[list[str], str, str]:
        """-> objects, the folder of CUDA's libraries, and the architectures, or why there are none."""
        wanted = os.environ.get("FEDKERNELS_CUDA") or "auto"
        if wanted not in ("auto", "0", "1"):
            raise RuntimeError(f"FEDKERNELS_CUDA must be auto, 0 or 1, got {wanted!r}")
        if wanted == "0":
            return [], "", "none (FEDKERNELS_CUDA=0)"
        try:
            return self._run_nvcc()
        except (RuntimeError, OSError) as error:
            if wanted == "1":
                raise SystemExit(f"FEDKERNELS_CUDA=1, but {error}") from error
            self.warn(f"{NAME} is compiled without CUDA: {error}")
            # It becomes a string of the C++ source.
            reason = re.sub(r"[^\w .,:;/()=+-]", "", str(error).partition("\n")[0])
            return [], "", f"none ({reason[:300]})"

    def _run_nvcc(self) -> tuple[list[str], str, str]:
        nvcc = nvcc_path()
        if nvcc is None:
            raise RuntimeError("no nvcc was found")
        names = architectures()
        # The longest first, so that no processor is left with it in the end.
        sources = sorted(Path("csrc/cuda").glob("*.cu"), key=lambda path: path.stat().st_size, reverse=True)
        folder = Path(self.build_temp) / "cuda"
        folder.mkdir(parents=True, exist_ok=True)

        def compile_one(source: Path) -> str:
            target = folder / f"{source.stem}.o"
            command = [nvcc, *NVCC_FLAGS, *architecture_flags(names), "-c", str(source), "-o", str(target)]
            print(" ".join(command), flush=True)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(done.stdout + done.stderr, flush=True)
                lines = (done.stderr + done.stdout).strip().splitlines()
                said = next((line for line in lines if "error" in line or "fatal" in line), lines[0] if lines else "")
                raise RuntimeError(f"nvcc failed on {source}: {said}")
            return str(target)

        with ThreadPoolExecutor(max_workers=max(1, min(8, cpu_count() or 1))) as pool:
            objects = list(pool.map(compile_one, sources))
        said = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
        top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)  # `nvcc` may be a script that calls one elsewhere
        root = Path(top[1] if top else Path(nvcc).resolve().parent.parent)
        libraries = [root / name for name in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib")]
        library = next((path for path in libraries if (path / "libcudart_static.a").is_file()), None)
        if library is None:
            raise RuntimeError(f"libcudart_static.a was not found below {root}")
        return objects, str(library), " ".join([*(f"sm_{name}" for name in names), f"compute_{names[-1]}"])


setup(
    ext_modules=[Extension(NAME, sources=[], py_limited_api=True, optional=True)],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
