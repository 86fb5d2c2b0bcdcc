"""Hostile input to every operator: the reference's value, NaN for NaN, or an error that names the argument."""

import math
import warnings

import pytest
import torch

from fedkernels import (
    _native,
    apply_deltas,
    client_weights,
    delta_gram,
    info_nce,
    linear_cka,
    linear_cka_pairwise,
    linear_cka_to_kernel,
    nt_xent,
    unbalanced_ot,
    unbalanced_ot_plan,
)

FP32, FP64 = torch.float32, torch.float64
NAN, INF = math.nan, math.inf


def randn(*shape, seed=0, dtype=FP64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def by_reference(function, monkeypatch):
    """`function` as it is without the compiled module."""

    def run(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(_native, "module", None)
            return function(*arguments, **options)

    return run


def value_and_gradients(function, tensors, needed):
    leaves = [tensor.detach().clone().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
    value = function(*leaves)
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    return [value.detach(), *(torch.autograd.grad(value.sum(), asked) if asked else ())]


def assert_agree(function, tensors, needed, monkeypatch, atol=1e-9):
    """NaN and infinity of the values are those of the reference, as are the finite entries of all gradients."""
    value, *grads = value_and_gradients(function, tensors, needed)
    truth, *true_grads = by_reference(value_and_gradients, monkeypatch)(function, tensors, needed)
    torch.testing.assert_close(value, truth, rtol=1e-9, atol=atol, equal_nan=True)
    for grad, true_grad in zip(grads, true_grads, strict=True):
        # The gradient of an infinite loss may be infinity or NaN.
        assert torch.equal(grad.isfinite(), true_grad.isfinite())
        finite = true_grad.isfinite()
        size = float(true_grad[finite].abs().max()) if finite.any() else 0
        torch.testing.assert_close(grad[finite], true_grad[finite], rtol=1e-9, atol=atol * (1 + size))


def nothing(rows):
    pass


def one(value):
    def poison(rows):
        rows[..., rows.shape[-2] // 2, 0] = value

    return poison


def row(value):
    def poison(rows):
        rows[..., rows.shape[-2] // 2, :] = value

    return poison


def every(value):
    def poison(rows):
        rows[...] = value

    return poison


def first_columns(value):
    """Infinite products of one sign with a whole block of rows, and not with the last rows."""

    def poison(rows):
        rows.abs_()
        rows[..., : max(1, min(rows.shape[-2] - 1, 256)), 0] = value

    return poison


def duplicates(rows):
    rows[...] = rows[..., :1, :].clone()


POISONS = {
    "nothing": nothing,
    "a NaN": one(NAN),
    "a row of NaN": row(NAN),
    "all NaN": every(NAN),
    "an inf": one(INF),
    "a -inf": one(-INF),
    "a row of inf": row(INF),
    "all inf": every(INF),
    "all -inf": every(-INF),
    "a column of inf": first_columns(INF),
    "a column of -inf": first_columns(-INF),
    "a row of zeros": row(0.0),
    "all zeros": every(0.0),
    "duplicates": duplicates,
    "1e4": lambda rows: rows.mul_(1e4),
    "1e-30": lambda rows: rows.mul_(1e-30),
}
POISONED = pytest.mark.parametrize("poison", POISONS)


def poisoned(rows, poison):
    rows = rows.clone()
    POISONS[poison](rows)
    return rows


# ---- the contrastive losses ---------------------------------------------------------------------------------

BATCHES = pytest.mark.parametrize(("batch", "keys"), [(1, 1), (1, 3), (5, 5), (5, 300), (130, 270)])


@POISONED
@BATCHES
@pytest.mark.parametrize("which", ["query", "key", "both"])
def test_info_nce(poison, batch, keys, which, monkeypatch):
    query, key = randn(batch, 3, seed=1), randn(keys, 3, seed=2)
    query = query if which == "key" else poisoned(query, poison)
    key = key if which == "query" else poisoned(key, poison)
    for temperature in (1.0, 1e-3):
        for reduction in ("none", "sum"):
            for needed in ((False, False), (True, False), (True, True)):
                function = lambda q, k, t=temperature, r=reduction: info_nce(q, k, t, r)  # noqa: E731
                # Differences of logits keep the rounding of the logits.
                size = query.nan_to_num(0, 0, 0).abs().max() * key.nan_to_num(0, 0, 0).abs().max() / temperature
                assert_agree(function, (query, key), needed, monkeypatch, 1e-12 * (1 + float(size)) / temperature)


@POISONED
@pytest.mark.parametrize("batch", [1, 5, 140])
@pytest.mark.parametrize("which", ["view1", "both"])
def test_nt_xent(poison, batch, which, monkeypatch):
    view1, view2 = poisoned(randn(batch, 3, seed=1), poison), randn(batch, 3, seed=2)
    view2 = poisoned(view2, poison) if which == "both" else view2
    for temperature in (1.0, 1e-3):
        for reduction in ("none", "sum"):
            function = lambda p, q, t=temperature, r=reduction: nt_xent(p, q, t, r)  # noqa: E731
            both = torch.cat([view1, view2]).nan_to_num(0, 0, 0)
            size = float(both.abs().max()) ** 2 / temperature
            assert_agree(function, (view1, view2), (True, True), monkeypatch, 1e-12 * (1 + size) / temperature)


@pytest.mark.parametrize("needed", [(True, False), (True, True)])
def test_large_logits_in_float32(needed):
    """Logits of 1e12 at temperature 1e-3: the loss is right to float32 and nothing overflows."""
    query, key = (1e4 * randn(count, 16, seed=count, dtype=FP32) for count in (33, 40))
    for function, other in ((info_nce, key), (nt_xent, key[:33])):
        tensors = (query, other)
        value, *grads = value_and_gradients(lambda p, q, f=function: f(p, q, 1e-3), tensors, needed)
        truth = function(query.double(), other.double(), 1e-3)
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=0)
        assert all(grad.isfinite().all() for grad in grads)


def test_logits_beyond_float32_are_no_error():
    rows = torch.full((3, 2), 1e25)
    assert info_nce(rows, rows, 1.0).isnan()
    assert nt_xent(rows, rows, 1.0).isnan()
    assert info_nce(rows.double(), rows.double(), 1.0).item() == pytest.approx(math.log(3))


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e40, 1e308])
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_extreme_temperatures_end(temperature, dtype):
    query, key = randn(4, 3, dtype=dtype).requires_grad_(), randn(9, 3, seed=1, dtype=dtype).requires_grad_()
    loss = info_nce(query, key, temperature) + nt_xent(query, key[:4], temperature)
    torch.autograd.grad(loss, [query, key])
    if temperature > 1:
        assert loss.item() == pytest.approx(math.log(9) + math.log(7))


# ---- CKA ----------------------------------------------------------------------------------------------------


@POISONED
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (7, 3), (5, 9), (300, 3), (2, 6, 4)])
def test_linear_cka(poison, centered, shape, monkeypatch):
    x, y = poisoned(randn(*shape, seed=1), poison), randn(*shape[:-1], 4, seed=2)
    kernel = y @ y.mT
    cases = [
        (lambda x, y: linear_cka(x, y, centered), (x, y)),
        (lambda x, y: linear_cka(y, x, centered), (x, y)),
        (lambda x: linear_cka(x, x, centered), (x,)),
        (lambda x, k: linear_cka_to_kernel(x, k, centered), (x, kernel)),
        (lambda y, k: linear_cka_to_kernel(y, k, centered), (y, poisoned(kernel, poison))),
    ]
    if len(shape) == 2:
        cases.append((lambda x, y: linear_cka_pairwise([x, y], [y, x], centered), (x, y)))
    for function, tensors in cases:
        size = 1e-6 * float(1 / tensors[0].nan_to_num(1, 1, 1).norm().clamp(min=1e-40))  # of the gradient
        assert_agree(function, tensors, (True,) * len(tensors), monkeypatch, 1e-9 + size)


