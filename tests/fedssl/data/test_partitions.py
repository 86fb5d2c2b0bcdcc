"""Every sample on exactly one client, the shares that each partition promises, and what is refused."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedssl.data.partitions import PartitionOptions, class_counts, format_partition, partition_indices
from fedssl.errors import UserError
from fedssl.reports.plots import draw_partition


def balanced_labels(classes: int, each: int) -> Tensor:
    return torch.arange(classes).repeat(each)


def counts_of(labels: Tensor, seed: int = 0, **options: object) -> Tensor:
    parts = partition_indices(labels, PartitionOptions(**options), seed)
    return class_counts(labels, parts, int(labels.max()) + 1)


NUMBERS = {"clients": st.integers(1, 9), "min_samples": st.integers(1, 4)}
ALPHAS = st.sampled_from([0.5, 5.0, 100.0])
DIRICHLET = st.sampled_from(["dirichlet", "dirichlet_equal", "quantity_skew"])


@settings(deadline=None, max_examples=100)
@given(
    labels=st.lists(st.integers(0, 7), min_size=1, max_size=120),
    options=st.builds(PartitionOptions, name=st.sampled_from(["iid", "disjoint_classes"]), **NUMBERS)
    | st.builds(PartitionOptions, name=DIRICHLET, alpha=ALPHAS, **NUMBERS)
    | st.builds(PartitionOptions, classes_per_client=st.integers(1, 9), **NUMBERS),
    seed=st.integers(0, 2**32),
)
def test_exact_cover_or_user_error(labels, options, seed):
    labels = torch.tensor(labels)
    try:
        parts = partition_indices(labels, options, seed)
    except UserError:
        return
    assert len(parts) == options.clients
    assert all(part.dtype == torch.int64 and (part.diff() > 0).all() for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(labels)))
    assert min(len(part) for part in parts) >= options.min_samples
    again = partition_indices(labels, options, seed)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    if options.classes_per_client is not None:
        assert all(len(labels[part].unique()) <= options.classes_per_client for part in parts)


def test_iid_shares_are_equal_and_mixed():
    labels = balanced_labels(4, 1001)
    counts = counts_of(labels, name="iid", clients=3)
    assert counts.sum(1).tolist() == [1335, 1335, 1334]
    assert (counts > 280).all()
    assert len(counts.unique()) > 4  # random, not dealt class by class
    assert not counts.equal(counts_of(labels, seed=1, name="iid", clients=3))


def test_disjoint_classes_give_whole_classes_that_are_shuffled():
    dealt = set()
    for seed in range(20):
        counts = counts_of(balanced_labels(10, 7), seed, clients=5)
        assert ((counts > 0).sum(1) == 2).all()
        assert ((counts > 0).sum(0) == 1).all()
        assert counts.max() == 7
        dealt.add(tuple(counts[0].nonzero()[:, 0].tolist()))
    assert len(dealt) > 10


def test_shared_classes_are_divided_evenly():
    """7 clients x 4 classes of 10: each class on 2 or 3 clients, its samples in equal parts."""
    counts = counts_of(balanced_labels(10, 30), clients=7, classes_per_client=4)
    assert ((counts > 0).sum(1) == 4).all()
    assert set((counts > 0).sum(0).tolist()) == {2, 3}
    assert set(counts.unique().tolist()) == {0, 10, 15}


def test_dirichlet_shares_have_the_right_spread_and_each_class_its_own():
    """A share of Dirichlet(alpha) over N clients has variance (N - 1) / (N^2 (N alpha + 1))."""
    options = {"name": "dirichlet", "clients": 4, "alpha": 2, "min_samples": 1}
    counts = [counts_of(balanced_labels(2, 1000), seed, **options) for seed in range(150)]
    shares = torch.stack(counts).double() / 1000
    assert shares.mean((0, 2)) == pytest.approx([0.25] * 4, abs=0.03)
    assert shares.var().item() == pytest.approx(3 / (16 * 9), rel=0.12)
    one_class, other_class = shares.flatten(0, 1).T
    assert torch.corrcoef(torch.stack([one_class, other_class]))[0, 1].abs() < 0.15


def test_dirichlet_equal_gives_equal_sizes_and_own_class_shares():
    labels = balanced_labels(10, 503)
    counts = counts_of(labels, name="dirichlet_equal", clients=100, alpha=0.1)
    assert set(counts.sum(1).tolist()) == {50, 51}
    assert counts.sum(0).tolist() == [503] * 10
    # the largest share of Dirichlet(0.1, ..., 0.1) over 10 classes has a mean of 0.65; an equal one is 0.1
    assert 0.5 < (counts.max(1).values / counts.sum(1)).mean() < 0.7
    even = counts_of(labels, name="dirichlet_equal", clients=100, alpha=1000)
    assert (even - 5).abs().max() <= 9


def test_dirichlet_equal_follows_the_priors_while_classes_last():
    """Two clients, one class each by a tiny alpha: one that both prefer is shared, and the other filled up with."""
    labels = torch.tensor([0] * 60 + [1] * 40)
    seen = set()
    for seed in range(20):
        counts = counts_of(labels, seed, name="dirichlet_equal", clients=2, alpha=0.001)
        seen.add(tuple(counts.flatten().tolist()))
    # different tastes: all of class 0's taker is of class 0, its rest goes to the other; same tastes: dealt in turns
    assert {(50, 0, 10, 40), (10, 40, 50, 0), (30, 20, 30, 20)} <= seen


def test_quantity_skew_mixes_the_classes():
    counts = counts_of(balanced_labels(2, 2000), name="quantity_skew", clients=3, alpha=0.5, min_samples=200)
    sizes = counts.sum(1)
    assert sizes.max() > 1.5 * sizes.min()
    assert ((counts[:, 0] / sizes - 0.5).abs() < 0.1).all()


@pytest.mark.parametrize(
    ("labels", "options", "says"),
    [
        (balanced_labels(2, 50), {"clients": 3}, r"3 clients .* only 2; lower partition.clients to 2"),
        (balanced_labels(10, 5), {"clients": 3}, r"3 clients x 3 classes are 9 of 10 .*classes_per_client=4"),
        (balanced_labels(3, 9), {"clients": 3, "classes_per_client": 4}, r"classes_per_client=4 but .* only 3"),
        (balanced_labels(2, 2), {"name": "iid", "clients": 5}, r"4 samples cannot give 5 clients at least 2"),
        (torch.tensor([], dtype=torch.int64), {"name": "iid"}, r"0 samples"),
        (torch.tensor([0, 1, 1, 1, 1]), {"clients": 2}, r"client \d would have 1 samples"),
        (balanced_labels(2, 20), {"name": "dirichlet", "clients": 19, "alpha": 0.01}, r"alpha=0\.01.*never had"),
        # all mass on one client: the shares underflow, and the answer is an error, not a NaN
        (balanced_labels(2, 20), {"name": "dirichlet", "alpha": 1e-12}, r"raise partition\.alpha"),
    ],
)
def test_impossible_requests(labels, options, says):
    with pytest.raises(UserError, match=says) as caught:
        partition_indices(labels, PartitionOptions(**options), 0)
    assert "\n" not in str(caught.value)


def test_a_table_has_a_column_for_each_of_up_to_twelve_classes_and_of_more_it_names_the_largest():
    table = format_partition(torch.tensor([[10, 0], [2, 1234]]), ["cat", "aeroplane"])
    assert table.splitlines() == [
        "client  cat  aeroplane  total",
        "     0   10          0     10",
        "     1    2       1234   1236",
        " total   12       1234   1246",
    ]
    twelve = "abcdefghijkl"
    assert format_partition(torch.full((1, 12), 3), twelve).split()[1:13] == list(twelve)
    counts = torch.zeros(2, 100, dtype=torch.int64)
    counts[0, 5], counts[0, 7], counts[1] = 40, 2, 1
    lines = format_partition(counts, [f"c{i}" for i in range(100)]).splitlines()
    assert lines[1].split() == ["0", "42", "2", "c5", "(40),", "c7", "(2)"]
    assert lines[3].split()[:5] == ["total", "142", "100", "c5", "(41),"]
    assert max(len(line) for line in lines) < 80


def test_chart_draws_every_sample_and_opens_no_window(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it now fails: it would open windows
    counts = torch.randint(0, 50, (30, 50), generator=torch.Generator().manual_seed(0))
    figure = draw_partition(counts, [f"class {i}" for i in range(50)])
    figure.canvas.draw()
    colours = set()
    for bar, samples in zip(figure.axes[0].collections, counts.sum(1), strict=True):
        extents = [path.get_extents() for path in bar.get_paths()]
        assert sum(extent.width for extent in extents) == max(extent.x1 for extent in extents) == samples  # in a row
        colours |= set(map(tuple, bar.get_facecolors()))
    assert len(colours) == 50
