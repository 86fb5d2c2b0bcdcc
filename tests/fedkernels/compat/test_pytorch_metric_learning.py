"""fedkernels.compat.pytorch_metric_learning: labels of any dtype, pairs, wrappers around it, and what it refuses."""

import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkernels.compat import pytorch_metric_learning as ours
from tests.fedkernels.compat.losses import of_pairs
from tests.fedkernels.refusals import refusals

NAMES = ["NTXentLoss", "SupConLoss"]
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2, 0, 3])
EMBEDDINGS = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).double()
OTHERS = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0.2, 0.4, 1.6, 7.9])[CLASSES],
        torch.tensor([0.2, 0.4, 1.6, 7.9])[CLASSES].double(),
        torch.tensor([-0.0, 1.0, 2.0, math.nan])[CLASSES].where(torch.arange(8) > 0, 0.0),  # NaN is like nothing
        CLASSES + 2**53,
        CLASSES.to(torch.uint8),
        CLASSES.half(),
        CLASSES * 1j,
    ],
    ids=["float32", "float64", "negative zero and NaN", "beyond 2^53", "uint8", "float16", "complex"],
)
def test_labels_of_any_dtype(name, labels):
    loss = getattr(ours, name)(0.2)
    torch.testing.assert_close(loss(EMBEDDINGS, labels), loss(EMBEDDINGS, CLASSES))
    two_classes = loss(EMBEDDINGS, CLASSES % 2 == 0)
    torch.testing.assert_close(two_classes, loss(EMBEDDINGS, 1 - CLASSES % 2))
    assert two_classes != loss(EMBEDDINGS, CLASSES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_is_that_of_the_embeddings(name, dtype):
    loss, x = getattr(ours, name)(), EMBEDDINGS.to(dtype).index_fill(0, torch.tensor([0]), 0).requires_grad_()
    wide = loss(x.detach().double(), CLASSES)
    for given in ({}, {"ref_emb": x, "ref_labels": CLASSES}):
        value = loss(x, CLASSES, **given)
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), wide, rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=0)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss(x, CLASSES, **given), value)
        assert loss(torch.full_like(x, 2e4), torch.arange(9, 17), **given) == 0
    (gradient,) = torch.autograd.grad(value, x)
    assert gradient[1:].isfinite().all()  # that of a row of zeros is 1e12 times as large, as the original's


def given_pairs() -> dict[str, dict[str, Any]]:
    anchors, positives = (CLASSES[:, None] == CLASSES).fill_diagonal_(False).nonzero(as_tuple=True)
    negatives = torch.tensor([1, 0, 0, 1, 0, 0, 1, 0])[anchors]
    apart = torch.tensor([2, 2, 4, 1, 0]), torch.tensor([0, 0, 3, 2, 1])
    one = torch.tensor([2]), torch.tensor([0])
    return {
        "reference": {"labels": CLASSES, "ref_emb": OTHERS, "ref_labels": CLASSES.clone()},
        "reference with the same labels": {"labels": CLASSES, "ref_emb": OTHERS, "ref_labels": CLASSES},
        "reference without labels": {"labels": CLASSES, "ref_emb": OTHERS},
        "reference of another size": {"labels": CLASSES, "ref_emb": OTHERS[:5], "ref_labels": CLASSES[:5] + 1},
        "triplets": {"indices_tuple": (anchors, positives, negatives)},
        "triplets of references": {"indices_tuple": (anchors, positives, negatives), "ref_emb": OTHERS},
        "pairs, some twice": {"indices_tuple": (anchors[:4], positives[:4], *apart)},
        "anchors without negatives": {"indices_tuple": (anchors, positives, *one)},
        "one pair of each kind": {"indices_tuple": (anchors[:1], positives[:1], *one)},
        "no positive": {"indices_tuple": (anchors[:0], positives[:0], *apart)},
        "no negative": {"labels": CLASSES, "indices_tuple": (anchors, positives, anchors[:0], anchors[:0])},
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", given_pairs())
def test_pairs_are_the_originals(name, case):
    originals = pytest.importorskip("pytorch_metric_learning.losses", reason="pytorch-metric-learning is not installed")
    results = []
    for library in (ours, originals):
        x, given = EMBEDDINGS.clone().requires_grad_(), given_pairs()[case]
        value = getattr(library, name)(0.2)(x, **given)
        results.append([value.detach(), *torch.autograd.grad(value, x)])
    torch.testing.assert_close(*results)
    assert (results[0][0] == 0) == (case in ("one pair of each kind", "no positive", "no negative"))


@pytest.mark.parametrize("name", NAMES)
def test_all_pairs_by_their_indices_are_the_batch(name):
    positive = (CLASSES[:, None] == CLASSES).fill_diagonal_(False)
    pairs = (*positive.nonzero(as_tuple=True), *(CLASSES[:, None] != CLASSES).nonzero(as_tuple=True))
    loss = getattr(ours, name)(nn.Parameter(torch.tensor(0.2).half()))
    values = [loss(EMBEDDINGS, CLASSES), loss(EMBEDDINGS, indices_tuple=pairs)]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(value, loss.temperature) for value in values))


