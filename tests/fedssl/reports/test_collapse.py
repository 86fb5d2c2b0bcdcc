"""The collapse analysis of runs: which models it looks at, and how it is shown."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedssl.evaluation.evaluate import measured_sample
from fedssl.evaluation.features import extract_features
from fedssl.evaluation.metrics import effective_rank
from fedssl.federation import build_federation
from fedssl.randomness import seed_for
from fedssl.reports.collapse import (
    Collapse,
    Geometry,
    analyse_collapse,
    draw_log_singular_values,
)
from fedssl.reports.report import opened_with_data, write_report
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.reports.parsed_page import Page

SAMPLED = {"clients_per_round": 2, "evaluation": {"images": 80, "linear": {"epochs": 2}}}


@pytest.fixture(scope="module")
def averaged(tiny, finished) -> Path:
    """A finished run with a global model and three clients, of whom each round trains two."""
    return finished(tiny(**AVERAGED, **SAMPLED))


@pytest.fixture(scope="module")
def analysed(averaged) -> Collapse:
    return analyse_collapse(*opened_with_data(averaged))


def test_the_global_model_and_the_latest_local_models_are_looked_at(tiny, averaged, analysed):
    """The numbers are those of the stored models."""
    federation, directory = build_federation(tiny(**AVERAGED, **SAMPLED)), RunDirectory.open(averaged)
    images = measured_sample(federation.dataset, 80, seed_for(0, "evaluation")).test_images
    assert analysed.images == len(images) == 40
    shared, *local = analysed.models
    assert shared == "global"
    # those of the last round first, drawn by the run's seed
    assert sorted(map(int, local[:2])) == federation.sampled_clients(2)
    models = {"global": federation.method.load_global(directory.server_state(), lambda: federation.new_model(None))}
    for who, geometry in analysed.models.items():
        model = models.get(who) or federation.client(int(who), directory.client_state(int(who))).model
        rank = effective_rank(extract_features(model.encoder, images))
        assert geometry.effective_rank == pytest.approx(rank, rel=1e-6)
        assert geometry.dimension == model.encoder.num_features
    logged = {(n, who, m): v for n, who, m, v in directory.read_metrics()}
    assert logged[2, "global", "effective_rank"] == pytest.approx(analysed.models["global"].effective_rank, rel=1e-6)


def test_a_method_without_a_global_model_shows_its_clients(tiny, finished):
    found = analyse_collapse(*opened_with_data(finished(tiny())))
    assert found.shared is None
    assert sorted(found.models) == ["0", "1", "2"]


def test_the_report_shows_it(averaged, analysed, tmp_path):
    page = Page(write_report([averaged], tmp_path / "page.html", images=False))
    rows = page.table("method", "model", "alignment")
    assert [row[1] for row in rows] == ["global model", f"mean of {len(analysed.local)} local models"]
    one, local = analysed.models["global"], analysed.local
    measures = f"{one.alignment:.3f} {one.uniformity:.2f} {one.effective_rank:.1f}"
    assert rows[0][2:] == measures.split()
    assert rows[1][2] == f"{sum(one.alignment for one in local) / len(local):.3f}"
    assert "Collapse of the representations" in page.text
    assert "representations of 40 test images; of" in page.text


# Charts


def geometry(spectrum: list[float]) -> Geometry:
    return Geometry(4, spectrum, 0.1, -1.0, 2.0)


def made_up(**models: Geometry) -> Collapse:
    shown = {who.removeprefix("client"): one for who, one in models.items()}
    return Collapse(2, shown)


def test_singular_values_stand_as_they_are_and_local_ones_as_their_mean():
    shared, *local = (geometry(values) for values in ([-1.0, -2], [-1.0, -3], [-3.0, -4, -5]))
    found = made_up(**{"global": shared, "client0": local[0], "client4": local[1]})
    left, right = draw_log_singular_values({"ours": found}).axes
    assert left.get_title(loc="left") == "global model"
    assert left.lines[0].get_xydata().tolist() == [[1, -1], [2, -2]]
    assert right.lines[0].get_xydata().tolist() == [[1, -2], [2, -3.5]]
    # the reference: 2 points in 4 dimensions have one direction of variance at most
    assert left.lines[1].get_ydata()[-1] == pytest.approx(math.log(1e-12))
