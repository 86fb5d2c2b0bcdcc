"""The privacy that a run spends: against dp-accounting's accountant, over kills, and against a budget."""

from __future__ import annotations

import json
import math

import pytest

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")

from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant

from fedssl.engines.flower.privacy_accountant import (
    PRIVACY_FILE,
    PrivacyAccountant,
    epsilon_after,
    noise_multiplier,
    rounds_within,
)
from fedssl.errors import UserError
from fedssl.recipe.recipe import FixedClipping, FlowerOptions, LocalDP
from fedssl.reports.report import build_report
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.engines.flower.loop_grid import run_on
from tests.fedssl.engines.flower.secure_runs import EQUAL, start_stages
from tests.fedssl.engines.short_runs import metric, stopped_before_commit

LOCAL = {"name": "local_dp", "clipping_norm": 1.0, "epsilon": 0.5, "delta": 1e-5}
CENTRAL = {"name": "fixed_clipping", "clipping_norm": 0.5, "noise_multiplier": 4.0}


@pytest.mark.parametrize(
    ("privacy", "rounds", "of_distance"),
    [
        # the last number is the noise's deviation divided by the distance of two clipped updates
        (FixedClipping(**CENTRAL), 1, 2.0),
        (FixedClipping(**CENTRAL | {"noise_multiplier": 10, "delta": 1e-6}), 30, 5.0),
        (FixedClipping(**CENTRAL | {"noise_multiplier": 1.4, "clipping_norm": 7}), 5, 0.7),
        (LocalDP(**LOCAL), 12, math.sqrt(2 * math.log(1.25e5)) / 0.5),
        (LocalDP(**LOCAL | {"clipping_norm": 3, "sensitivity": 3}), 12, math.sqrt(2 * math.log(1.25e5)) / 0.5 / 2),
    ],
)
def test_epsilon_is_that_of_dp_accounting(privacy, rounds, of_distance):
    assert noise_multiplier(privacy) == pytest.approx(of_distance, rel=1e-12)
    accountant = PLDAccountant()
    for _ in range(rounds):
        accountant.compose(GaussianDpEvent(of_distance))
    assert epsilon_after(privacy, rounds) == pytest.approx(accountant.get_epsilon(privacy.delta), abs=1e-6)


def test_what_costs_nothing_and_what_cannot_be_bounded():
    assert epsilon_after(FixedClipping(**CENTRAL), 0) == 0
    assert epsilon_after(FixedClipping(**CENTRAL | {"noise_multiplier": 0}), 1) == math.inf


def test_rounds_within_a_budget():
    privacy = FixedClipping(**CENTRAL)
    allowed = rounds_within(privacy, 6.0, 100)
    assert epsilon_after(privacy, allowed) <= 6.0 < epsilon_after(privacy, allowed + 1)
    assert rounds_within(privacy, 1e9, 7) == 7


@pytest.mark.parametrize("dp", [LOCAL, CENTRAL], ids=["local", "central"])
def test_a_resumed_run_continues_the_count(dp, private, tmp_path):
    recipe = private(dp=dp, **EQUAL, rounds=3)
    directory, grid = start_stages(recipe, tmp_path / "run")
    with stopped_before_commit(2):
        run_on(recipe, directory, grid)
    grid.silent = {12}  # client 1 answers no more
    directory = RunDirectory.open(tmp_path / "run")
    directory.roll_back()
    run_on(recipe, directory, grid)
    options = recipe.flower.differential_privacy
    # what left a site counts although its round was lost; the mean of a lost round left nobody
    rounds = {"0": 4, "1": 4, "2": 4} if dp is LOCAL else {"0": 3, "1": 1, "2": 3}
    assert metric(tmp_path / "run", "epsilon", 3) == {
        **{k: pytest.approx(epsilon_after(options, count), abs=1e-9) for k, count in rounds.items()},
        "global": pytest.approx(epsilon_after(options, max(rounds.values())), abs=1e-9),
    }
    page = build_report([read_run(tmp_path / "run")])
    assert "Differential privacy" in page
    assert f'<td class="number">{epsilon_after(options, max(rounds.values())):.4g}</td>' in page


def test_the_budget_stops_a_run_before_the_round_that_would_pass_it(private, tmp_path):
    privacy = FixedClipping(**CENTRAL)
    budget = (epsilon_after(privacy, 2) + epsilon_after(privacy, 3)) / 2
    recipe = private(dp=CENTRAL, **EQUAL, rounds=5)
    recipe = recipe.model_copy(update={"flower": recipe.flower.model_copy(update={"epsilon_budget": budget})})
    directory, grid = start_stages(recipe, tmp_path / "run")
    left = budget - epsilon_after(privacy, 2)
    with pytest.raises(UserError, match=rf"round 3 is not begun.* so {left:.6g} is left, less than a round takes"):
        run_on(recipe, directory, grid)
    assert RunDirectory.open(tmp_path / "run").checkpoint.round == 2
    assert {reply.metadata.group_id for reply in grid.sent} <= {"0", "1", "2"}  # nobody was asked in round 3
    assert max(metric(tmp_path / "run", "epsilon", 2).values()) <= budget


def test_a_run_without_its_count_is_not_continued(private, tmp_path):
    recipe = private(dp=CENTRAL, **EQUAL, rounds=2)
    directory, grid = start_stages(recipe, tmp_path / "run")
    run_on(recipe, directory, grid)
    options = FlowerOptions(differential_privacy=CENTRAL)
    file = tmp_path / "run" / PRIVACY_FILE
    spent = json.loads(file.read_text())
    assert spent == {"round": 2, "asked": [0, 1, 2], "earlier": {"0": 1, "1": 1, "2": 1}}
    directory = RunDirectory.open(tmp_path / "run")
    assert PrivacyAccountant.of_run(directory, options).epsilon(0) == epsilon_after(FixedClipping(**CENTRAL), 2)
    file.write_text(json.dumps(spent | {"round": 1}))
    with pytest.raises(UserError, match="ends with round 1, but the run has 2 committed rounds"):
        PrivacyAccountant.of_run(directory, options)
    file.write_text("{")
    with pytest.raises(UserError, match="cannot be read as the count"):
        PrivacyAccountant.of_run(directory, options)
    file.unlink()
    with pytest.raises(UserError, match=f"{PRIVACY_FILE} is missing, but the run has 2 committed rounds"):
        PrivacyAccountant.of_run(directory, options)
    assert PrivacyAccountant.of_run(directory, FlowerOptions()) is None