# ---- transport ----------------------------------------------------------------------------------------------


@POISONED
@pytest.mark.parametrize("shape", [(1, 1), (5, 4), (2, 9, 20)])
@pytest.mark.filterwarnings("ignore:the optimum transports nothing")
def test_unbalanced_ot(poison, shape, monkeypatch):
    cost, a = poisoned(randn(*shape, seed=1).abs(), poison), 0.2 + randn(*shape[:-1], seed=2).abs()
    b = poisoned(0.2 + randn(*shape[:-2], shape[-1], 1, seed=3).abs(), poison).squeeze(-1)
    for masses, costs in ((torch.ones_like(b), cost), (b, randn(*shape, seed=1).abs())):
        with warnings.catch_warnings():
            # Two masses of 1e4 that meet costs of order 1 are 1e8 apart from the gap's last digit.
            warnings.simplefilter("ignore", RuntimeWarning)
            value = unbalanced_ot(costs, a, masses, 0.8, 0.9, tol=1e-7)
            plan, info = unbalanced_ot_plan(costs, a, masses, 0.8, 0.9, tol=1e-7)
            truth = by_reference(unbalanced_ot, monkeypatch)(costs, a, masses, 0.8, 0.9, tol=1e-7)
        torch.testing.assert_close(value, truth, rtol=1e-6, atol=1e-12, equal_nan=True)
        assert torch.equal(plan.isnan().all(-1).all(-1), value.isnan())
        assert torch.equal(info.gap.isnan(), value.isnan())
        assert not (plan < 0).any()


