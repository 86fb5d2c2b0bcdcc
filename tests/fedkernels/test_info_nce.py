"""info_nce against loops in float64 and torch's cross-entropy."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkernels import info_nce


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


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_that_are_formed_in_the_backward_pass_keep_the_inputs_alone(reduction):
    query, key = rows(33, 65, 1).requires_grad_(), rows(40, 65, 2).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = info_nce(query, key, 0.2, reduction, recompute=True)
    if loss.grad_fn.name().startswith("Generated"):  # the compiled operator's
        assert {x.data_ptr() for x in kept} == {query.data_ptr(), key.data_ptr()}
    truth = info_nce(query, key, 0.2, reduction)
    torch.testing.assert_close(loss, truth)
    found, expected = (torch.autograd.grad(one.sum(), [query, key]) for one in (loss, truth))
    torch.testing.assert_close(found, expected)
    (alone,) = torch.autograd.grad(info_nce(query, key.detach(), 0.2, reduction, recompute=True).sum(), query)
    torch.testing.assert_close(alone, found[0])


def test_extreme_but_legal_inputs():
    assert info_nce(rows(1, 3), rows(1, 3), 1.0) == 0  # one query, one key
    same = torch.ones(4, 3)
    torch.testing.assert_close(info_nce(same, same, 0.1), torch.tensor(4.0).log())
    torch.testing.assert_close(info_nce(0 * same, same, 0.1), torch.tensor(4.0).log())
    query, key = rows(3, 4, 1), rows(5, 4, 2)
    query[1, 2] = torch.nan
    assert info_nce(query, key, 1.0, "none").isnan().tolist() == [False, True, False]


def test_a_key_that_is_infinitely_far_from_all_queries_counts_nothing():
    """Its logits are -inf. In lanes without a query they are 0 * -inf, and must not reach its gradient."""
    query, key = rows(5, 4, 1).abs(), rows(7, 4, 2)
    near = key[:6].clone().requires_grad_()
    key[6, 0] = -torch.inf
    loss, truth = info_nce(query, key.requires_grad_(), 0.5), info_nce(query, near, 0.5)
    torch.testing.assert_close(loss, truth)
    (gradient,), (of_near,) = torch.autograd.grad(loss, key), torch.autograd.grad(truth, near)
    torch.testing.assert_close(gradient, torch.cat([of_near, torch.zeros(1, 4)]))


def of_what_remains(query, key, temperature, positives, left_out):
    """Cross-entropy of the keys that remain; a positive is never left out."""
    left_out = left_out.scatter(1, positives[:, None], False)
    logits = (query @ key.T / temperature).masked_fill(left_out, -torch.inf)
    return F.cross_entropy(logits, positives, reduction="none")


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
        truth = of_what_remains(query, torch.cat([key, negatives]), temperature, positives, left_out)
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


@pytest.mark.cpu_only(reason="on a GPU the positives are not looked at")
def test_positives_out_of_range_are_named():
    with pytest.raises(ValueError, match="positives must be from 0 to N - 1 = 2, got 0 to 3"):
        info_nce(torch.ones(2, 3), torch.ones(3, 3), 1.0, positives=torch.tensor([0, 3]))
