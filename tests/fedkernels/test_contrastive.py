"""The contrastive losses, and the sums that they share, against their definitions with all logits; numerical edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedkernels
from fedkernels import clip_loss, info_nce, sigmoid_loss, supervised_contrastive_loss
from fedkernels.internal.similarity_logsumexp import similarity_logsumexp
from tests.fedkernels import definitions
from tests.fedkernels.inputs import FP64, randn
from tests.fedkernels.operators import value_and_gradients


def labels_of(features):
    """Of which some have one row alone."""
    generator, count = torch.Generator().manual_seed(len(features)), len(features)
    return 7 * torch.randint(-1 - count // 3, 1 + count // 3, (count,), generator=generator)


DEFINITIONS = {
    **{name: getattr(definitions, name) for name in ("info_nce", "nt_xent", "clip_loss", "sigmoid_loss")},
    "supervised_contrastive_loss": lambda z, by: definitions.supervised_contrastive_loss(z, labels_of(z), by),
}


def leaves_of(name, batch, more, d, temperature=0.4, bias=-1.0):
    """The rows, and a temperature or a scale, and a bias."""
    batch = max(batch, 2) if name == "supervised_contrastive_loss" else batch
    matrices = [randn(batch, d, seed=1), randn(batch + (more if name == "info_nce" else 0), d, seed=2)]
    if name == "supervised_contrastive_loss":
        del matrices[1]
    scalars = [1 / temperature if name in ("clip_loss", "sigmoid_loss") else temperature, bias][
        : 1 + (name == "sigmoid_loss")
    ]
    return [x.requires_grad_() for x in (*matrices, *(torch.tensor(scalar, dtype=FP64) for scalar in scalars))]


def loss_of(name, *given, reduction="mean"):
    if name == "supervised_contrastive_loss":
        given = given[0], labels_of(given[0]), given[1]
    return getattr(fedkernels, name)(*given, reduction=reduction)


def reduced(name, losses, leaves):
    """What "none", "sum" and "mean" give: each row counts in the mean, but where it has no positive."""
    counted = (
        definitions.positives_of(labels_of(leaves[0])).any(1).sum().clamp(min=1)
        if name == "supervised_contrastive_loss"
        else len(losses)
    )
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counted}


def weighted(value):
    return (value * torch.linspace(0.1, 2, value.numel(), dtype=FP64).view(value.shape)).sum()


@pytest.mark.parametrize("name", DEFINITIONS)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    st.integers(1, 40),
    st.integers(0, 40),
    st.integers(1, 33),
    st.sampled_from([0.05, 0.3, 1.0, 7.0]),
    st.sampled_from([-10.0, 0.0, 30.0]),
)
def test_equals_its_definition(name, batch, more, d, temperature, bias):
    leaves = leaves_of(name, batch, more, d, temperature, bias)
    for reduction, truth in reduced(name, DEFINITIONS[name](*leaves), leaves).items():
        loss = loss_of(name, *leaves, reduction=reduction)
        torch.testing.assert_close(loss, truth)
        of_loss, of_truth = (torch.autograd.grad(weighted(one), leaves, retain_graph=True) for one in (loss, truth))
        torch.testing.assert_close(of_loss, of_truth)
    numbers = [x.item() if x.ndim == 0 else x for x in leaves]
    torch.testing.assert_close(loss_of(name, *numbers), truth)


@pytest.mark.parametrize("batch", [8, 9])
def test_a_narrow_temperature_is_not_inverted_in_its_own_dtype(batch):
    """Of float64 rows."""
    temperature, labels = torch.tensor(0.003), torch.arange(batch) // 2
    for name, options in (
        ("info_nce", {}),
        ("info_nce", {"labels": (labels, labels)}),
        ("nt_xent", {}),
        ("supervised_contrastive_loss", {"labels": labels}),
    ):
        *rows, _ = leaves_of(name, batch, 0, 3)
        found, truth = (
            getattr(fedkernels, name)(*rows, temperature=one, **options) for one in (temperature, temperature.double())
        )
        torch.testing.assert_close(found, truth, rtol=1e-12, atol=0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_that_are_formed_in_the_backward_pass_keep_the_inputs_alone(reduction):
    query, key = randn(33, 65, seed=1).requires_grad_(), randn(40, 65, seed=2).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = info_nce(query, key, 0.2, reduction, recompute=True)
    if loss.grad_fn.name().startswith("Generated"):  # the compiled operator's
        assert {x.data_ptr() for x in kept} == {query.data_ptr(), key.data_ptr()}


def test_a_key_that_is_infinitely_far_from_all_queries_counts_nothing():
    """Its logits are -inf. In lanes without a query they are 0 * -inf, and must not reach its gradient."""
    query, key = randn(5, 4, seed=1).abs(), randn(7, 4, seed=2)
    near = key[:6].clone().requires_grad_()
    key[6, 0] = -torch.inf
    loss, truth = info_nce(query, key.requires_grad_(), 0.5), info_nce(query, near, 0.5)
    torch.testing.assert_close(loss, truth)
    (gradient,), (of_near,) = torch.autograd.grad(loss, key), torch.autograd.grad(truth, near)
    torch.testing.assert_close(gradient, torch.cat([of_near, torch.zeros(1, 4)]))


@pytest.mark.cpu_only(reason="on a GPU the positives are not looked at")
def test_positives_out_of_range_are_named():
    with pytest.raises(ValueError, match="positives must be from 0 to N - 1 = 2, got 0 to 3"):
        info_nce(torch.ones(2, 3), torch.ones(3, 3), 1.0, positives=torch.tensor([0, 3]))


def test_a_small_clip_loss_is_not_rounded_to_the_size_of_the_logits():
    image = torch.eye(16)
    truth = math.log1p(15 * math.exp(-8))
    assert clip_loss(image.clone().requires_grad_(), image, 8.0).item() == pytest.approx(truth, rel=1e-5)
    assert clip_loss(image + 10, image, 8.0).item() == pytest.approx(truth, rel=1e-4)  # logits of 80 and 88


@pytest.mark.parametrize("bias", [-20.0, 20.0])
def test_small_terms_of_sigmoid_loss_keep_their_digits(bias):
    """Terms of exp(-20) beside each other, in float32: neither 1 + exp(-20) nor its logarithm may be formed."""
    rows = torch.zeros(40, 3)
    truth = math.fsum([math.log1p(math.exp(-bias)), 39 * math.log1p(math.exp(bias))])
    assert sigmoid_loss(rows, rows, 1.0, bias).item() == pytest.approx(truth, rel=1e-6)
    assert sigmoid_loss(rows[:1], rows[:1], 1.0, 20.0).item() == pytest.approx(math.exp(-20), rel=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_without_positives_the_supervised_loss_and_its_gradient_are_0(rows):
    features = randn(rows, 4).requires_grad_()
    loss = supervised_contrastive_loss(features, torch.arange(rows), 0.5)
    assert loss == 0
    assert not torch.autograd.grad(loss, features)[0].any()


def test_a_row_ten_thousand_times_as_long_as_its_positives_in_float32():
    features, labels = randn(9, 16), torch.arange(9) // 2
    features[0] *= 1e4
    found, truth = (
        value_and_gradients(lambda z: supervised_contrastive_loss(z, labels, 1.0, "none"), [z.requires_grad_()])
        for z in (features.float(), features.clone())
    )
    for one, true in zip(found, truth, strict=True):
        torch.testing.assert_close(one, true.float(), rtol=1e-4, atol=1e-2)


def options_of(queries, keys):
    generator = torch.Generator().manual_seed(0)
    labels = tuple(torch.randint(0, 4, (count,), generator=generator) for count in (queries, keys))
    positives = torch.randint(0, keys, (queries,), generator=generator)
    return {"positives": positives, "labels": labels, "excluded": torch.rand(queries, keys, generator=generator) < 0.3}


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 9), (600, 700)])
def test_logsumexp_of_what_is_not_left_out(queries, keys):
    query, key = (randn(count, 7, seed=seed).requires_grad_() for seed, count in ((1, queries), (2, keys)))
    numbers, options = torch.arange(queries), options_of(queries, keys)
    positives = options["positives"]
    logits = query @ key.T
    left_out = options["excluded"] | (options["labels"][0][:, None] == options["labels"][1])
    left_out[numbers, positives] = False
    remaining = logits.masked_fill(left_out, -torch.inf)
    results = similarity_logsumexp(query, key, **options, columns=True)
    truth = remaining.logsumexp(1), remaining.logsumexp(0), logits[numbers, positives]
    torch.testing.assert_close(results, truth)
    weights = [randn(len(one), seed=3) for one in truth]
    found, expected = (torch.autograd.grad(of, (query, key), weights, retain_graph=True) for of in (results, truth))
    torch.testing.assert_close(found, expected)
    plain = similarity_logsumexp(query, key)
    assert plain[1:] == (None, None)
    torch.testing.assert_close(plain[0], logits.logsumexp(1))


@pytest.mark.parametrize("columns", [False, True])
def test_where_all_pairs_are_left_out_the_result_is_minus_infinity_and_the_gradient_0(columns):
    query, key = randn(3, 4, seed=1).requires_grad_(), randn(5, 4, seed=2).requires_grad_()
    excluded = torch.zeros(3, 5, dtype=torch.bool)
    excluded[1], excluded[:, 2] = True, True
    sums = similarity_logsumexp(query, key, excluded=excluded, columns=True)[:2]
    assert sums[0][1] == sums[1][2] == -torch.inf
    of_query, of_key = torch.autograd.grad(sums[columns], (query, key), torch.ones_like(sums[columns]))
    assert not of_query[1].any()
    assert not of_key[2].any()
    assert of_query.isfinite().all()