def test_negative_costs_and_masses(monkeypatch):
    cost, a, b = randn(3, 9, 8, seed=1), randn(3, 9, seed=2), randn(3, 8, seed=3)
    value = unbalanced_ot(cost, a, b, 0.8, 0.9, tol=1e-8)
    torch.testing.assert_close(value, by_reference(unbalanced_ot, monkeypatch)(cost, a, b, 0.8, 0.9, tol=1e-8))


# ---- the server's step --------------------------------------------------------------------------------------


@POISONED
def test_client_weights(poison, monkeypatch):
    deltas = poisoned(randn(6, 40, seed=1), poison)
    gram = deltas @ deltas.T
    if gram.isfinite().all():
        weights = client_weights(gram)
        torch.testing.assert_close(weights, by_reference(client_weights, monkeypatch)(gram))
        assert float(weights.sum()) == pytest.approx(1)
        return
    with pytest.raises(ValueError, match="gram must be finite"):
        client_weights(gram)
    batch = torch.stack([torch.eye(6, dtype=FP64), gram])
    with pytest.raises(ValueError, match="gram must be finite"):
        client_weights(batch)


def test_client_weights_of_extreme_scale():
    gram = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=FP64))
    for scale in (1e-300, 1e-150, 1e150, 1e300):
        torch.testing.assert_close(client_weights(scale * gram), client_weights(gram))
    torch.testing.assert_close(client_weights(gram.float() * 1e-38), client_weights(gram.float()))


@POISONED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP32, FP64])
def test_parameters_that_are_not_finite(poison, dtype, monkeypatch):
    """NaN and infinity come through both functions as the references let them, and stay in their entries."""
    start = [randn(5, 7, seed=1).to(dtype), randn(1, seed=2)]
    clients = [[poisoned(randn(5, 7, seed=3), poison).to(dtype), randn(1, seed=4)], [randn(5, 7, seed=5), start[1]]]
    truth = by_reference(delta_gram, monkeypatch)(start, clients)
    torch.testing.assert_close(delta_gram(start, clients), truth, rtol=1e-12, atol=1e-12, equal_nan=True)
    stepped = [[tensor.clone() for tensor in start] for _ in range(2)]
    apply_deltas(stepped[0], clients, [0.5, 0.25])
    by_reference(apply_deltas, monkeypatch)(stepped[1], clients, [0.5, 0.25])
    for tensor, true in zip(*stepped, strict=True):
        torch.testing.assert_close(tensor, true, rtol=0, atol=0, equal_nan=True)


# ---- what is no tensor of the right kind --------------------------------------------------------------------

