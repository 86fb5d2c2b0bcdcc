"""info_nce against loops in float64 and torch's cross-entropy."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fedkernels
from fedkernels import info_nce
from tests.fedkernels.conftest import rounding_of_weights

BF16, FP16 = torch.bfloat16, torch.float16


def rows(count, d, seed=0, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(count, d, generator=generator, dtype=torch.float64)).to(dtype)


def by_loops(query, key, temperature):
    losses = []
    for i in range(len(query)):
        logits = [sum(float(a) * float(b) for a, b in zip(query[i], k, strict=True)) / temperature for k in key]
        top = max(logits)
        losses.append(top + math.log(sum(math.exp(logit - top) for logit in logits)) - logits[i])
    return losses


def test_equals_the_formula_by_loops():
    query, key = rows(4, 3, 1), rows(7, 3, 2)
    truth = torch.tensor(by_loops(query, key, 0.3), dtype=torch.float64)
    torch.testing.assert_close(info_nce(query, key, 0.3, "none"), truth)
    torch.testing.assert_close(info_nce(query, key, 0.3), truth.mean())
    torch.testing.assert_close(info_nce(query, key, 0.3, "sum"), truth.sum())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 33), st.sampled_from([0.05, 0.2, 1.0, 7.0]))
def test_equals_cross_entropy(batch, more, d, temperature):
    query, key = rows(batch, d, 1).requires_grad_(), rows(batch + more, d, 2).requires_grad_()
    truth = F.cross_entropy(query @ key.T / temperature, torch.arange(batch))
    loss = info_nce(query, key, temperature)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, [query, key]), torch.autograd.grad(truth, [query, key]))


@pytest.mark.parametrize("of_key", [False, True])
def test_more_rows_than_the_compiled_operator_takes_at_a_time(of_key):
    """The compiled operator has blocks of 128 keys and groups of up to 512 queries; a query's weight is its own."""
    query, key = rows(600, 5, 1).requires_grad_(), rows(601, 5, 2).requires_grad_(of_key)
    weights = torch.linspace(0.1, 2, 600, dtype=torch.float64)
    loss = info_nce(query, key, 0.4, "none")
    truth = F.cross_entropy(query @ key.T / 0.4, torch.arange(600), reduction="none")
    torch.testing.assert_close(loss, truth)
    asked = [query, key] if of_key else [query]
    found = torch.autograd.grad(loss @ weights, asked)
    torch.testing.assert_close(found, torch.autograd.grad(truth @ weights, asked))


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_that_are_formed_in_the_backward_pass(reduction, dtype):
    query, key = rows(33, 65, 1, dtype).requires_grad_(), rows(40, 65, 2, dtype).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = info_nce(query, key, 0.2, reduction, recompute=True)
    if loss.grad_fn.name().startswith("Generated"):  # the compiled operator's
        assert {x.data_ptr() for x in kept} == {query.data_ptr(), key.data_ptr()}
    truth = info_nce(query, key, 0.2, reduction)
    torch.testing.assert_close(loss, truth)
    found = torch.autograd.grad(loss.sum(), [query, key])
    assert [gradient.dtype for gradient in found] == [dtype, dtype]
    for gradient, expected in zip(found, torch.autograd.grad(truth.sum(), [query, key]), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    (alone,) = torch.autograd.grad(info_nce(query, key.detach(), 0.2, reduction, recompute=True).sum(), query)
    torch.testing.assert_close(alone, found[0], rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradcheck(reduction):
    query, key = rows(3, 4, 1).requires_grad_(), rows(5, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: info_nce(q, k, 0.5, reduction), (query, key))
    assert torch.autograd.gradcheck(lambda q: info_nce(q, key.detach(), 0.5, reduction), (query,))
    assert torch.autograd.gradcheck(lambda k: info_nce(query.detach(), k, 0.5, reduction), (key,))


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_narrow_inputs_are_summed_wide(dtype):
    query, key = rows(33, 65, 1, dtype).requires_grad_(), rows(40, 65, 2, dtype).requires_grad_()
    wide_query, wide_key = query.detach().double().requires_grad_(), key.detach().double().requires_grad_()
    loss, truth = info_nce(query, key, 0.2), info_nce(wide_query, wide_key, 0.2)
    assert loss.dtype == torch.float32
    assert truth.dtype == torch.float64
    torch.testing.assert_close(loss.double(), truth, rtol=2e-6, atol=0)
    loss.backward()
    truth.backward()
    for narrow, wide in ((query, wide_query), (key, wide_key)):
        assert narrow.grad.dtype == dtype
        # One rounding to the input's dtype, nothing more.
        atol = max(1e-5, rounding_of_weights(info_nce, dtype)) * float(wide.grad.abs().max())
        torch.testing.assert_close(narrow.grad.double(), wide.grad, rtol=2 * torch.finfo(dtype).eps, atol=atol)


def test_mixed_dtypes_take_the_wider_sum():
    assert info_nce(rows(2, 3, dtype=BF16), rows(2, 3, dtype=torch.float32), 1.0).dtype == torch.float32
    assert info_nce(rows(2, 3, dtype=FP16), rows(2, 3), 1.0).dtype == torch.float64


def test_autocast_does_not_narrow():
    query, key = rows(16, 64, 1, torch.float32), rows(16, 64, 2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = info_nce(query, key, 0.1)
    assert torch.equal(inside, info_nce(query, key, 0.1))


def test_strides_do_not_matter():
    query, key = rows(4, 6, 1), rows(18, 12, 2)[::2, ::2]
    assert not key.is_contiguous()
    torch.testing.assert_close(info_nce(query.T.contiguous().T, key, 0.5), info_nce(query, key.contiguous(), 0.5))
    torch.testing.assert_close(info_nce(query[:1].expand(4, 6), key, 0.5), info_nce(query[:1].repeat(4, 1), key, 0.5))


def test_compiles_without_a_graph_break():
    query, key = rows(5, 4, 1).requires_grad_(), rows(6, 4, 2).requires_grad_()
    compiled = torch.compile(info_nce, fullgraph=True, backend="aot_eager")
    loss, truth = compiled(query, key, 0.3), info_nce(query, key, 0.3)
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, [query, key]), torch.autograd.grad(truth, [query, key]))


def test_extreme_but_legal_inputs():
    assert info_nce(rows(1, 3), rows(1, 3), 1.0) == 0  # one query, one key
    same = torch.ones(4, 3)
    torch.testing.assert_close(info_nce(same, same, 0.1), torch.tensor(4.0).log())
    torch.testing.assert_close(info_nce(0 * same, same, 0.1), torch.tensor(4.0).log())
    query, key = rows(8, 16, 1, torch.float32, 1e4).requires_grad_(), rows(8, 16, 2, torch.float32)
    loss = info_nce(query, key, 1e-3)
    torch.testing.assert_close(loss.double(), info_nce(query.double(), key.double(), 1e-3), rtol=1e-5, atol=0)
    assert torch.autograd.grad(loss, query)[0].isfinite().all()


def test_nan_stays_in_its_row():
    query, key = rows(3, 4, 1), rows(5, 4, 2)
    query[1, 2] = torch.nan
    assert info_nce(query, key, 1.0, "none").isnan().tolist() == [False, True, False]
    assert info_nce(query, key, 1.0).isnan()


def test_a_key_that_is_infinitely_far_from_all_queries_counts_nothing():
    """Its logits are -inf. In lanes without a query they are 0 * -inf, and must not reach its gradient."""
    query, key = rows(5, 4, 1).abs(), rows(7, 4, 2)
    near = key[:6].clone().requires_grad_()
    key[6, 0] = -torch.inf
    loss, truth = info_nce(query, key.requires_grad_(), 0.5), info_nce(query, near, 0.5)
    torch.testing.assert_close(loss, truth)
    (gradient,), (of_near,) = torch.autograd.grad(loss, key), torch.autograd.grad(truth, near)
    torch.testing.assert_close(gradient, torch.cat([of_near, torch.zeros(1, 4)]))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(0, 3), torch.ones(2, 3), 1.0), ValueError, "query must not be empty"),
        ((torch.ones(2, 0), torch.ones(2, 0), 1.0), ValueError, "query must not be empty"),
        ((torch.ones(3, 3), torch.ones(2, 3), 1.0), ValueError, "key must have at least the B = 3"),
        ((torch.ones(2, 3), torch.ones(2, 4), 1.0), ValueError, "key must have the d = 3"),
        ((torch.ones(3), torch.ones(2, 3), 1.0), ValueError, r"query must have shape \[B, d\], got \[3\]"),
        ((torch.ones(2, 3), torch.ones(1, 2, 3), 1.0), ValueError, "key must have shape"),
        ((torch.ones(2, 3), torch.ones(2, 3, device="meta"), 1.0), ValueError, "key must be on the device"),
        ((torch.ones(2, 3).int(), torch.ones(2, 3), 1.0), TypeError, "query must be float16"),
        (([[1.0]], torch.ones(2, 3), 1.0), TypeError, "query must be a torch.Tensor, got list"),
        ((torch.ones(2, 3), torch.ones(2, 3), 0.0), ValueError, "temperature must be positive"),
        ((torch.ones(2, 3), torch.ones(2, 3), math.inf), ValueError, "temperature must be positive"),
        ((torch.ones(2, 3), torch.ones(2, 3), math.nan), ValueError, "temperature must be positive"),
        ((torch.ones(2, 3), torch.ones(2, 3), "1"), TypeError, "temperature must be a Python number or a floating"),
        (
            (torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)),
            ValueError,
            "temperature must be a number or a tensor of",
        ),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.tensor(-1.0)), ValueError, "temperature must be positive"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.tensor(math.nan)), ValueError, "temperature must be positive"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.tensor(1)), TypeError, "temperature must be float16"),
        ((torch.ones(2, 3), torch.ones(2, 3), 1.0, "max"), ValueError, "reduction must be one of mean, sum, none"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        info_nce(*arguments)


def test_module_is_the_function():
    query, key = rows(3, 4, 1), rows(5, 4, 2)
    assert torch.equal(fedkernels.nn.InfoNCE(0.3, "sum")(query, key), info_nce(query, key, 0.3, "sum"))


def with_options(query, key, temperature, positives, left_out):
    """Cross-entropy of the keys that remain, in a loop over the queries."""
    losses = []
    for i, positive in enumerate(positives):
        keys = [positive, *(j for j in range(len(key)) if j != positive and not left_out[i, j])]
        losses.append(F.cross_entropy(key[keys] @ query[i] / temperature, torch.tensor(0)))
    return torch.stack(losses)


@pytest.mark.parametrize(("batch", "keys", "more"), [(3, 4, 2), (40, 50, 0), (520, 300, 30)])
def test_positives_negatives_and_pairs_left_out(batch, keys, more):
    generator = torch.Generator().manual_seed(0)
    query, key = rows(batch, 7, 1).requires_grad_(), rows(keys, 7, 2).requires_grad_()
    negatives = rows(more, 7, 3).requires_grad_()
    positives = torch.randint(0, keys, (batch,), generator=generator)
    labels = tuple(torch.randint(0, 4, (count,), generator=generator) for count in (batch, keys + more))
    excluded = torch.rand(batch, keys + more, generator=generator) < 0.3
    temperature = torch.tensor(0.6, dtype=torch.float64).requires_grad_()
    weights = torch.linspace(0.1, 2, batch, dtype=torch.float64)
    leaves = [query, key, negatives, temperature]
    nothing = torch.zeros_like(excluded)
    equal = labels[0][:, None] == labels[1]
    for options, left_out in (
        ({}, nothing),
        ({"labels": labels}, equal),
        ({"excluded": excluded}, excluded),
        ({"labels": labels, "excluded": excluded}, equal | excluded),
    ):
        loss = info_nce(query, key, temperature, "none", positives=positives, negatives=negatives, **options)
        truth = with_options(query, torch.cat([key, negatives]), temperature, positives.tolist(), left_out)
        torch.testing.assert_close(loss, truth)
        of_loss, of_truth = (torch.autograd.grad(one @ weights, leaves) for one in (loss, truth))
        torch.testing.assert_close(of_loss, of_truth)


@pytest.mark.parametrize("options", [{}, {"excluded": torch.zeros(5, 12, dtype=torch.bool)}])
def test_positives_by_an_offset(options):
    query, key, negatives = rows(5, 4, 1).requires_grad_(), rows(9, 4, 2).requires_grad_(), rows(3, 4, 3)
    loss = info_nce(query, key, 0.4, positives=4, negatives=negatives, **options)
    truth = F.cross_entropy(query @ torch.cat([key, negatives]).T / 0.4, torch.arange(4, 9))
    torch.testing.assert_close(loss, truth)
    torch.testing.assert_close(torch.autograd.grad(loss, [query, key]), torch.autograd.grad(truth, [query, key]))


NUMBERS = torch.arange(7)
# name: the options for 3 queries, 5 keys and 2 further negatives, which are given if the name says so
OPTIONS = {
    "temperature": {},
    "offset": {"positives": 2},
    "negatives": {},
    "positives": {"positives": torch.tensor([4, 0, 0])},
    "labels": {"labels": (NUMBERS[:3] % 2, NUMBERS[:5] % 3)},
    "excluded": {"excluded": (NUMBERS[:5] == 1).expand(3, 5)},
    "all but labels, negatives": {"positives": torch.tensor([4, 0, 0]), "excluded": (NUMBERS % 3 == 1).expand(3, 7)},
    "labels, offset, negatives": {"positives": 1, "labels": (NUMBERS[:3] % 2, NUMBERS % 3)},
}


def with_option(name, reduction="none"):
    """The loss as a function of its tensors, and these."""

    def loss(query, key, negatives, temperature):
        more = {"negatives": negatives} if "negatives" in name else {}
        return info_nce(query, key, temperature, reduction, **OPTIONS[name], **more)

    leaves = [rows(3, 4, 1), rows(5, 4, 2), rows(2, 4, 3), torch.tensor(0.5, dtype=torch.float64)]
    return loss, [leaf.requires_grad_() for leaf in leaves]


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck_of_each_option(name):
    assert torch.autograd.gradcheck(*with_option(name))


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_a_tensor_of_temperature_is_the_number(dtype):
    query, key = rows(33, 65, 1, dtype).requires_grad_(), rows(40, 65, 2, dtype).requires_grad_()
    temperature = torch.tensor([0.25], dtype=dtype, requires_grad=True)
    loss, truth = info_nce(query, key, temperature), info_nce(query, key, 0.25)
    assert loss.dtype == truth.dtype
    torch.testing.assert_close(loss, truth, rtol=2e-6, atol=0)
    *of_loss, of_temperature = torch.autograd.grad(loss, [query, key, temperature])
    for one, other in zip(of_loss, torch.autograd.grad(truth, [query, key]), strict=True):
        atol = max(1e-5, rounding_of_weights(info_nce, dtype)) * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=2 * torch.finfo(dtype).eps, atol=atol)
    wide = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    truth = torch.autograd.grad(info_nce(query.detach().double(), key.detach().double(), wide), wide)[0]
    assert of_temperature.shape == (1,)
    torch.testing.assert_close(of_temperature.double(), truth[None], rtol=max(1e-5, torch.finfo(dtype).eps), atol=0)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_compiles_without_a_graph_break(name):
    loss, leaves = with_option(name, "mean")
    torch.compiler.reset()
    compiled, truth = torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), loss(*leaves)
    torch.testing.assert_close(compiled, truth)
    wanted = [leaf for leaf in leaves if leaf is not leaves[2] or "negatives" in name]
    torch.testing.assert_close(torch.autograd.grad(compiled, wanted), torch.autograd.grad(truth, wanted))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"positives": -1}, ValueError, "positives must be an offset of at least 0, got -1"),
        ({"positives": 2}, ValueError, "key must have at least the B = 2 rows of query from row 2 on, got 3"),
        ({"positives": 0.5}, TypeError, "positives must be an integer or an int64 tensor"),
        ({"positives": NUMBERS[:3]}, ValueError, r"positives must have shape \[B\] = \[2\], got \[3\]"),
        ({"positives": NUMBERS[:2].int()}, TypeError, "positives must be int64, got torch.int32"),
        ({"positives": NUMBERS[:2].to("meta")}, ValueError, "positives must be on the device"),
        ({"negatives": torch.ones(2, 4)}, ValueError, "negatives must have the d = 3"),
        ({"negatives": [1.0]}, TypeError, "negatives must be a torch.Tensor"),
        ({"labels": NUMBERS[:3]}, TypeError, "labels must be a pair of tensors"),
        ({"labels": (NUMBERS[:3], NUMBERS[:3])}, ValueError, r"labels\[0\] must have shape \[B\] = \[2\]"),
        ({"labels": (NUMBERS[:2], NUMBERS[:2])}, ValueError, r"labels\[1\] must have shape \[N \+ M\] = \[3\]"),
        ({"labels": (NUMBERS[:2], "12")}, TypeError, r"labels\[1\] must be a torch.Tensor, got str"),
        ({"excluded": torch.ones(2, 3)}, TypeError, "excluded must be bool, got torch.float32"),
        ({"excluded": torch.ones(2, 2).bool()}, ValueError, r"excluded must have shape \[B, N \+ M\] = \[2, 3\]"),
        ({"excluded": [True]}, TypeError, "excluded must be a torch.Tensor, got list"),
    ],
)
def test_bad_options_are_named(options, error, message):
    with pytest.raises(error, match=message):
        info_nce(torch.ones(2, 3), torch.ones(3, 3), 1.0, **options)


@pytest.mark.cpu_only(reason="on a GPU the positives are not looked at")
def test_positives_out_of_range_are_named():
    with pytest.raises(ValueError, match="positives must be from 0 to N - 1 = 2, got 0 to 3"):
        info_nce(torch.ones(2, 3), torch.ones(3, 3), 1.0, positives=torch.tensor([0, 3]))
