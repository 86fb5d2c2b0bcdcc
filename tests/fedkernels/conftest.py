"""Where an operator's tests run: over the compiled operator, over its reference, and on a GPU."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fedkernels
from fedkernels.internal import native, transport_warnings
from tests.fedkernels.distributed.ranks import Ranks
from tests.fedkernels.operators import OPERATORS

FUNCTIONS = {name: getattr(fedkernels, name) for name in OPERATORS}
OF_OTHERS = ("accumulate_cka", "contrastive", "deltas", "unbalanced_ot_stiff")  # tests of operators of other names
COMPILED = {f"test_{name}" for name in (*native.COMPILED, *OF_OTHERS)}
OF_TABLE = {"test_adversarial", "test_contexts", "test_memory_and_autograd", "test_properties", "test_refusals"}
OF_OPERATORS = {f"test_{name}" for name in FUNCTIONS} | COMPILED | OF_TABLE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module, marked = metafunc.module.__name__.rpartition(".")[2], metafunc.definition.get_closest_marker
    if module not in OF_OPERATORS:
        return
    wanted: list[Any] = ["native", "reference"] if module in COMPILED or marked("references_too") else ["cpu"]
    if not marked("cpu_only"):
        wanted.append(pytest.param("cuda", marks=pytest.mark.gpu))
    if len(wanted) > 1:
        metafunc.parametrize("implementation", wanted, indirect=True)


@pytest.fixture(autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = getattr(request, "param", None)
    if wanted == "reference":
        monkeypatch.setattr(native, "module", None)
    elif wanted == "native" and native.module is None:
        pytest.skip(f"fedkernels._C is {native.build_info()['native']}")
    elif request.node.get_closest_marker("gpu"):
        need_gpu()
    if wanted == "cuda":
        # So no later call, perhaps of another test, is told of an earlier one.
        monkeypatch.setattr(transport_warnings, "_is_captured", lambda gpu: True)
        for name, function in FUNCTIONS.items():
            for module in (fedkernels, fedkernels.nn, request.module):
                if getattr(module, name, None) is function:
                    monkeypatch.setattr(module, name, on_gpu(function))


@contextmanager
def by_reference() -> Iterator[None]:
    """As it is without the compiled module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "module", None)
        yield


def need_gpu() -> None:
    if not torch.cuda.is_available():
        if os.environ.get("FEDKERNELS_GPU") == "1":
            pytest.fail("FEDKERNELS_GPU=1, but torch finds no CUDA device")
        pytest.skip("no CUDA device")


def is_on_gpu(request: pytest.FixtureRequest) -> bool:
    """Does this case of a test run the operators on a GPU?"""
    return hasattr(request.node, "callspec") and request.node.callspec.params.get("implementation") == "cuda"


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


@pytest.fixture(name="native")
def needs_native() -> None:
    """For tests of the compiled module itself."""
    if native.module is None:
        pytest.skip(f"fedkernels._C is {native.build_info()['native']}")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Three processes. They end with the last test of a file: other tests of the same process count its children."""
    group = Ranks(getattr(request, "param", 3), tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
