"""How many rounds fit into the time that there is, on a machine whose steps take what the test says."""

from dataclasses import replace

import pytest

from fedssl.accounting import StepCost
from fedssl.engines import pace
from fedssl.engines.in_process import run
from fedssl.engines.pace import Pace, measure_pace, require_equal_rounds, within
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from tests.fedssl.conftest import ALIGNED, AVERAGED, LW_FEDSSL
from tests.fedssl.engines.short_runs import SMALL, contents

CENTRAL = {
    "partition": {"name": "iid", "clients": 1},
    "local_update": {"name": "keep_own", "keep_optimizer": True},
}


def recipe_within(monkeypatch, recipe, minutes, step, evaluations=(20.0, 0.0), parallel=1, **others):
    """The recipe for so many minutes where a step takes `step` seconds, after nearly 10 have passed."""
    federation = build_federation(recipe)
    steps = sum(len(rows) // recipe.training.batch_size for rows in federation.client_rows)
    measured = Pace(step, 0.0, steps * recipe.training.local_epochs, parallel, **others)
    monkeypatch.setattr(pace, "measure_pace", lambda federation, seconds: measured)
    monkeypatch.setattr(pace, "_evaluation_seconds", lambda federation: evaluations)
    monkeypatch.setattr(pace.time, "perf_counter", lambda: 109.99)
    return within(federation, minutes, 100.0).recipe


def test_federated_rounds_stay_as_long_as_they_are(tiny, monkeypatch):
    recipe = tiny(**AVERAGED, **SMALL, partition={"name": "iid", "clients": 3})  # 20 images and so 2 steps a client
    timed = recipe_within(monkeypatch, recipe, 1, step=0.1)
    assert timed == recipe.model_copy(update={"rounds": 50})  # 30 of 60 seconds are left, and a round takes 0.6
    assert recipe_within(monkeypatch, recipe, 1, step=0.1, parallel=2).rounds == 100
    others = recipe_within(monkeypatch, recipe, 1, step=0.1, others=0.4, before=10.0)
    assert others.rounds == 20  # 20 are left, at 1.0 a round
    assert recipe_within(monkeypatch, recipe, 0.1, step=0.1).rounds == 1  # no time is left, and a run has a round
    every = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"every": 5})})
    assert recipe_within(monkeypatch, every, 1, step=0.1, evaluations=(20.0, 2.0)).rounds == 30  # 1.0 a round


@pytest.mark.parametrize(
    ("step", "rounds", "epochs", "local_steps"),
    [
        (0.1, 42, 1, None),  # 300 steps, of which a pass has 7
        (0.001, 99, 43, None),  # 30,000 steps: at most 100 rounds
        (1.0, 15, 1, 2),  # 30 steps: rounds of less than a pass, of two steps or more
        (0.77, 19, 1, 2),  # 38 steps
        (15.0, 1, 1, 2),
    ],
)
def test_a_central_run_pauses_some_twenty_to_a_hundred_times(step, rounds, epochs, local_steps, tiny, monkeypatch):
    timed = recipe_within(monkeypatch, tiny(**CENTRAL, **SMALL), 1, step)
    assert (timed.rounds, timed.training.local_epochs, timed.training.local_steps) == (rounds, epochs, local_steps)


def test_a_schedule_whose_rounds_differ_is_refused(tiny):
    with pytest.raises(
        UserError, match=r"--minutes does not go with schedule layer_wise, .*: give rounds and schedule"
    ):
        require_equal_rounds(tiny(**LW_FEDSSL))
    with pytest.raises(UserError, match=r"untrained, .*train nothing: leave it out$"):
        require_equal_rounds(tiny(schedule="untrained"))


@pytest.fixture
def now(monkeypatch):
    """The seconds that have passed."""
    passed = [0.0]
    monkeypatch.setattr(pace.time, "perf_counter", lambda: passed[0])
    return passed


@pytest.mark.parametrize(("changes", "models"), [(AVERAGED, 1), ({}, 3)], ids=["a global model", "own models"])
def test_fine_tuning_and_evaluations_between_rounds_are_timed(changes, models, now, tiny, monkeypatch):
    """An evaluation takes 1 second, 2 more before and after training, and half a second an epoch of fine-tuning."""

    def evaluate_after(federation, model, number):
        options, rounds = federation.recipe.evaluation, federation.recipe.rounds
        now[0] += 3.0 if number in (0, rounds) else 1.0
        if number == rounds:
            now[0] += 0.5 * len(options.semi_supervised) * options.semi_supervised_protocol.tuning().epochs
            now[0] += 0.5 * options.fine_tune.tuning().epochs if options.fine_tune else 0.0

    monkeypatch.setattr(pace, "evaluate_after", evaluate_after)
    asked = {"semi_supervised": [0.1, 0.5], "semi_supervised_protocol": {"epochs": 30}, "fine_tune": {}, "every": 1}
    for evaluation, seconds in (({}, (6.0, 0.0)), (asked, (6.0 + 0.5 * (2 * 30 + 40), 1.0))):
        federation = build_federation(tiny(**SMALL | changes | {"evaluation": evaluation}))
        assert pace._evaluation_seconds(federation) == tuple(models * one for one in seconds)
        now[0] = 0.0


