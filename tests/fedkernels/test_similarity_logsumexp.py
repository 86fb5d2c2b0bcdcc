"""similarity_logsumexp against torch.logsumexp of all pairs; the losses' tests and the ranks' have its gradients."""

import pytest
import torch

from fedkernels.internal.similarity_logsumexp import similarity_gradients, similarity_logsumexp

NOTHING = -torch.inf


def rows(count, d, seed=0):
    return torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def options_of(queries, keys):
    generator = torch.Generator().manual_seed(0)
    labels = tuple(torch.randint(0, 4, (count,), generator=generator) for count in (queries, keys))
    positives = torch.randint(0, keys, (queries,), generator=generator)
    return {"positives": positives, "labels": labels, "excluded": torch.rand(queries, keys, generator=generator) < 0.3}


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 9), (600, 700)])
def test_equals_logsumexp_of_what_is_not_left_out(queries, keys):
    query, key, options = rows(queries, 7, 1), rows(keys, 7, 2), options_of(queries, keys)
    numbers, positives = torch.arange(queries), options["positives"]
    logits = query @ key.T
    left_out = options["excluded"] | (options["labels"][0][:, None] == options["labels"][1])
    left_out[numbers, positives] = False
    remaining = logits.masked_fill(left_out, NOTHING)
    results = similarity_logsumexp(query, key, **options, columns=True)
    torch.testing.assert_close(results, (remaining.logsumexp(1), remaining.logsumexp(0), logits[numbers, positives]))
    plain = similarity_logsumexp(query, key)
    assert plain[1:] == (None, None)
    torch.testing.assert_close(plain[0], logits.logsumexp(1))


@pytest.mark.parametrize("columns", [False, True])
def test_where_all_pairs_are_left_out_the_result_is_minus_infinity_and_the_gradient_0(columns):
    query, key = rows(3, 4, 1).requires_grad_(), rows(5, 4, 2).requires_grad_()
    excluded = torch.zeros(3, 5, dtype=torch.bool)
    excluded[1], excluded[:, 2] = True, True
    of_rows, of_columns, _ = similarity_logsumexp(query, key, excluded=excluded, columns=True)
    assert of_rows[1] == of_columns[2] == NOTHING
    chosen = {"columns": of_columns} if columns else {"rows": of_rows}
    weights = {f"{name[:-1]}_weights": torch.ones_like(one) for name, one in chosen.items()}
    of_query, of_key = similarity_gradients(query, key, excluded=excluded, **chosen, **weights)
    assert torch.equal(of_query[1], torch.zeros(4).double())
    assert torch.equal(of_key[2], torch.zeros(4).double())
    assert of_query.isfinite().all()


def test_positives_have_a_weight_of_their_own():
    query, key, positives = rows(6, 3, 1), rows(4, 3, 2), torch.tensor([0, 3, 3, 1, 2, 0])
    weights = torch.linspace(-1, 1, 6, dtype=torch.float64)
    of_query, of_key = similarity_gradients(query, key, positives=positives, positive_weights=weights)
    torch.testing.assert_close(of_query, weights[:, None] * key[positives])
    torch.testing.assert_close(of_key, torch.zeros_like(key).index_add(0, positives, weights[:, None] * query))
