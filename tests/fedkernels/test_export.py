"""Every operator and module as a program of torch.export for batches of any size."""

import pytest
import torch
from torch.export import Dim, export

import fedkernels as fk
from tests.fedkernels.conftest import FUNCTIONS

pytestmark = pytest.mark.cpu_only(reason="the program is that of the CPU")
KEY = fk.ViewKey(0)


def rows(n, seed=0, columns=5):
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(seed + n), dtype=torch.float64)


def pair(n):
    return rows(n), rows(n, 1)


def numbers(n):
    return torch.arange(n) % 3


def images(n):
    return torch.arange(n * 108).reshape(n, 3, 6, 6).to(torch.uint8)


def moved(start, client):
    start = start.clone()
    fk.apply_deltas([start], [[client]], [0.5])
    return start


# name: a function, and its tensors for n rows
PROGRAMS = {
    "apply_deltas": (moved, pair),
    "client_weights": (lambda x: fk.client_weights(x @ x.T), lambda n: [rows(n)]),
    "clip_loss": (lambda x, y: fk.clip_loss(x, y, 2.0, "none"), pair),
    "debiased_cka": (fk.debiased_cka, pair),
    "debiased_cka_pairwise": (lambda x, y: fk.debiased_cka_pairwise([x], [y, x]), pair),
    "delta_gram": (lambda x, y: fk.delta_gram([x], [[y], [2 * y]]), pair),
    "info_nce": (lambda x, y: fk.info_nce(x, y, 0.5), pair),
    "info_nce, pairs left out": (
        lambda x, y, a: fk.info_nce(x, y, 0.5, positives=a, negatives=x, labels=(a, torch.cat([a, a]))),
        lambda n: (*pair(n), numbers(n)),
    ),
    "linear_cka": (fk.linear_cka, pair),
    "linear_cka_pairwise": (lambda x, y: fk.linear_cka_pairwise([x], [y, x], True), pair),
    "linear_cka_to_kernel": (lambda x, y: fk.linear_cka_to_kernel(x, y @ y.T), pair),
    "nt_xent": (lambda x, y: fk.nt_xent(x, y, 0.5), pair),
    "sigmoid_loss": (lambda x, y: fk.sigmoid_loss(x, y, 2.0, -1.0), pair),
    "sigmoid_loss, not reduced": (lambda x, y: fk.sigmoid_loss(x, y, 2.0, -1.0, "none"), pair),
    "supervised_contrastive_loss": (
        lambda x, labels: fk.supervised_contrastive_loss(x, labels, 0.5),
        lambda n: (rows(n), numbers(n)),
    ),
    "two_views": (lambda x, samples: fk.two_views(x, samples, KEY)[0], lambda n: (images(n), numbers(n))),
    "unbalanced_ot": (lambda x, y: fk.unbalanced_ot(x.abs(), y[:, 0].abs(), 1.0, 0.8, 0.8), pair),
    "unbalanced_ot_plan": (lambda x: fk.unbalanced_ot_plan(x.abs(), 1.0, 1.0, 0.8, 0.8)[0], lambda n: [rows(n)]),
    "view_parameters": (lambda samples: fk.view_parameters(samples, KEY, 6, 6).factors, lambda n: [numbers(n)]),
    "CKALoss": (fk.nn.CKALoss(True), pair),
    "CLIPLoss": (fk.nn.CLIPLoss(), lambda n: (*pair(n), torch.tensor(2.0))),
    "InfoNCE": (fk.nn.InfoNCE(torch.nn.Parameter(torch.tensor(0.5))), pair),
    "NTXent": (fk.nn.NTXent(0.5, "none"), pair),
    "SigmoidLoss": (fk.nn.SigmoidLoss(), lambda n: (*pair(n), torch.tensor(2.0), torch.tensor(-1.0))),
    "SupervisedContrastiveLoss": (fk.nn.SupervisedContrastiveLoss(0.5), lambda n: (rows(n), numbers(n))),
}


class Program(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def test_every_operator_and_module_is_tried():
    assert {name.partition(",")[0] for name in PROGRAMS} == {*FUNCTIONS, *fk.nn.__all__} - {"compare"}


DECIDED_BY_SIZE = ["debiased_cka", "linear_cka", "supervised_contrastive_loss"]


@pytest.mark.parametrize(
    ("name", "strict"), [*((name, False) for name in PROGRAMS), *((name, True) for name in DECIDED_BY_SIZE)]
)
def test_an_exported_program_serves_batches_of_other_sizes(name, strict):
    """Odd and even ones, with fewer rows than columns and with more."""
    function, inputs = PROGRAMS[name]
    batch = Dim("batch", min=4, max=4096)
    sizes = tuple({0: batch} if tensor.ndim else None for tensor in inputs(6))
    program = export(Program(function), tuple(inputs(6)), dynamic_shapes=(sizes,), strict=strict).module()
    for n in (4, 7, 16):
        torch.testing.assert_close(program(*inputs(n)), function(*inputs(n)))