@pytest.fixture
def clock(now, monkeypatch):
    """A machine on which a step takes 0.1 seconds and one more for each image, a round's first step 2 seconds more.

    In round 1; in later rounds all takes three times as long. The sizes of the batches that are timed.
    """
    sizes = []

    def counted_round(self, client, received, number, most_steps):
        sizes.append(self.training.batch_size)
        now[0] += (1 if number == 1 else 3) * (2.0 + (0.1 + sizes[-1]) * most_steps)
        return Message(), StepCost(0, 0, 0, 0, flops=10 * sizes[-1] * number)

    monkeypatch.setattr("fedssl.method.Method.counted_round", counted_round)
    return sizes


@pytest.mark.parametrize(
    ("seconds", "sizes", "step"),
    [
        (1e4, [16, 16, 40, 40, 40], 40.1),  # the whole batch fits, and the first step is left out
        (100, [16, 16, 16], 16.1 * 40 / 16),  # a smaller one is timed
        (0, [16, 16, 16], 18.1 * 40 / 16),  # a bound
    ],
)
def test_a_batch_is_timed_that_is_not_too_large(seconds, sizes, step, clock, tiny):
    values = {**CENTRAL, **SMALL, "training": {"batch_size": 40}}
    federation = build_federation(tiny(**values))
    assert pace.step_cost(federation, 0, seconds) == (pytest.approx(step), 400)
    assert clock == sizes


@pytest.mark.usefixtures("clock")
def test_a_round_also_represents_public_images_and_joins_them(now, tiny, monkeypatch):
    """Of images in 2 seconds each, with 0.5 seconds for the server's messages and 3 where it joins the answers."""
    federation = build_federation(tiny(**ALIGNED, **SMALL))
    recipe, images, method = federation.recipe, len(federation.dataset.public_images), type(federation.method)
    taken = {"client_round": lambda self: 2.0 * len(self.public_images), "aggregate": lambda self: 3.0}

    def passing(name, seconds):
        call = getattr(method, name)

        def passes(self, *given):
            now[0] += seconds(self)
            return call(self, *given)

        monkeypatch.setattr(method, name, passes)

    for name, seconds in (taken | {"broadcast": lambda self: 0.5}).items():
        passing(name, seconds)
    clients = recipe.partition.clients
    found = measure_pace(federation, 1e-3)
    assert found.before == found.others == pytest.approx(3.5 + clients * 2.0 * images)
    half = replace(federation, recipe=recipe.model_copy(update={"client_dropout": 0.5}))
    assert measure_pace(half, 1e-3).others == pytest.approx(3.5 + clients * images)


def test_of_stages_the_mean_of_the_first_and_the_last_is_told(clock, tiny):
    recipe = tiny(**LW_FEDSSL)
    size = recipe.training.batch_size
    federation = build_federation(recipe)
    step, flops = 2 * (0.1 + size), 10 * size * (1 + recipe.rounds) / 2
    assert pace.step_cost(federation, 0, 1e5) == (pytest.approx(step), flops)


def test_only_a_run_that_takes_a_minute_is_told(clock, tiny, monkeypatch):
    federation = build_federation(tiny(**AVERAGED, **SMALL))
    whole = measure_pace(federation, 0.0)
    told = round(federation.recipe.rounds * whole.steps * whole.step / 60)
    assert pace.told_duration(federation).startswith(f"training takes about {told} min on this machine")
    monkeypatch.setattr(pace, "_SHORT", 60.0 * (told + 1))
    clock.clear()
    assert pace.told_duration(federation) is None
    assert clock == [8, 8, 8]  # three steps tell


@pytest.mark.parametrize("changes", [ALIGNED, CENTRAL], ids=["aligned", "central"])
def test_timing_changes_nothing_of_the_run(changes, finished, tiny, tmp_path):
    recipe = tiny(**{**SMALL, **changes})
    measured = []
    run(recipe, tmp_path / "timed", before=lambda it: measured.append(measure_pace(it, 0.1)) or it)
    assert measured[0].step > 0
    assert measured[0].steps == sum(len(rows) // 8 for rows in build_federation(recipe).client_rows)
    assert contents(finished(recipe)) == contents(tmp_path / "timed")
