"""Arguments that every operator refuses: dtypes, layouts, devices, sizes; and empty ones that it accepts."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from fedkernels import (
    ViewKey,
    ViewOptions,
    apply_deltas,
    client_weights,
    clip_loss,
    delta_gram,
    info_nce,
    linear_cka,
    linear_cka_pairwise,
    linear_cka_to_kernel,
    nt_xent,
    sigmoid_loss,
    supervised_contrastive_loss,
    unbalanced_ot,
    unbalanced_ot_plan,
    view_parameters,
)

FP32, FP64 = torch.float32, torch.float64
NAN, INF = math.nan, math.inf


def randn(*shape, seed=0, dtype=FP64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


R, LABELS = torch.ones(4, 3), torch.tensor([0, 0, 1, 1])
# name, argument: a call with `bad` in the place of that argument
CALLS = {
    ("info_nce", "query"): lambda bad: info_nce(bad, R, 0.5),
    ("info_nce", "key"): lambda bad: info_nce(R, bad, 0.5),
    ("nt_xent", "view1"): lambda bad: nt_xent(bad, R, 0.5),
    ("nt_xent", "view2"): lambda bad: nt_xent(R, bad, 0.5),
    ("clip_loss", "image"): lambda bad: clip_loss(bad, R, 0.5),
    ("clip_loss", "text"): lambda bad: clip_loss(R, bad, 0.5),
    ("sigmoid_loss", "image"): lambda bad: sigmoid_loss(bad, R, 0.5, 0.0),
    ("sigmoid_loss", "text"): lambda bad: sigmoid_loss(R, bad, 0.5, 0.0),
    ("supervised_contrastive_loss", "features"): lambda bad: supervised_contrastive_loss(bad, LABELS, 0.5),
    ("linear_cka", "x"): lambda bad: linear_cka(bad, R),
    ("linear_cka", "y"): lambda bad: linear_cka(R, bad),
    ("linear_cka_to_kernel", "x"): lambda bad: linear_cka_to_kernel(bad, torch.eye(4)),
    ("linear_cka_to_kernel", "kernel"): lambda bad: linear_cka_to_kernel(R, bad),
    ("linear_cka_pairwise", "xs[1]"): lambda bad: linear_cka_pairwise([R, bad], [R]),
    ("linear_cka_pairwise", "ys[0]"): lambda bad: linear_cka_pairwise([R], [bad]),
    ("unbalanced_ot", "cost"): lambda bad: unbalanced_ot(bad, 1.0, 1.0, 0.8, 0.8),
    ("unbalanced_ot", "a"): lambda bad: unbalanced_ot(R, bad, 1.0, 0.8, 0.8),
    ("unbalanced_ot", "b"): lambda bad: unbalanced_ot(R, 1.0, bad, 0.8, 0.8),
    ("unbalanced_ot_plan", "cost"): lambda bad: unbalanced_ot_plan(bad, 1.0, 1.0, 0.8, 0.8),
    ("client_weights", "gram"): client_weights,
    ("delta_gram", "global_params[1]"): lambda bad: delta_gram([R, bad], [[R, R]]),
    ("delta_gram", "client_params[0][1]"): lambda bad: delta_gram([R, R], [[R, bad]]),
    ("apply_deltas", "global_params[1]"): lambda bad: apply_deltas([R.clone(), bad], [[R, R]], [1.0]),
    ("apply_deltas", "client_params[0][1]"): lambda bad: apply_deltas([R.clone(), R.clone()], [[R, bad]], [1.0]),
    ("apply_deltas", "weights"): lambda bad: apply_deltas([R.clone()], [[R]], bad),
}
NOT_FLOATING = [
    R.int(),
    R.long(),
    R.bool(),
    R.to(torch.complex64),
    R.to(torch.float8_e4m3fn),
]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("call", CALLS)
def test_other_dtypes_and_layouts_are_refused(call):
    for bad in NOT_FLOATING:
        with pytest.raises(TypeError) as caught:
            CALLS[call](bad)
        assert str(caught.value) == f"{call[1]} must be float16, bfloat16, float32 or float64, got {bad.dtype}"
    for bad in (R.to_sparse(), R.to_sparse_csr(), R.to_mkldnn()):
        with pytest.raises(TypeError) as caught:
            CALLS[call](bad)
        assert str(caught.value) == f"{call[1]} must be a dense tensor, got layout {bad.layout}"


@pytest.mark.parametrize("argument", ["labels", "labels[0]", "labels[1]", "positives", "excluded"])
def test_labels_and_masks_are_exact_and_dense(argument):
    """So classes .2 and .4 cannot become one."""

    def call(bad):
        if argument == "labels":
            return supervised_contrastive_loss(R, bad, 0.5)
        if argument in ("positives", "excluded"):
            return info_nce(R, R, 0.5, **{argument: bad})
        return info_nce(R, R, 0.5, labels=(bad, LABELS) if argument == "labels[0]" else (LABELS, bad))

    good = torch.eye(4, dtype=torch.bool) if argument == "excluded" else LABELS
    kind = "bool" if argument == "excluded" else "int64"
    for dtype in (torch.float32, torch.int32, torch.uint8):
        with pytest.raises(TypeError, match=rf"^{re.escape(argument)} must be {kind}, got {dtype}"):
            call(good.to(dtype))
    with pytest.raises(TypeError, match=rf"^{re.escape(argument)} must be a dense tensor"):
        call(good.to_sparse())
    with pytest.raises(ValueError, match=rf"^{re.escape(argument)} must have shape \[[BN].*, got \[3"):
        call(good[:3])
    with pytest.raises(ValueError, match=rf"^{re.escape(argument)} must be on the device of"):
        call(good.to("meta"))
    strided = torch.stack([good, good], dim=-1)[..., 0]
    torch.testing.assert_close(call(strided), call(good), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    with pytest.raises(TypeError, match="query must be a dense tensor, got a nested one"):
        info_nce(torch.nested.nested_tensor([R, R]), R, 0.5)


def test_truths_of_numpy_are_truths():
    rows = randn(5, 3)
    assert linear_cka(rows, rows[:, :2], np.True_) == linear_cka(rows, rows[:, :2], True)
    for bad in (1, "no", None, np.int64(1)):
        with pytest.raises(TypeError, match="recompute must be True or False"):
            info_nce(rows, rows, 0.5, recompute=bad)


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_tensor_is_refused(call):
    for bad in ("R", None, R.numpy(), object()):
        with pytest.raises(TypeError) as caught:
            CALLS[call](bad)
        assert str(caught.value).startswith(f"{call[1]} must be a ")
        assert str(caught.value).endswith(f"got {type(bad).__name__}")


@pytest.mark.parametrize("call", [call for call in CALLS if call[1] not in ("a", "b", "weights", "gram", "cost")])
def test_another_device_is_refused(call):
    with pytest.raises(ValueError, match="must be on the device of") as caught:
        CALLS[call](torch.eye(4, device="meta") if call[1] == "kernel" else R.to("meta"))
    assert "\n" not in str(caught.value)


# ---- numbers ------------------------------------------------------------------------------------------------

ID = torch.eye(1, dtype=FP64)
# name, argument: a call with a number in the place of that argument
NUMBERS = {
    ("info_nce", "temperature"): lambda number: info_nce(R, R, number),
    ("nt_xent", "temperature"): lambda number: nt_xent(R, R, number),
    ("clip_loss", "logit_scale"): lambda number: clip_loss(R, R, number),
    ("sigmoid_loss", "logit_scale"): lambda number: sigmoid_loss(R, R, number, 0.5),
    ("sigmoid_loss", "logit_bias"): lambda number: sigmoid_loss(R, R, 0.5, number),
    ("supervised_contrastive_loss", "temperature"): lambda number: supervised_contrastive_loss(R, LABELS, number),
    ("unbalanced_ot", "a"): lambda number: unbalanced_ot(R, number, 2.0, 0.8, 0.8),
    ("unbalanced_ot", "tau_b"): lambda number: unbalanced_ot(R, 2.0, 2.0, 0.8, number),
    ("unbalanced_ot_plan", "tol"): lambda number: unbalanced_ot_plan(R, 2.0, 2.0, 0.8, 0.8, tol=number)[0],
    ("client_weights", "lower_bounds"): lambda number: client_weights(ID, lower_bounds=number),
    ("client_weights", "tol"): lambda number: client_weights(ID, tol=number),
    ("ViewOptions", "solarize"): lambda number: torch.tensor(ViewOptions(solarize=number).numbers()),
    ("ViewOptions", "crop_scale"): lambda number: torch.tensor(ViewOptions(crop_scale=(0.5, number)).numbers()),
}
INTEGERS = {
    ("info_nce", "positives"): lambda number: info_nce(R[:3], R, 0.5, positives=number),
    ("unbalanced_ot", "max_iterations"): lambda number: unbalanced_ot(R, 0.5, 0.5, 0.8, 0.8, max_iterations=number),
    ("view_parameters", "key.seed"): lambda number: view_parameters(LABELS, ViewKey(number), 4, 4).factors,
}


@pytest.mark.filterwarnings("ignore:the optimum transports nothing")
@pytest.mark.parametrize("call", NUMBERS | INTEGERS)
def test_numbers_of_numpy_are_numbers(call):
    """And so are integers and fractions where a float is meant; True and arrays of one entry are none."""
    compute = (NUMBERS | INTEGERS)[call]
    others = [np.float16(1), np.float32(1), np.float64(1), np.longdouble(1), np.array(1.0), Fraction(1), 1]
    for number in [np.uint8(1), np.int64(1), np.array(1), *(others if call in NUMBERS else [])]:
        torch.testing.assert_close(compute(number), compute(1.0 if call in NUMBERS else 1), rtol=0, atol=0)
    for bad in (True, np.True_, np.array([1.0]), "1", np.str_("1"), 1j, *([] if call in NUMBERS else others[:-1])):
        with pytest.raises(TypeError, match=rf"^{call[1]} must be .*, got {type(bad).__name__}"):
            compute(bad)


# ---- sizes --------------------------------------------------------------------------------------------------

HUGE = 2**31
LONG = torch.ones(1, 2).expand(HUGE, 2)  # 2^32 entries, 8 bytes


@pytest.mark.cpu_only(reason="their copy would have them all")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: info_nce(LONG, R[:, :2], 0.5), f"key must have at least the B = {HUGE} rows of query, got 4"),
        (lambda: info_nce(R[:, :2], LONG.T, 0.5), f"key must have the d = 2 columns of query, got {HUGE}"),
        (lambda: nt_xent(LONG, R, 0.5), rf"view2 must have the shape \[{HUGE}, 2\] of view1, got \[4, 3\]"),
        (lambda: nt_xent(R, LONG, 0.5), rf"view2 must have the shape \[4, 3\] of view1, got \[{HUGE}, 2\]"),
        (lambda: linear_cka(LONG, R), f"y must have the L = {HUGE} rows of x, got 4"),
        (lambda: linear_cka_to_kernel(LONG, torch.eye(4)), rf"kernel must be \[..., {HUGE}, {HUGE}\]"),
        (lambda: linear_cka_pairwise([LONG, R], [R]), rf"xs\[1\] must have the L = {HUGE} rows of xs\[0\], got 4"),
        (lambda: unbalanced_ot(LONG, torch.ones(4), 1.0, 1.0, 1.0), rf"a must be a number or have .*\[..., {HUGE}\]"),
        (lambda: unbalanced_ot(LONG.T, 1.0, torch.ones(4), 1.0, 1.0), rf"b must be a number or have .*\[..., {HUGE}\]"),
        (lambda: client_weights(LONG), rf"gram must have shape \[..., K, K\], got \[{HUGE}, 2\]"),
        (lambda: delta_gram([LONG], [[LONG.T]]), rf"client_params\[0\]\[0\] must have the shape \[{HUGE}, 2\]"),
        (lambda: apply_deltas([LONG], [[R]], [1.0]), rf"client_params\[0\]\[0\] must have the shape \[{HUGE}, 2\]"),
        (lambda: apply_deltas([LONG], [[LONG]], [1.0]), r"global_params\[0\] must not overlap itself"),
    ],
)
def test_two_to_the_31_rows_are_checked_before_they_are_touched(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: info_nce(R[:0], R, 0.5),
        lambda: info_nce(R[:, :0], R[:, :0], 0.5),
        lambda: nt_xent(R[:0], R[:0], 0.5),
        lambda: nt_xent(R[:, :0], R[:, :0], 0.5),
        lambda: linear_cka(R[:0], R[:0]),
        lambda: linear_cka(R, R[:, :0]),
        lambda: linear_cka_to_kernel(R[:0], R[:0, :0]),
        lambda: linear_cka_pairwise([R[:, :0]], [R]),
        lambda: unbalanced_ot(R[:0], 1.0, 1.0, 1.0, 1.0),
        lambda: client_weights(R[:0, :0]),
    ],
)
def test_empty_problems_are_refused(call):
    with pytest.raises(ValueError, match=r"must not be empty in .*, got shape \["):
        call()


def test_empty_batches_and_parameters_are_fine():
    assert linear_cka(torch.ones(0, 4, 3), R).shape == (0,)
    assert linear_cka_to_kernel(torch.ones(2, 0, 4, 3), torch.eye(4)).shape == (2, 0)
    assert unbalanced_ot(torch.ones(0, 4, 3), 1.0, 1.0, 1.0, 1.0).shape == (0,)
    assert client_weights(torch.ones(3, 0, 4, 4)).shape == (3, 0, 4)
    assert delta_gram([R[:0]], [[R[:0]], [R[:0]]]).tolist() == [[0, 0], [0, 0]]
    empty = R[:0].clone()
    apply_deltas([empty], [[R[:0]]], [1.0])
    assert empty.shape == (0, 3)


# ---- memory -------------------------------------------------------------------------------------------------
