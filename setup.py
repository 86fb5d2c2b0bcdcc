"""Compiles csrc/ into the module fedkernels._C; everything else stands in pyproject.toml. See csrc/README.md."""

import platform
import re
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

        sets = " ".join(INSTRUCTION_SETS)
        jobs = [  # source, folder of its object, macros, flags
            (source, "ops", [("TORCH_TARGET_VERSION", TARGET), ("Py_LIMITED_API", "0x030a0000")], FLAGS)
            for source in sorted(str(path) for path in Path("csrc/ops").glob("*.cpp"))
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
                macros=[*macros, ("FEDKERNELS_ISAS", f'"{sets}"'), ("NDEBUG", None)],
                include_dirs=[*include, *self.compiler.include_dirs],
                extra_postargs=flags,
            )

        with ThreadPoolExecutor(max_workers=max(1, min(8, cpu_count() or 1))) as pool:
            objects = [path for paths in pool.map(compile_one, jobs) for path in paths]
        module.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects,
            str(module),
            # Found by name in the process, which has loaded torch before: no path to this torch is kept.
            libraries=["torch_cpu"] if sys.platform.startswith("linux") else [],
            library_dirs=[str(folder / "lib")],
            extra_postargs=["-Wl,--no-as-needed"] if sys.platform.startswith("linux") else [],
            build_temp=self.build_temp,
            target_lang="c++",
        )


setup(
    ext_modules=[Extension(NAME, sources=[], py_limited_api=True, optional=True)],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