@pytest.mark.parametrize("name", NAMES)
def test_the_rows_of_a_reference_are_the_others_of_each_pair(name):
    logits = F.normalize(EMBEDDINGS, dim=1) @ F.normalize(OTHERS[:5], dim=1).T / 0.2
    positive = CLASSES[:, None] == CLASSES[:5]
    expected = of_pairs(logits, positive, ~positive, all_positives=name == "SupConLoss")
    found = getattr(ours, name)(0.2)(EMBEDDINGS, CLASSES, ref_emb=OTHERS[:5], ref_labels=CLASSES[:5])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_wrappers_and_miners_take_it(name):
    losses = pytest.importorskip("pytorch_metric_learning.losses", reason="pytorch-metric-learning is not installed")
    miners = pytest.importorskip("pytorch_metric_learning.miners")
    make = {"ours": getattr(ours, name), "original": getattr(losses, name)}
    results = []
    for one in make.values():
        memory = losses.CrossBatchMemory(one(0.2), 5, memory_size=12, miner=miners.MultiSimilarityMiner())
        several = losses.MultipleLosses([one(0.2), one(0.5)], miners=[miners.BatchHardMiner(), None])
        memory(OTHERS, CLASSES)
        results.append(
            [
                memory(EMBEDDINGS, CLASSES),
                several(EMBEDDINGS, CLASSES),
                losses.SelfSupervisedLoss(one(0.2))(EMBEDDINGS, OTHERS),
                losses.SelfSupervisedLoss(one(0.2), symmetric=False)(EMBEDDINGS, OTHERS),
            ]
        )
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", NAMES)
def test_the_originals_arguments_and_its_defaults_are_accepted(name):
    pytest.importorskip("pytorch_metric_learning", reason="pytorch-metric-learning is not installed")
    from pytorch_metric_learning import distances, losses, reducers

    default, original = getattr(ours, name), getattr(losses, name)
    for method in ("__init__", "forward"):
        shown = [
            {key: one.default for key, one in inspect.signature(getattr(cls, method)).parameters.items()}
            for cls in (default, original)
        ]
        assert shown[0] == shown[1]
    reducer = {"NTXentLoss": reducers.MeanReducer(), "SupConLoss": reducers.AvgNonZeroReducer()}[name]
    given = {"distance": distances.CosineSimilarity(), "reducer": reducer, "collect_stats": True}
    loss = default(0.1, embedding_regularizer=None, embedding_reg_weight=1, **given)
    assert loss.distance is given["distance"]
    assert loss._record_these == original()._record_these
    torch.testing.assert_close(loss(EMBEDDINGS, CLASSES), original(0.1, **given)(EMBEDDINGS, CLASSES))
    for argument, other in {
        "distance": distances.CosineSimilarity(p=1),
        "reducer": reducers.SumReducer(),
        "embedding_regularizer": nn.Identity(),
    }.items():
        with pytest.raises(ValueError, match=f"{argument} must be None.*use pytorch_metric_learning.losses.{name}"):
            default(**{argument: other})


def test_a_loss_larger_than_the_originals_largest():
    """The original's float32 loss of a pair ends at 87.3, without a gradient."""
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]], requires_grad=True)
    value = ours.NTXentLoss(0.01)(x, torch.tensor([0, 0, 1]))
    torch.testing.assert_close(value, torch.tensor((200 + math.log(2)) / 2))


def one_of(**changed: Any) -> Tensor:
    return ours.SupConLoss()(**({"embeddings": EMBEDDINGS, "labels": CLASSES} | changed))


PAIR = torch.tensor([0, 1])


test_bad_input_is_named = refusals(
    (lambda: one_of(labels=None), ValueError, "labels must be a tensor with one label for each row"),
    (lambda: one_of(labels=CLASSES[:, None]), ValueError, r"labels must have shape \[8\], .* got \[8, 1\]"),
    (lambda: one_of(labels=[0, 1]), TypeError, "labels must be a torch.Tensor, got list"),
    (lambda: one_of(embeddings=EMBEDDINGS[:, :0]), ValueError, "embeddings must not be empty in d"),
    (lambda: one_of(embeddings=EMBEDDINGS[0]), ValueError, r"embeddings must have shape \[B, d\]"),
    (lambda: one_of(ref_emb=OTHERS[:, :3]), ValueError, "ref_emb must have 5 columns as embeddings, got 3"),
    (lambda: one_of(ref_emb=OTHERS[:3]), ValueError, r"ref_labels, by default labels, .* \[3\]"),
    (lambda: one_of(ref_emb=OTHERS, ref_labels=CLASSES[:3]), ValueError, r"shape \[8\], .* got \[3\]"),
    (lambda: one_of(indices_tuple=(PAIR, PAIR)), ValueError, "indices_tuple must be three or four tensors"),
    (lambda: one_of(indices_tuple=([0], [1], [2])), ValueError, "indices_tuple must be three or four tensors"),
    (lambda: one_of(indices_tuple=(PAIR,) * 4), ValueError, "got one as both"),
    (lambda: ours.SupConLoss(margin=1), TypeError, "unexpected keyword argument 'margin'"),
    (lambda: ours.SupConLoss(distance=nn.CosineSimilarity()), ValueError, "distance must be None or Cosine"),
    (lambda: ours.NTXentLoss(reducer=SimpleNamespace()), ValueError, r"reducer must be None or MeanReducer\(\)"),
    (lambda: ours.NTXentLoss(temperature=0.0), ValueError, "temperature must be positive"),
)
