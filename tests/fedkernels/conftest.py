"""Where an operator's tests run: over the compiled operator, over its reference, and on a GPU."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fedkernels
from fedkernels.internal import native as _native

FUNCTIONS = {name: getattr(fedkernels, name) for name in fedkernels.__all__ if name[0].islower()}
NO_OPERATORS = "build_info", "self_test"
FUNCTIONS = {name: function for name, function in FUNCTIONS.items() if callable(function) and name not in NO_OPERATORS}
OF_PARTS = "accumulate_cka", "clip_loss", "supervised_contrastive_loss"  # which call compiled operators of other names
COMPILED = {f"test_{name}" for name in (*_native.COMPILED, *OF_PARTS)} | {"test_unbalanced_ot_stiff", "test_export"}
OF_ALL = {"test_adversarial", "test_contexts", "test_memory_and_autograd", "test_properties", "test_refusals"}
OF_OPERATORS = {f"test_{name}" for name in FUNCTIONS} | COMPILED | OF_ALL


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if module not in OF_OPERATORS:
        return
    wanted: list[Any] = ["native", "reference"] if module in COMPILED else ["cpu"]
    if not metafunc.definition.get_closest_marker("cpu_only"):
        wanted.append(pytest.param("cuda", marks=pytest.mark.gpu))
    if len(wanted) > 1:
        metafunc.parametrize("implementation", wanted, indirect=True)


@pytest.fixture(autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = getattr(request, "param", None)
    if wanted == "reference":
        monkeypatch.setattr(_native, "module", None)
    elif wanted == "native" and _native.module is None:
        pytest.skip(f"fedkernels._C is {_native.build_info()['native']}")
    elif request.node.get_closest_marker("gpu"):
        need_gpu()
    if wanted == "cuda":
        for name, function in FUNCTIONS.items():
            for module in (fedkernels, fedkernels.nn, request.module):
                if getattr(module, name, None) is function:
                    monkeypatch.setattr(module, name, on_gpu(function))


def need_gpu() -> None:
    if not torch.cuda.is_available():
        if os.environ.get("FEDKERNELS_GPU") == "1":
            pytest.fail("FEDKERNELS_GPU=1, but torch finds no CUDA device")
        pytest.skip("no CUDA device")


def rounding_of_weights(function: Callable[..., Any], *dtypes: torch.dtype) -> float:
    """What a contrastive loss's gradient may be off by, relative to its largest entry, beside the rounding of sums.

    On a GPU the weights of the rows are rounded to half precision where all inputs have it.
    """
    half = dtypes[0] in (torch.float16, torch.bfloat16) and all(dtype == dtypes[0] for dtype in dtypes)
    return 2 * torch.finfo(dtypes[0]).eps if half and hasattr(function, "__wrapped__") else 0.0


def on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function computed on the GPU, for tensors of the CPU: the tests' own sums stay where they are."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        there = moved(arguments, to_gpu)
        options = moved(options, to_gpu)
        if not torch.compiler.is_compiling() and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cuda", torch.get_autocast_dtype("cpu")):
                result = function(*there, **options)
        else:
            result = function(*there, **options)
        if function is FUNCTIONS["apply_deltas"]:  # which writes to its first argument
            with torch.no_grad():
                for here, new in zip(arguments[0], there[0], strict=True):
                    here.copy_(new)
        return moved(result, lambda tensor: tensor if tensor.is_meta else tensor.cpu())

    return call


def to_gpu(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor
    there = tensor.to("cuda")
    if tensor.is_contiguous() or not tensor.is_floating_point():
        return there
    # What is not contiguous here is not there.
    return torch.stack([there, torch.full_like(there, torch.nan)], dim=-1)[..., 0]


def moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return move(value)
    if isinstance(value, dict):
        return {name: moved(one, move) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [moved(one, move) for one in value]
        return parts if isinstance(value, list) else type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


@pytest.fixture
def native() -> None:
    """For tests of the compiled module itself."""
    if _native.module is None:
        pytest.skip(f"fedkernels._C is {_native.build_info()['native']}")
