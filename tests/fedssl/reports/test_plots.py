"""Charts of runs, and how metrics are written."""

from __future__ import annotations

import numpy as np
import pytest

from fedssl.reports.plots import Bar, Card, draw_bars, draw_curves, draw_spectrum, draw_table_picture, method_styles


def test_styles_of_many_methods_differ():
    styles = method_styles([str(i) for i in range(20)])
    assert len(set(styles.values())) == 20


def test_curves_show_the_mean_and_the_band_of_the_runs():
    groups = {"ours": [{0: 1.0, 2: 5.0}, {0: 3.0, 2: 6.0, 4: 9.0}], "none": []}
    axes = draw_curves("knn", groups, method_styles(list(groups))).axes[0]
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[0.0, 2.0], [2.0, 5.5]]
    (band,) = axes.collections
    corners = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
    assert {(0.0, 1.0), (0.0, 3.0), (2.0, 5.0), (2.0, 6.0)} <= corners
    assert not any(point[0] == 4.0 for point in corners)


def test_bars_run_from_before_to_after_with_a_dot_a_seed():
    bars = [Bar("ours", [40.0, 42.0], [50.0, 56.0], "#000000"), Bar("absent", [], [], "#111111")]
    axes = draw_bars({"knn": bars, "effective_rank": bars}).axes[0]
    (patch,) = axes.patches
    assert (patch.get_x(), patch.get_width()) == (41.0, 12.0)
    dots = [line.get_xdata().tolist() for line in axes.lines if line.get_marker() == "o"]
    assert dots == [[50.0, 56.0]]
    assert [text.get_text() for text in axes.texts] == ["53.0 ± 4.2", "-"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ours", "absent"]


def test_the_spectrum_is_relative_and_averaged_over_clients_of_any_dimension():
    groups = {
        "flat": [[[7.0] * 5, [0.1] * 9]],
        "steep": [[[4.0, 0.04], [1.0, 1e-4, 0.0]]],
        "collapsed": [[[0.0, 0.0]]],
        "single": [[[3.0]]],
    }
    lines = {
        line.get_label(): line.get_ydata() for line in draw_spectrum(groups, method_styles(list(groups))).axes[0].lines
    }
    np.testing.assert_allclose(lines["flat"], 1.0)
    np.testing.assert_allclose(lines["single"], 1.0)
    assert lines["steep"][0] == pytest.approx(1.0)
    assert lines["steep"][-1] == pytest.approx((1e-2 * 1e-6) ** 0.5)  # geometric mean, 0 at the floor of 1e-6
    assert lines["collapsed"].max() == pytest.approx(1e-6)


@pytest.mark.parametrize("clients", [0, 2, 6])
def test_a_tables_picture_can_be_drawn_for_any_number_of_clients(clients):
    cards = [Card(f"client {k}", "net\n3 images", np.zeros((6, 8), np.uint8) if k else None) for k in range(clients)]
    rows = [("ours", "method", [40.0], [50.0]), ("alone", "baseline", [], []), ("x", "control", [], [45.0])]
    figure = draw_table_picture("title", "data", cards, {"knn": rows}, {"knn": [40.0]}, "a line\nanother")
    figure.draw_without_rendering()
    shown = [axes for axes in figure.axes if axes.get_title().startswith("client")]
    assert len(shown) == clients
    assert {"title", "data", "a line\nanother"} <= {text.get_text() for text in figure.texts}
