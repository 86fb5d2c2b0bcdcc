"""setuptools' build backend, which requires torch only where its headers are missing.

csrc/ compiles against torch's headers. With torch in build-system.requires pip would download it, several gigabytes,
for every isolated build, although the environment that pip installs into nearly always has it.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

_FIND = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s and s.origin else '')"


def torch_folder() -> Path | None:
    """The folder of torch with its headers, or None; torch is not imported.

    It is looked for in this process, then in the environment that pip installs into.
    """
    spec = importlib.util.find_spec("torch")
    origin = spec.origin if spec else None
    if not origin:
        # pip isolates a build through PYTHONPATH, which -E ignores; the interpreter is that of the environment.
        done = subprocess.run([sys.executable, "-E", "-c", _FIND], capture_output=True, text=True, cwd="/")
        origin = done.stdout.strip()
    folder = Path(origin).parent if origin else None
    return folder if folder and (folder / "include/torch/csrc/stable/library.h").is_file() else None


def _with_torch(requires: list[str]) -> list[str]:
    return requires if torch_folder() else [*requires, "torch>=2.11"]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _with_torch(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return _with_torch(build_meta.get_requires_for_build_editable(config_settings))
