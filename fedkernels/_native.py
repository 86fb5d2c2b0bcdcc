"""The compiled module: loaded once, at import; where it is missing the references serve, after one warning."""

import importlib
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

COMPILED = ("apply_deltas", "client_weights", "delta_gram", "unbalanced_ot")  # the operators that csrc/ops defines
_NOTE = Path(__file__).with_name("_C.missing")  # written by the installation where it could not compile


def _load() -> tuple[ModuleType | None, str]:
    """-> the module, or None and the reason."""
    if os.environ.get("FEDKERNELS_NATIVE") == "0":
        return None, "FEDKERNELS_NATIVE=0 is set in the environment"
    # Importing torch put its libraries into the process: the module finds them there, whichever version they are.
    try:
        return importlib.import_module("fedkernels._C"), ""
    except ModuleNotFoundError:
        cause = _NOTE.read_text(encoding="utf-8").strip() if _NOTE.exists() else ""
        reason = f"it was not compiled ({cause})" if cause else "it was not compiled when fedkernels was installed"
    except ImportError as error:
        reason = f"it does not load: {error}"
    warnings.warn(
        f"fedkernels runs on its slower references without fedkernels._C: {reason}. "
        "Compile it by `pip install -v .` with torch >= 2.11 and a C++20 compiler at hand, or set FEDKERNELS_NATIVE=0.",
        UserWarning,
        stacklevel=2,
    )
    return None, reason


module, _reason = _load()


def operator(name: str, *tensors: Tensor) -> Any:
    """The compiled operator `name` where there is one for the device of all these tensors, else None."""
    if module is None or not all(tensor.device.type == "cpu" for tensor in tensors):
        return None
    return getattr(torch.ops.fedkernels, name).default


def build_info() -> dict[str, str]:
    """What is compiled and what is used.

    Returns:
        ``native``: "used", or why not. ``operators``: those that are compiled; the others, and all on other devices,
        run on the references. Where the module is used also ``cpu_compiled``, the instruction sets that its CPU
        kernels are compiled for; ``cpu_used``, the one that this processor runs; ``cuda_compiled``, the architectures
        of the CUDA kernels; ``compiler``; ``oldest_torch``, which the module needs.
    """
    if module is None:
        return {"native": f"not used: {_reason}", "operators": ""}
    built = module.build_info()
    return {
        "native": "used",
        "operators": " ".join(COMPILED),
        "cpu_compiled": built["compiled"],
        "cpu_used": built["used"],
        "cuda_compiled": "none",
        "compiler": built["compiler"],
        "oldest_torch": built["torch"],
    }
