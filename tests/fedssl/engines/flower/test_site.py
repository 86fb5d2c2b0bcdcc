"""A site's own data, architecture and device, a site file that is wrong, and evaluations that no model gives."""

from __future__ import annotations

import math
import re

import pytest
import torch
import yaml

from fedssl.engines.flower.client import _site_from_file
from fedssl.engines.flower.messenger import Messenger
from fedssl.engines.flower.site import SiteEvaluation, evaluation_fault, load_site, site_federation
from fedssl.errors import UserError
from fedssl.federation import build_federation
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.engines.flower.loop_grid import run_on, start, write_sites
from tests.fedssl.engines.short_runs import metric


def test_a_site_brings_its_own_images_and_architecture(quick, tmp_path):
    recipe = quick(**(ALIGNED | {"partition": {"name": "sites", "clients": 3}}))
    federation = build_federation(recipe)
    assert [len(rows) for rows in federation.client_rows] == [0, 0, 0]
    sites = write_sites(tmp_path, data={"name": "digits", "train_limit": 40, "test_limit": 60, "public_holdout": 30})
    changed = yaml.safe_load(sites[1].read_text()) | {"architecture": "small_convnet_wide", "device": "cpu"}
    sites[1].write_text(yaml.safe_dump(changed))
    own = site_federation(recipe, load_site(sites[1]))
    assert [len(rows) for rows in own.client_rows] == [0, 40, 0]
    assert own.recipe.architecture_of(1) == "small_convnet_wide"
    assert own.recipe.architecture_of(0) == federation.recipe.architecture_of(0)
    directory, grid = start(recipe, tmp_path / "b", sites)
    assert run_on(recipe, directory, grid) == []
    assert metric(tmp_path / "b", "knn", 2).keys() == {"0", "1", "2", "mean"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, r"the site's file .* cannot be read"),
        ("client: 0\nstate: x\narchitektur: y\n", r"architektur: unknown key; did you mean architecture\?"),
        ("client: 0\n", "state: missing"),
        ("client: 3\nstate: x\n", r"the site's client is 3, but the recipe has partition.clients=3: expected 0 to 2"),
        (
            "client: 0\nstate: x\narchitecture: small_resnet10\n",
            "differ, but weighted_mean exchanges weights",
        ),
    ],
)
def test_a_site_file_that_is_wrong(text, told, quick, tmp_path):
    if text is not None:
        (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(UserError, match=told):
        site_federation(quick(**AVERAGED), load_site(tmp_path / "site.yaml"))


def test_a_site_of_its_own_data_needs_data_and_the_flower_engine(quick, tiny, tmp_path):
    [site] = write_sites(tmp_path, 1)
    sites = {"partition": {"name": "sites", "clients": 2}}
    with pytest.raises(UserError, match=r"the site's data is missing: the recipe has partition.name=sites"):
        site_federation(quick(**sites), load_site(site))
    with pytest.raises(UserError, match="partition sites needs engine flower"):
        build_federation(tiny(**sites))


def test_the_runs_name_cannot_leave_the_sites_folder(quick, tmp_path):
    [site] = write_sites(tmp_path, 1)
    (tmp_path / "recipe.yaml").write_text(quick(**AVERAGED).to_yaml())
    states = _site_from_file(str(tmp_path / "recipe.yaml"), (("site", str(site)),)).states
    with pytest.raises(UserError, match="the server's name of the run is invalid: expected 1 to 64 letters"):
        states("../elsewhere")


# A client's evaluation of its own model is checked like any other answer


MEASURES = {"knn": 80.0, "linear": 100.0, "effective_rank": 2.7, "fine_tune_f1": 0.0}
SPECTRUM = torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64)


def test_a_sound_evaluation_has_no_fault():
    assert evaluation_fault(SiteEvaluation(MEASURES, SPECTRUM)) is None
    on_other_data = {"downstream_mine_uniformity": -3.0, "downstream_mine_effective_rank": 300.0}
    assert evaluation_fault(SiteEvaluation(MEASURES | on_other_data, SPECTRUM)) is None


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"downstream_mine_alignment": 5.0}, "an invalid downstream_mine_alignment: expected 0 to 4.01, got 5.0"),
        ({"knn": 101.0}, "an invalid knn: expected 0 to 100, got 101.0"),
        ({"knn": -1.0}, "an invalid knn: expected 0 to 100, got -1.0"),
        ({"linear": math.nan}, "an invalid linear: expected 0 to 100, got nan"),
        ({"effective_rank": 1e9}, "an invalid effective_rank: expected 0 to 4, got 1000000000.0"),
        ({f"fine_tune_{i}": 1.0 for i in range(40_000)}, "40004 measures, more than 100"),
        ({"fine_tune_" + "x" * 10**6: 1.0}, f"'fine_tune_{'x' * 90}', which is not a measure"),
        ({"bytes_up": 1.0}, "'bytes_up', which is not a measure"),
        (None, "no valid spectrum"),
        (torch.ones(2, 2), "no valid spectrum"),
        (torch.ones(3, dtype=torch.int64), "no valid spectrum"),
        (torch.zeros(10**6), "spectrum has 1000000 values, more than 65536"),
        (torch.tensor([1.0, -1.0]), "spectrum is invalid"),
        (torch.tensor([math.inf, 1.0]), "spectrum is invalid"),
        (torch.tensor([1.0, math.nan]), "spectrum is invalid"),
    ],
)
def test_measures_and_a_spectrum_that_no_model_has_are_refused(changes, fault):
    measures, spectrum = (MEASURES | changes, SPECTRUM) if isinstance(changes, dict) else (MEASURES, changes)
    told = evaluation_fault(SiteEvaluation(measures, spectrum)) or ""
    assert re.match(f"its evaluation('s| has| holds) {re.escape(fault)}", told), told


def test_evaluations_and_registrations_may_be_small_only(quick, tmp_path, monkeypatch):
    kinds, largest = {}, {}
    send, collect = Messenger.send, Messenger.collect

    def send_and_note(messenger, kind, *arguments):
        ids = send(messenger, kind, *arguments)
        kinds.update(dict.fromkeys(ids, kind))
        return ids

    def collect_and_note(messenger, waiting, seconds, most):
        largest.update({kinds[name]: most for name in waiting})
        return collect(messenger, waiting, seconds, most)

    monkeypatch.setattr(Messenger, "send", send_and_note)
    monkeypatch.setattr(Messenger, "collect", collect_and_note)
    run_on(quick(rounds=1), *start(quick(rounds=1), tmp_path / "b"))
    assert (largest["query"], largest["evaluate"]) == (2**22, 2**22)
    assert largest["train"] >= 2**28
