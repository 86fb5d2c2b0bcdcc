"""The numbers of the site's figures, computed again without the operators that made them."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch

from fedkernels.reference.unbalanced_ot import unbalanced_ot
from website import figures
from website.figures import cka, eua, fur, stages, what_travels
from website.methods import PAGES


def data_of(name):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', figures.html(name), re.DOTALL)[1])


@pytest.mark.parametrize("name", sorted(figures.DRAWINGS))
def test_a_figure_is_described_and_has_no_blank_line(name):
    html = figures.html(name)
    assert re.search(r'<svg [^>]*role="img"[^>]*aria-label="[^"]{40,}"', html)
    assert not re.search(r"\n\s*\n", html)
    assert "$" not in html  # the site would take it for an equation


def test_cka_is_that_of_the_points_that_the_script_draws():
    data, index = data_of("cka"), 0
    x, other = np.array(data["x"]), np.array(data["other"])
    for turn in np.radians(data["turns"]):
        for scale in data["scales"]:
            for share in data["shares"]:
                mixed = (1 - share) * x + share * other
                cosine, sine = scale * math.cos(turn), scale * math.sin(turn)
                y = np.stack([cosine * mixed[:, 0] - sine * mixed[:, 1], sine * mixed[:, 0] + cosine * mixed[:, 1]], 1)
                a, b = x - x.mean(0), y - y.mean(0)
                expected = np.linalg.norm(b.T @ a) ** 2 / np.linalg.norm(a.T @ a) / np.linalg.norm(b.T @ b)
                assert data["cka"][index] == pytest.approx(expected, abs=6e-4)
                assert data["distance"][index] == pytest.approx(np.linalg.norm(x - y, axis=1).mean(), abs=6e-4)
                index += 1
    assert index == len(data["cka"]) == len(cka.TURNS) * len(cka.SCALES) * len(cka.SHARES)


def test_eua_has_the_shortest_combination():
    data, index = data_of("eua"), 0
    grid = np.linspace(0, 1, 2001)[:, None]
    for angle in eua.ANGLES:
        for length in eua.LENGTHS:
            deltas = eua.updates(angle, length).numpy()
            for power in (2, 1):  # squared_length, length
                gradients = deltas / np.linalg.norm(deltas, axis=1, keepdims=True) ** power
                p = np.array(data["p"][index])
                least = np.linalg.norm(grid * gradients[0] + (1 - grid) * gradients[1], axis=1).min()
                assert np.linalg.norm(p @ gradients) <= least + 3e-3
                assert p.sum() == pytest.approx(1, abs=2e-3)
                assert (p >= 0).all()
                index += 1
    assert index == len(data["p"]) == len(data["shares"])


def test_the_first_step_of_fur_is_the_terms_value_and_the_points_spread():
    positions, values, _ = fur.flow()
    samples = torch.nn.functional.normalize(
        torch.randn(32 * fur.POINTS, 3, generator=torch.Generator().manual_seed(0)), dim=1
    ).view(32, fur.POINTS, 3)
    ones = torch.ones(32, fur.POINTS)
    cost = 1 - positions[0] @ samples.mT
    expected = unbalanced_ot(cost, ones, ones, 0.8, 0.8).mean() / fur.POINTS
    assert float(values[0]) == pytest.approx(float(expected), rel=1e-3)
    lengths = positions.mean(dim=1).norm(dim=-1)
    assert (lengths.diff() < 0).all()
    assert data_of("fur")["resultant"][-1] == pytest.approx(float(lengths[-1]), abs=6e-4)


def test_every_method_is_in_one_family_of_what_travels():
    shown = [recipe for recipes in what_travels.families().values() for recipe in recipes]
    assert sorted(shown) == sorted(PAGES)


def test_the_stages_are_the_schedules_own():
    html = figures.html("stages")
    assert "LW-FedSSL, stage 3: layer 1 frozen, layer 2 frozen, layer 3 trains" in html
    assert "Prog-FedSSL, stage 3: layer 1 trains, layer 2 trains, layer 3 trains" in html
    assert stages.LAYERS == 4