R = torch.ones(4, 3)
# name, argument: a call with `bad` in the place of that argument
CALLS = {
    ("info_nce", "query"): lambda bad: info_nce(bad, R, 0.5),
    ("info_nce", "key"): lambda bad: info_nce(R, bad, 0.5),
    ("nt_xent", "view1"): lambda bad: nt_xent(bad, R, 0.5),
    ("nt_xent", "view2"): lambda bad: nt_xent(R, bad, 0.5),
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

MEMORY = torch.arange(24, dtype=FP64).sin()
# name: function of one tensor [4, 4]
OF_ONE = {
    "info_nce": lambda x: info_nce(x, x, 0.5),
    "info_nce, not reduced": lambda x: info_nce(x, x, 0.5, "none"),
    "nt_xent": lambda x: nt_xent(x, x, 0.5),
    "linear_cka": lambda x: linear_cka(x, x[:, :2]),
    "linear_cka_to_kernel": lambda x: linear_cka_to_kernel(x, x @ x.T),
    "linear_cka_pairwise": lambda x: linear_cka_pairwise([x, x[:, :2]], [x]),
    "unbalanced_ot": lambda x: unbalanced_ot(x, x[:, 0].abs(), x[0].abs(), 0.8, 0.9, tol=1e-9),
    "unbalanced_ot_plan": lambda x: unbalanced_ot_plan(x, 1.0, 1.0, 0.8, 0.9)[0],
    "client_weights": lambda x: client_weights((x + x.T) * torch.ones(4) + 9 * torch.eye(4)),
    "client_weights, as given": lambda x: client_weights((x.T @ x).as_strided((4, 4), (4, 1))),
    "delta_gram": lambda x: delta_gram([x], [[x], [x.T], [x[:1].expand(4, 4)]]),
}
OVERLAPPING = {
    "windows": MEMORY.as_strided((4, 4), (1, 1)),
    "one row": MEMORY[:4].expand(4, 4),
    "one column": MEMORY[:4, None].expand(4, 4),
    "one entry": MEMORY[1].expand(4, 4),
    "transposed": MEMORY[:16].view(4, 4).T,
    "reversed in steps": MEMORY.as_strided((4, 4), (1, 5), 2),
}


@pytest.mark.filterwarnings("ignore:the optimum transports nothing")
@pytest.mark.parametrize("name", OF_ONE)
@pytest.mark.parametrize("view", OVERLAPPING)
def test_overlapping_input_is_read_as_if_it_did_not(name, view):
    function, before = OF_ONE[name], MEMORY.clone()
    leaf, plain = OVERLAPPING[view].detach().requires_grad_(), OVERLAPPING[view].clone().requires_grad_()
    value, truth = function(leaf), function(plain)
    torch.testing.assert_close(value, truth)
    if value.requires_grad:
        grads = torch.autograd.grad(value.sum(), leaf)[0], torch.autograd.grad(truth.sum(), plain)[0]
        torch.testing.assert_close(*grads)
    assert torch.equal(MEMORY, before)


@pytest.mark.parametrize("name", OF_ONE)
def test_outputs_never_share_memory_with_inputs(name):
    leaf = randn(4, 4, seed=1).requires_grad_()
    version, value = leaf._version, OF_ONE[name](leaf)
    outputs = [value]
    if value.requires_grad:
        outputs += torch.autograd.grad(value.sum(), leaf)
    assert len({tensor.untyped_storage().data_ptr() for tensor in [leaf, *outputs]}) == 1 + len(outputs)
    assert leaf._version == version


@pytest.mark.parametrize(
    "name", [name for name in OF_ONE if not name.startswith(("unbalanced_ot_p", "client", "delta"))]
)
def test_a_leaf_may_be_used_again(name):
    """Twice in one call, in two calls, and for two backward passes."""
    function, leaf = OF_ONE[name], randn(4, 4, seed=1).requires_grad_()
    value = function(leaf).sum()
    once = torch.autograd.grad(value, leaf, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(value, leaf, retain_graph=True)[0], once)
    value.backward()
    torch.testing.assert_close(leaf.grad, once, rtol=0, atol=0)
    (function(leaf).sum() + function(leaf).sum()).backward()
    torch.testing.assert_close(leaf.grad, 3 * once)
    # Two names for the same values are two inputs, whose gradients add up.
    other = leaf.detach().clone().requires_grad_()
    if name == "info_nce":
        torch.testing.assert_close(sum(torch.autograd.grad(info_nce(leaf, other, 0.5), [leaf, other])), once)
    if name == "nt_xent":
        torch.testing.assert_close(sum(torch.autograd.grad(nt_xent(leaf, other, 0.5), [leaf, other])), once)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "linear_cka"])
