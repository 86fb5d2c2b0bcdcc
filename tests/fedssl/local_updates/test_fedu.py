"""FedU's choice of predictor, by hand."""

from __future__ import annotations

import pytest

from fedssl.local_updates.fedu import FedU
from fedssl.messages import Message
from tests.fedssl.local_updates.local_training import one_round, online
from tests.fedssl.small_models import local_round, scalar_model, value


def test_fedu_keeps_the_predictor_of_the_client_that_moved_far():
    """Divergences: near (|0.1| + |-0.3|) / 2 = 0.2, far (0.1 + 0.9) / 2 = 0.5; the threshold is 0.4."""
    part = FedU(name="fedu")
    first = online(scalar_model(1.0, 1.0, predictor=2.0))
    second = online(scalar_model(6.0, 6.0, predictor=7.0))
    moves = {"near": (0.1, -0.3), "far": (0.1, 0.9)}
    wanted = {"near": (0.2, 7.0), "far": (0.5, 5.0)}
    for who in ("near", "far"):
        model, memory = scalar_model(0.0, 0.0), Message()
        local = one_round(part, model, memory, first, 1, by=moves[who][0], second=moves[who][1], predictor=5.0)
        assert local.logged()["global_predictor"] == 1  # the first round takes everything
        assert memory.numbers["fedu.divergence"] == pytest.approx(wanted[who][0])
        local = local_round(model, second, 2, memory=memory)
        part.receive(local)
        assert value(model, "encoder") == 6.0
        assert value(model, "predictor") == wanted[who][1]
        assert local.logged()["global_predictor"] == float(who == "near")
