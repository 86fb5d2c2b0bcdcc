"""How many rounds fit into the time that there is, on a machine whose steps take what the test says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedssl.engines import pace
from fedssl.engines.in_process import run
from fedssl.engines.pace import Pace, measure_pace, recipe_within
from fedssl.errors import UserError
from fedssl.federation import build_federation
from tests.fedssl.conftest import ALIGNED, AVERAGED, LW_FEDSSL
from tests.fedssl.engines.short_runs import SMALL, contents

CENTRAL = {
    "partition": {"name": "iid", "clients": 1},
    "local_update": {"name": "keep_own", "keep_optimizer": True},
}


def within(monkeypatch, recipe, minutes, step, evaluations=20.0, parallel=1):
    """The recipe for so many minutes where a step takes `step` seconds, after 10 seconds have passed."""
    federation = build_federation(recipe)
    steps = sum(len(rows) // recipe.training.batch_size for rows in federation.client_rows)
    measured = Pace(step, steps * recipe.training.local_epochs, parallel, evaluations)
    monkeypatch.setattr(pace, "measure_pace", lambda federation: measured)
    monkeypatch.setattr(pace.time, "perf_counter", lambda: 110.0)
    return recipe_within(recipe, minutes, 100.0)


def test_federated_rounds_stay_as_long_as_they_are(tiny, monkeypatch):
    recipe = tiny(**AVERAGED, **SMALL, partition={"name": "iid", "clients": 3})  # 20 images and so 2 steps a client
    timed = within(monkeypatch, recipe, 1, step=0.1)
    assert timed == recipe.model_copy(update={"rounds": 50})  # 30 of 60 seconds are left, and a round takes 0.6
    assert within(monkeypatch, recipe, 1, step=0.1, parallel=2).rounds == 100
    assert within(monkeypatch, recipe, 0.1, step=0.1).rounds == 1  # no time is left, and a run has a round


@pytest.mark.parametrize(
    ("step", "rounds", "epochs", "local_steps"),
    [
        (0.1, 42, 1, None),  # 300 steps, of which a pass has 7
        (0.001, 99, 43, None),  # 30,000 steps: at most 100 rounds
        (1.0, 20, 1, 1),  # 30 steps: rounds of less than a pass
        (15.0, 2, 1, 1),
    ],
)
def test_a_central_run_pauses_some_twenty_to_a_hundred_times(step, rounds, epochs, local_steps, tiny, monkeypatch):
    timed = within(monkeypatch, tiny(**CENTRAL, **SMALL), 1, step)
    assert (timed.rounds, timed.training.local_epochs, timed.training.local_steps) == (rounds, epochs, local_steps)


def test_a_schedule_whose_rounds_differ_is_refused(tiny):
    with pytest.raises(UserError, match=r"--minutes does not go with schedule layer_wise"):
        recipe_within(tiny(**LW_FEDSSL), 1, 0.0)


@pytest.mark.parametrize(("steps", "seconds", "step"), [(7, 9.0, 0.1), (7, 0.1, 0.1), (1, 9.0, 2.0)])
def test_the_first_step_of_a_client_is_not_taken_for_the_others(steps, seconds, step, tiny, monkeypatch):
    federation = build_federation(tiny(**CENTRAL, **SMALL))
    monkeypatch.setattr(pace, "steps_of_round", lambda *_: steps)
    now = [0.0]

    def counted_round(client, received, number, most_steps):
        now[0] += 2.0 + 0.1 * (most_steps - 1)
        return None, SimpleNamespace(flops=7)

    monkeypatch.setattr(type(federation.method), "counted_round", lambda self, *given: counted_round(*given))
    server = federation.method.initial_state()
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now[0])
    assert pace.timed_step(federation, server, 0, 1, seconds) == (pytest.approx(step), 7)


@pytest.mark.parametrize("changes", [AVERAGED, ALIGNED, CENTRAL], ids=["averaged", "aligned", "central"])
def test_timing_changes_nothing_of_the_run(changes, tiny, tmp_path):
    recipe = tiny(**{**SMALL, **changes})
    run(recipe, tmp_path / "plain")
    federation = build_federation(recipe)
    measured = measure_pace(federation)
    assert measured.step > 0
    assert measured.evaluations > 0
    assert measured.steps == sum(len(rows) // 8 for rows in federation.client_rows)
    run(recipe, tmp_path / "timed")
    assert contents(tmp_path / "plain") == contents(tmp_path / "timed")
