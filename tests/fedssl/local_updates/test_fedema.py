"""FedEMA's mixtures, by hand."""

from __future__ import annotations

import pytest

from fedssl.local_updates.fedema import FedEMA
from fedssl.messages import Message
from tests.fedssl.local_updates.local_training import one_round, online
from tests.fedssl.small_models import local_round, scalar_model, value


def test_fedema_mixes_by_each_clients_divergence_and_sets_lambda_once():
    """tau = 0.7. Client a moves by 0.5, then 0.25: lambda = 1.4, mu = 0.7, then 0.35.
    Client b moves by 2, then 4: lambda = 0.35, mu = 0.7, then min(1, 1.4) = 1.

    Round 1 starts from 1, so the clients have 1.5 and 3. Round 2 brings 10: they start from
    0.7 * 1.5 + 0.3 * 10 = 4.05 and 0.7 * 3 + 0.3 * 10 = 5.1, and end at 4.3 and 9.1.
    Round 3 brings 20: 0.35 * 4.3 + 0.65 * 20 = 14.505, and 9.1 unchanged.
    """
    part = FedEMA()
    rows = {"a": (0.5, 0.25, 1.4, 4.05, 14.505, 0.35), "b": (2.0, 4.0, 0.35, 5.1, 9.1, 1.0)}
    for by1, by2, rate, start2, start3, mu3 in rows.values():
        model, memory = scalar_model(), Message()
        local = one_round(part, model, memory, online(scalar_model(1.0, predictor=1.0)), 1, by=by1)
        assert local.logged() == pytest.approx({"mu": 0.0, "divergence": by1, "lambda": rate})
        local = one_round(part, model, memory, online(scalar_model(10.0, predictor=10.0)), 2, by=by2)
        assert local.logged() == pytest.approx({"mu": 0.7, "divergence": by2, "lambda": rate}, rel=1e-5)
        assert value(model, "encoder") == pytest.approx(start2 + by2)
        assert value(model, "predictor") == pytest.approx(0.7 * 1 + 0.3 * 10)
        local = local_round(model, online(scalar_model(20.0)), 3, memory=memory)
        part.receive(local)
        assert value(model, "encoder") == pytest.approx(start3, rel=1e-5)
        assert local.logged()["mu"] == pytest.approx(mu3, rel=1e-5)


def test_fedema_takes_the_global_model_after_a_round_without_the_client():
    part, model, memory = FedEMA(), scalar_model(), Message()
    one_round(part, model, memory, online(scalar_model(1.0)), 1, by=0.5)
    local = one_round(part, model, memory, online(scalar_model(10.0)), 3, by=0.5)
    assert local.logged()["mu"] == 0
    assert value(model, "encoder") == 10.5
    assert float(model.target["encoder"][0].weight) == 10.0
    assert memory.numbers["fedema.lambda"] == pytest.approx(1.4)


def test_fedema_without_movement_has_no_lambda_yet():
    part, model, memory = FedEMA(), scalar_model(), Message()
    one_round(part, model, memory, online(scalar_model(1.0)), 1, by=0.0)
    assert "fedema.lambda" not in memory.numbers
    one_round(part, model, memory, online(scalar_model(10.0)), 2, by=0.5)
    assert value(model, "encoder") == 10.5
    assert memory.numbers["fedema.lambda"] == pytest.approx(1.4)