def test_gradients_formed_with_the_value_do_not_read_their_inputs_again(name):
    leaf = randn(4, 4, seed=1).requires_grad_()
    truth = torch.autograd.grad(OF_ONE[name](leaf), leaf)[0]
    inside = leaf.clone()
    value = OF_ONE[name](inside)
    with torch.no_grad():
        inside.zero_()
    torch.testing.assert_close(torch.autograd.grad(value, leaf)[0], truth)


@pytest.mark.cpu_only(reason="the copy is not changed")
def test_gradients_that_wait_for_their_weights_notice_a_change():
    for function in (info_nce, nt_xent):
        leaf = randn(4, 4, seed=1).requires_grad_()
        inside = leaf.clone()
        losses = function(inside, inside, 0.5, "none")
        with torch.no_grad():
            inside.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses.sum().backward()


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize("name", OF_ONE)
def test_tensor_subclasses(name):
    rows = randn(4, 4, seed=1)
    truth = OF_ONE[name](rows)
    tagged = OF_ONE[name](rows.clone().as_subclass(Tagged))
    assert torch.equal(tagged.detach().as_subclass(torch.Tensor), truth)
    parameter = OF_ONE[name](torch.nn.Parameter(rows.clone()))
    if name in (
        "linear_cka_to_kernel",
        "linear_cka_pairwise",
    ):  # the reference serves its gradient
        torch.testing.assert_close(parameter.detach(), truth, rtol=1e-12, atol=0)
    else:
        assert torch.equal(parameter.detach(), truth)
    with torch.inference_mode():
        assert torch.equal(OF_ONE[name](rows.clone()), truth)
    conjugate = torch.complex(torch.zeros_like(rows), -rows).conj().imag  # its sign is a flag, not in memory
    assert conjugate.is_neg()
    torch.testing.assert_close(OF_ONE[name](conjugate), truth)


# ---- derivatives of derivatives -----------------------------------------------------------------------------


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("function", [info_nce, nt_xent])
def test_second_derivatives_are_refused(function, reduction):
    query, key = randn(4, 3, seed=1).requires_grad_(), randn(4, 3, seed=2).requires_grad_()
    loss = function(query, key, 0.5, reduction).sum()
    grads = torch.autograd.grad(loss, [query, key], create_graph=True)
    message = f"{function.__name__} has no second derivative in its compiled form"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(grads[0].square().sum() + grads[1].sum(), query)
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.functional.hessian(lambda q: function(q, key, 0.5, reduction).sum(), query)


@pytest.mark.usefixtures("native")
def test_second_derivatives_of_cka_are_refused():
    x, y = randn(4, 3, seed=1).requires_grad_(), randn(4, 2, seed=2).requires_grad_()
    kernel = (y @ y.T).detach()
    for name, function in (
        ("linear_cka", linear_cka),
        ("linear_cka_to_kernel", lambda x, _: linear_cka_to_kernel(x, kernel)),
    ):
        grad = torch.autograd.grad(function(x, y), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match=f"{name} has no second derivative in its compiled form"):
            torch.autograd.grad(grad.square().sum(), x)


def test_the_reference_has_second_derivatives(monkeypatch):
    monkeypatch.setattr(_native, "module", None)
    tensors = randn(3, 2, seed=1).requires_grad_(), randn(3, 2, seed=2).requires_grad_()
    for function in (info_nce, nt_xent):
        assert torch.autograd.gradgradcheck(lambda p, q, f=function: f(p, q, 0.5), tensors)
    assert torch.autograd.gradgradcheck(linear_cka, tensors)
