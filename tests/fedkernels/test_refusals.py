"""What every argument of every operator refuses, in one line that names it."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

import fedkernels
from tests.fedkernels.conftest import is_on_gpu
from tests.fedkernels.operators import LABELS, OPERATORS, Choice, R, Scalar

pytestmark = pytest.mark.filterwarnings(
    "ignore:the optimum transports nothing", "ignore:Sparse CSR tensor support is in beta", "ignore:.*nested tensors"
)
FLOATING = "must be float16, bfloat16, float32 or float64"


def arguments_of(name: str) -> dict:
    good = OPERATORS[name].arguments
    return {argument: getattr(value, "value", value) for argument, value in good.items()}


def tensors_within(value, label: str):
    """Every tensor of a list or a list of lists, with its name: (name, tensor, the value with another in its place)."""
    if isinstance(value, Tensor):
        yield label, value, lambda other: other
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            for name, tensor, put in tensors_within(one, f"{label}[{number}]"):
                around = value[:number], value[number + 1 :]
                yield (
                    name,
                    tensor,
                    lambda other, put=put, around=around: type(value)([*around[0], put(other), *around[1]]),
                )


MAY_BE_LEFT_OUT = "negatives", "excluded", "row_mask", "column_mask"
ANYWHERE = "gram", "weights"  # no other tensor says on which device


def refused(name: str, label: str, good: Tensor):
    """What an argument refuses in the place of `good`, and how the message begins."""
    floating, flat = good.is_floating_point(), good.ndim == 2
    kinds = {torch.float32, torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn}
    for dtype in kinds - ({torch.float32} if floating else {good.dtype}):
        yield good.to(dtype), f"{label} {FLOATING}, got {dtype}" if floating else f"{label} must be "
    others = [good.to_sparse(), *([good.to_sparse_csr()] if flat else []), *([good.to_mkldnn()] if floating else [])]
    for other in others:
        yield other, f"{label} must be a dense tensor, got layout {other.layout}"
    yield torch.nested.nested_tensor([good, good]), f"{label} must be a dense tensor, got a nested one"
    if label not in ANYWHERE and name != "view_parameters":
        yield good.to("meta"), " must be on the device of "
    if "params" not in label:  # which may have any shape
        yield good[0], f"{label} must "
    for other in ("R", None, 1j, object(), *([good.numpy()] if label != "weights" else [])):
        if other is not None or label not in MAY_BE_LEFT_OUT:
            yield other, f"{label} must be "


def assert_refused(name: str, changes: dict, message: str, error: type[Exception] | None = None) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(fedkernels, name)(**arguments_of(name) | changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    if error is not None:
        assert caught.type is error


TENSORS = {
    (name, label): (argument, good, put)
    for name in OPERATORS
    for argument, value in arguments_of(name).items()
    for label, good, put in tensors_within(value, argument)
}


@pytest.mark.parametrize("place", TENSORS, ids=", ".join)
def test_other_tensors_are_refused(place):
    (name, label), (argument, good, put) = place, TENSORS[place]
    for bad, message in refused(name, label, good):
        assert_refused(name, {argument: put(bad)}, message, None if isinstance(bad, Tensor) else TypeError)
    if not good.is_floating_point() and good.ndim < 3:  # other strides are fine
        call, strided = getattr(fedkernels, name), torch.stack([good, good], dim=-1)[..., 0]
        values = [call(**arguments_of(name) | {argument: put(one)}) for one in (strided, good)]
        torch.testing.assert_close(*values, rtol=0, atol=0)


LISTS = [
    (name, argument)
    for name in OPERATORS
    for argument, value in arguments_of(name).items()
    if isinstance(value, (list, tuple)) and isinstance(value[0], (Tensor, list))
]


@pytest.mark.parametrize(("name", "argument"), LISTS)
def test_what_is_no_list_is_refused(name, argument):
    for bad in (R, 3.0, {"R": R}):
        assert_refused(name, {argument: bad}, f"{argument} must be a ", TypeError)


OPTIONS = [
    (name, argument)
    for name in OPERATORS
    for argument, value in OPERATORS[name].arguments.items()
    if isinstance(value, (Scalar, Choice, bool, int))
]


@pytest.mark.parametrize(("name", "argument"), OPTIONS)
def test_other_options_are_refused(name, argument, request):
    """Numbers of numpy and fractions are numbers, True and arrays of one entry are none; a truth is True or False."""
    good = OPERATORS[name].arguments[argument]
    if isinstance(good, Choice):
        for bad in ("max", 3, np.ones(2)):
            assert_refused(name, {argument: bad}, f"{argument} must be one of {good.value}", ValueError)
        return
    if isinstance(good, bool):
        for bad in (1, "no", np.int64(1), R):
            message = f"{argument} must be True or False, got {type(bad).__name__}"
            assert_refused(name, {argument: bad}, message, TypeError)
        assert_equal_calls(name, {argument: np.True_}, {argument: True})
        return
    for bad in (True, np.True_, np.array([1.0]), "1", np.str_("1"), 1j, [1.0]):
        assert_refused(name, {argument: bad}, f", got {type(bad).__name__}", TypeError)
    if isinstance(good, int):
        for bad in (1.0, np.float64(1), Fraction(1)):
            assert_refused(name, {argument: bad}, f", got {type(bad).__name__}", TypeError)
        assert_equal_calls(name, *({argument: number} for number in (np.uint8(9), np.int64(9), np.array(9), 9)))
        return
    infinite = "positive and finite" if good.least is not None else "finite"
    for bad in (math.nan, math.inf, 10**400, *([0.0, -1.0] if good.least is not None else [])):
        assert_refused(name, {argument: bad}, f"{argument} must be {infinite}, got ", ValueError)
    if good.kind == "entry":
        refusals = [
            (torch.ones(2), "must be a number or a tensor of one entry, got shape [2]"),
            (torch.tensor(1), FLOATING),
            (torch.ones(1, device="meta"), "must be on the device of the rows"),
        ]
        if good.least is not None and not is_on_gpu(request):  # where the host does not wait for the entry
            refusals += [(torch.tensor(number), "must be positive") for number in (-1.0, math.nan)]
    elif good.kind == "number":
        refusals = [(torch.tensor(1.0), "must be a Python number, got Tensor")]
    else:
        refusals = [
            (torch.ones(4).long(), FLOATING),
            (torch.ones(4, device="meta"), "must be on the device of"),
        ]
    for bad, message in refusals:
        assert_refused(name, {argument: bad}, f"{argument} {message}")
    one = 1 if argument != "lower_bounds" else 0
    kinds = np.uint8, np.int64, np.float16, np.float32, np.float64, np.longdouble, np.array, Fraction, int, float
    assert_equal_calls(name, *({argument: kind(one)} for kind in kinds))


def assert_equal_calls(name: str, *changes: dict) -> None:
    values = [getattr(fedkernels, name)(**arguments_of(name) | one) for one in changes]
    for value in values[1:]:
        torch.testing.assert_close(value, values[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name in OPERATORS for number in range(len(OPERATORS[name].misfits))]
)
def test_what_does_not_fit_is_refused(name, number):
    changes, message = OPERATORS[name].misfits[number]
    assert_refused(name, dict(changes), message)


def test_options_of_views_take_numbers_of_numpy():
    plain = fedkernels.ViewOptions(solarize=1.0, crop_scale=(0.5, 1.0)).numbers()
    for number in (np.float32(1), np.array(1.0), Fraction(1), 1):
        assert fedkernels.ViewOptions(solarize=number, crop_scale=(0.5, number)).numbers() == plain
    for bad in (True, np.array([1.0]), "1"):
        with pytest.raises(TypeError, match=f"solarize must be .*, got {type(bad).__name__}"):
            fedkernels.ViewOptions(solarize=bad)
    factors = [
        fedkernels.view_parameters(LABELS, fedkernels.ViewKey(seed), 4, 4).factors
        for seed in (np.int64(3), np.array(3), 3)
    ]
    assert torch.equal(factors[0], factors[2])
    assert torch.equal(factors[1], factors[2])


HUGE = 2**31
LONG = torch.ones(1, 2).expand(HUGE, 2)  # 2^32 entries, 8 bytes


@pytest.mark.cpu_only(reason="their copy would have them all")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fedkernels.info_nce(LONG, R[:, :2], 0.5),
            f"key must have at least the B = {HUGE} rows of query, got 4",
        ),
        (lambda: fedkernels.linear_cka_to_kernel(LONG, torch.eye(4)), rf"kernel must be \[..., {HUGE}, {HUGE}\]"),
        (
            lambda: fedkernels.unbalanced_ot(LONG, torch.ones(4), 1.0, 1.0, 1.0),
            rf"a must be a number or have .*\[..., {HUGE}\]",
        ),
        (lambda: fedkernels.apply_deltas([LONG], [[LONG]], [1.0]), r"global_params\[0\] must not overlap itself"),
    ],
)
def test_two_to_the_31_rows_are_checked_before_they_are_touched(call, message):
    with pytest.raises(ValueError, match=message):
        call()
