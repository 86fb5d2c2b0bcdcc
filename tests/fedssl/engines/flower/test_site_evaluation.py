"""A client's evaluation of its own model is checked like any other answer."""

from __future__ import annotations

import math

import pytest
import torch

from fedssl.engines.flower.messenger import Messenger
from fedssl.engines.flower.site import SiteEvaluation, evaluation_fault
from tests.fedssl.engines.flower.loop_grid import run_on, start

MEASURES = {"knn": 80.0, "linear": 100.0, "effective_rank": 2.7, "fine_tune_f1": 0.0}
SPECTRUM = torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64)


def test_a_sound_evaluation_has_no_fault():
    assert evaluation_fault(SiteEvaluation(MEASURES, SPECTRUM)) is None


def test_measures_on_other_data_have_the_bounds_of_their_own():
    on_other_data = {"downstream_mine_uniformity": -3.0, "downstream_mine_effective_rank": 300.0}
    assert evaluation_fault(SiteEvaluation(MEASURES | on_other_data, SPECTRUM)) is None
    fault = evaluation_fault(SiteEvaluation(MEASURES | {"downstream_mine_alignment": 5.0}, SPECTRUM)) or ""
    assert fault.startswith("its evaluation has an invalid downstream_mine_alignment: expected 0 to 4.01, got 5.0")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"knn": 101.0}, "its evaluation has an invalid knn: expected 0 to 100, got 101.0"),
        ({"knn": -1.0}, "its evaluation has an invalid knn: expected 0 to 100, got -1.0"),
        ({"linear": math.nan}, "its evaluation has an invalid linear: expected 0 to 100, got nan"),
        ({"effective_rank": 1e9}, "its evaluation has an invalid effective_rank: expected 0 to 4, got 1000000000.0"),
        ({f"fine_tune_{i}": 1.0 for i in range(40_000)}, "its evaluation has 40004 measures, more than 100"),
        ({"fine_tune_" + "x" * 10**6: 1.0}, f"its evaluation holds 'fine_tune_{'x' * 90}', which is not a measure"),
        ({"bytes_up": 1.0}, "its evaluation holds 'bytes_up', which is not a measure"),
    ],
)
def test_measures_that_no_evaluation_gives_are_refused(changes, fault):
    assert (evaluation_fault(SiteEvaluation(MEASURES | changes, SPECTRUM)) or "").startswith(fault)


@pytest.mark.parametrize(
    ("spectrum", "fault"),
    [
        (None, "its evaluation has no valid spectrum"),
        (torch.ones(2, 2), "its evaluation has no valid spectrum"),
        (torch.ones(3, dtype=torch.int64), "its evaluation has no valid spectrum"),
        (torch.zeros(10**6), "its evaluation's spectrum has 1000000 values, more than 65536"),
        (torch.tensor([1.0, -1.0]), "its evaluation's spectrum is invalid"),
        (torch.tensor([math.inf, 1.0]), "its evaluation's spectrum is invalid"),
        (torch.tensor([1.0, math.nan]), "its evaluation's spectrum is invalid"),
    ],
)
def test_a_spectrum_that_no_model_has_is_refused(spectrum, fault):
    assert (evaluation_fault(SiteEvaluation(MEASURES, spectrum)) or "").startswith(fault)


def test_evaluations_and_registrations_may_be_small_only(quick, tmp_path, monkeypatch):
    sizes, kinds = set(), {}
    send, collect = Messenger.send, Messenger.collect

    def send_and_note(messenger, kind, *arguments):
        ids = send(messenger, kind, *arguments)
        kinds.update(dict.fromkeys(ids, kind))
        return ids

    def collect_and_note(messenger, waiting, seconds, largest):
        sizes.update((kinds[name], largest) for name in waiting)
        return collect(messenger, waiting, seconds, largest)

    monkeypatch.setattr(Messenger, "send", send_and_note)
    monkeypatch.setattr(Messenger, "collect", collect_and_note)
    run_on(quick(rounds=1), *start(quick(rounds=1), tmp_path / "b"))
    largest = dict(sizes)
    assert (largest["query"], largest["evaluate"]) == (2**22, 2**22)
    assert largest["train"] >= 2**28
