"""The compiled module, loaded once at import. Without it the references are used, after one warning."""

import ast
import importlib
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedkernels.internal import first_contact
from fedkernels.internal.autograd import is_transformed
from fedkernels.internal.self_test_outcomes import NOT_TESTED, PASSED

# Operators with a CPU kernel in csrc/ops/NAME.cpp. Three are internal: similarity_logsumexp (of clip_loss,
# supervised_contrastive_loss and options of info_nce), add_products (CKAAccumulator), hsic_pairwise (MinibatchCKA).
COMPILED = (
    "add_products",
    "apply_deltas",
    "client_weights",
    "debiased_cka",
    "debiased_cka_pairwise",
    "delta_gram",
    "hsic_pairwise",
    "info_nce",
    "linear_cka",
    "linear_cka_pairwise",
    "linear_cka_to_kernel",
    "nt_xent",
    "sigmoid_loss",
    "similarity_logsumexp",
    "two_views",
    "unbalanced_ot",
)
# Of these, the ones without CUDA kernels: on GPUs their references run.
CPU_ONLY = frozenset(
    {
        "add_products",
        "apply_deltas",
        "debiased_cka",
        "debiased_cka_pairwise",
        "delta_gram",
        "hsic_pairwise",
    }
)
# Operators for CUDA only, which fedkernels/internal/linear_cka_cuda.py and contrastive_cuda.py call between torch's
# products.
PARTS = ("linear_cka_combine", "linear_cka_prepare")
CONTRASTIVE_PARTS = tuple(
    f"contrastive_{name}" for name in ("in_one", "sigmoid", "sums", "weights", "one_tile", "finish")
)
_PACKAGE = Path(__file__).parent.parent
_NOTE = _PACKAGE / "_C.missing"  # written by the installation if it could not compile


def _by_name(schemas: Iterable[str]) -> dict[str, str]:
    return {name: f"({rest}" for name, _, rest in (schema.partition("(") for schema in schemas)}


def _read_schemas() -> dict[str, str]:
    lines = (_PACKAGE / "_schemas.inc").read_text(encoding="utf-8").splitlines()
    literals = "\n".join(line for line in lines if not line.startswith("//"))
    return _by_name(ast.literal_eval(f"[{literals}]"))


# By operator its arguments and results, as torch.library.define takes them. csrc/ops/schemas.h includes the same file.
SCHEMAS = _read_schemas()


def _load() -> tuple[ModuleType | None, str]:
    """Returns the module and "", or None and the reason why it is not used."""
    if os.environ.get("FEDKERNELS_NATIVE") == "0":
        return None, "FEDKERNELS_NATIVE=0 is set in the environment"
    # torch's libraries are in the process since torch was imported, and the module finds them there in any version.
    try:
        loaded = importlib.import_module("fedkernels._C")
        compiled = _by_name(loaded.schemas().splitlines()) if hasattr(loaded, "schemas") else {}
        differing = sorted(name for name in {*SCHEMAS, *compiled} if compiled.get(name) != SCHEMAS.get(name))
        if differing:
            reason = f"it was compiled from other sources, with other schemas of {', '.join(differing)}"
        else:
            _check_instruction_set(loaded.build_info())
            return loaded, ""
    except ModuleNotFoundError:
        cause = _NOTE.read_text(encoding="utf-8").strip() if _NOTE.exists() else ""
        reason = f"it was not compiled ({cause})" if cause else "it was not compiled when fedkernels was installed"
    except ImportError as error:
        reason = f"it does not load: {error}"
    warnings.warn(
        f"fedkernels runs on its slower references without fedkernels._C: {reason}. "
        "To compile it, run `pip install -v .` with torch >= 2.11 and a C++20 compiler, or set FEDKERNELS_NATIVE=0 to "
        "use the references without this warning.",
        UserWarning,
        stacklevel=2,
    )
    return None, reason


def _check_instruction_set(built: dict[str, str]) -> None:
    wanted = os.environ.get("FEDKERNELS_CPU", "")
    if wanted and wanted not in built["compiled"].split():
        warnings.warn(
            f"FEDKERNELS_CPU must be one of {built['compiled']}, got {wanted!r}; using {built['used']}",
            UserWarning,
            stacklevel=3,
        )


module, _reason = _load()


def _on_cuda(names: tuple[str, ...]) -> frozenset[str]:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(name for name in names if module is not None and has_kernel(f"fedkernels::{name}", "CUDA"))


# The operators that run on CUDA. Those with kernels in csrc/ops/<name>_cuda.cpp, if the module was compiled with CUDA,
# and those that fedkernels/linear_cka.py and fedkernels/internal/contrastive.py build from the parts.
CUDA = _on_cuda(COMPILED)
if _on_cuda(PARTS) == frozenset(PARTS):
    CUDA |= {"linear_cka", "linear_cka_pairwise", "linear_cka_to_kernel"}
