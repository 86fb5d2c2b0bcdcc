"""What FedCA's dictionary adds to the contrastive loss, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedkernels import nt_xent
from fedssl.aggregators.dictionary import DICTIONARY
from fedssl.messages import Message
from fedssl.objectives.base import Step
from fedssl.objectives.simclr import SimCLR
from fedssl.regularizers.dictionary_contrast import DictionaryContrast, added_negatives
from tests.fedssl.small_models import E1, E2, THREE, local_round, scalar_model


def test_the_dictionary_adds_negatives():
    """One image, both views e1: its only other row is the positive, weight 3 at THREE. A dictionary (e1, e2) adds
    3 + 1: ln(3 + 4) - ln 3. With the objective, whose loss is 0 here, that is -ln(3 / 7).
    """
    dictionary = torch.stack([E1, E2])
    assert float(added_negatives(E1[None], E1[None], dictionary, THREE)) == pytest.approx(math.log(7 / 3))
    received = Message({DICTIONARY: dictionary})
    step = Step(torch.tensor(0.0), (), (E1[None], 4 * E1[None]))
    part = DictionaryContrast(name="dictionary_contrast", weight=0.5)
    term = part.start_round(local_round(scalar_model(), received, objective=SimCLR(temperature=THREE)))
    assert float(term(step)) == pytest.approx(0.5 * math.log(7 / 3))
    assert float(part.start_round(local_round(scalar_model()))(step)) == 0  # the first round has no dictionary


def test_the_sum_is_the_loss_with_all_negatives():
    torch.manual_seed(0)
    first, second, dictionary = (nn.functional.normalize(torch.randn(n, 5), dim=1) for n in (4, 4, 7))
    rows = torch.cat([first, second])
    logits = torch.cat([rows @ rows.T, rows @ dictionary.T], dim=1) / 0.3
    logits[torch.arange(8), torch.arange(8)] = -torch.inf
    positives = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
    expected = nn.functional.cross_entropy(logits, positives)
    total = nt_xent(first, second, 0.3) + added_negatives(first, second, dictionary, 0.3)
    torch.testing.assert_close(total, expected)
