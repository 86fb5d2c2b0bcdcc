"""FedU's choice of predictor, by hand."""

from __future__ import annotations

import pytest

from fedssl.local_updates.fedu import DIVERGENCE, FedU
from fedssl.messages import Message
from tests.fedssl.local_updates.local_training import one_round, online
from tests.fedssl.small_models import local_round, scalar_model, value


@pytest.mark.parametrize(("second", "divergence", "predictor"), [(-0.3, 0.2, 7.0), (0.9, 0.5, 5.0)])
def test_fedu_keeps_the_predictor_of_the_client_that_moved_far(second, divergence, predictor):
    """Divergences: near (|0.1| + |-0.3|) / 2 = 0.2, far (0.1 + 0.9) / 2 = 0.5; the threshold is 0.4."""
    part, model, memory = FedU(), scalar_model(0.0, 0.0), Message()
    first = online(scalar_model(1.0, 1.0, predictor=2.0))
    local = one_round(part, model, memory, first, 1, by=0.1, second=second, predictor=5.0)
    assert local.logged()["global_predictor"] == 1  # the first round takes everything
    assert memory.numbers[DIVERGENCE] == pytest.approx(divergence)
    local = local_round(model, online(scalar_model(6.0, 6.0, predictor=7.0)), 2, memory=memory)
    part.receive(local)
    assert value(model, "encoder") == 6.0
    assert value(model, "predictor") == predictor
    assert local.logged()["global_predictor"] == float(predictor == 7.0)


@pytest.mark.parametrize(("divergence", "kept"), [(0.39, False), (0.4, True)])
def test_fedu_keeps_a_predictor_from_its_threshold_on(divergence, kept):
    model = scalar_model(0.0, predictor=5.0)
    memory = Message(numbers={DIVERGENCE: divergence})
    FedU(threshold=0.4).receive(local_round(model, online(scalar_model(6.0, predictor=7.0)), 2, memory=memory))
    assert (value(model, "encoder"), value(model, "predictor")) == (6.0, 5.0 if kept else 7.0)