if _on_cuda(CONTRASTIVE_PARTS) == frozenset(CONTRASTIVE_PARTS):
    CUDA |= {"info_nce", "nt_xent", "sigmoid_loss", "similarity_logsumexp"}


_unusable: dict[int, str] = {}  # by GPU, once it was checked: why it cannot run the kernels, or ""


def runs_on(gpu: int) -> bool:
    """Can this GPU run the compiled kernels? If not, there is one warning for it, and the references are used."""
    if module is None:
        return False
    if gpu not in _unusable:
        _unusable[gpu] = module.cuda_unusable(gpu)
        if _unusable[gpu]:
            compiled = module.build_info()["cuda"]
            warnings.warn(
                f"fedkernels runs on its slower references on cuda:{gpu}, which cannot run the kernels compiled for "
                f"{compiled}: {_unusable[gpu]}. Update the driver, or compile fedkernels again with this GPU's compute "
                "capability in FEDKERNELS_CUDA_ARCHITECTURES.",
                UserWarning,
                stacklevel=6,
            )
    return not _unusable[gpu]


def _serves(name: str, gpu: int) -> bool:
    """Do the kernels of the operator serve on this GPU? The first use there finds out, and may wait for their test."""
    known = first_contact.verdicts.get((name, gpu))
    return known if known is not None else runs_on(gpu) and first_contact.verdict(name, gpu, CUDA)


# torch.compile treats the result as a constant. The attribute is the one that
# torch.compiler.assume_constant_result sets; calling that would import the compiler, which takes seconds.
_serves._dynamo_marked_constant = True  # type: ignore[attr-defined]


def operator(name: str, *tensors: Tensor) -> Any:
    """The compiled operator `name` if there is one for the device of all these tensors, else None."""
    if module is None or is_transformed():
        return None
    device = tensors[0].device
    for tensor in tensors[1:]:
        if tensor.device != device:
            return None
    if device.type == "cpu" or (device.type == "cuda" and name in CUDA and _serves(name, device.index)):
        return getattr(torch.ops.fedkernels, name).default
    return None


def build_info() -> dict[str, str]:
    """What is compiled and what is used.

    Returns:
        A dict of strings. ``native`` is "used", or says why not. ``operators`` names the compiled operators; the others
        run on the references, and so do all on devices that are neither CPU nor CUDA. If the module is used, also
        ``cpu_compiled``: the instruction sets that its CPU kernels are compiled for; ``cpu_used``: the one that runs on
        this processor; ``cuda_compiled``: the architectures of the CUDA kernels, or "none" and why;
        ``cuda_operators``: the operators that have CUDA kernels; ``cuda_used``: the GPUs that run them, and why others
        do not (this initialises CUDA on each visible GPU); ``cuda_self_test``: for each of these GPUs the operators
        whose kernels are tested there, those that failed and run on their references, and those that are not tested yet
        (the first use of an operator on a GPU tests all, and so does `fedkernels.self_test`); ``left_out``: the
        instruction sets and architectures that a complete build has and this one has not, or ""; ``compiler``;
        ``oldest_torch``: the oldest torch that the module supports.
    """
    if module is None:
        return {"native": f"not used: {_reason}", "operators": ""}
    built = module.build_info()
    return {
        "native": "used",
        "operators": " ".join(COMPILED),
        "cpu_compiled": built["compiled"],
        "cpu_used": built["used"],
        "cuda_compiled": built.get("cuda", "none"),
        "cuda_operators": " ".join(sorted(CUDA.intersection(COMPILED))),
        "cuda_used": _gpus(),
        "cuda_self_test": _self_tests(),
        "left_out": built.get("left_out", ""),
        "compiler": built["compiler"],
        "oldest_torch": built["torch"],
    }


def _gpus() -> str:
    if module is None or not CUDA or not torch.cuda.is_available():
        return "none"
    reasons = [module.cuda_unusable(gpu) for gpu in range(torch.cuda.device_count())]
    return ", ".join(f"cuda:{gpu}{f' (not used: {why})' if why else ''}" for gpu, why in enumerate(reasons))


def _self_tests() -> str:
    if module is None or not CUDA or not torch.cuda.is_available():
        return "none"
    if first_contact.is_off():
        return "off: FEDKERNELS_SELF_TEST=0 is set in the environment"
    gpus = [gpu for gpu in range(torch.cuda.device_count()) if not module.cuda_unusable(gpu)]
    return "; ".join(f"cuda:{gpu}: {_self_tests_of(gpu)}" for gpu in gpus) or "none"


def _self_tests_of(gpu: int) -> str:
    lists: dict[str, list[str]] = {"tested": [], "failed": [], "not yet": []}
    known = first_contact.known(gpu)
    for name in sorted(CUDA):
        if name not in known or known[name].outcome == NOT_TESTED:
            lists["not yet"].append(name)
        elif known[name].outcome == PASSED:
            lists["tested"].append(name)
        else:
            lists["failed"].append(f"{name} ({known[name].reason})")
    return ", ".join(f"{state} {' '.join(names)}" for state, names in lists.items() if names)
