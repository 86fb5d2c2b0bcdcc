"""Charts of runs; the nearest-neighbour sheet and the map of images: what is near is drawn near."""

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.engines import in_process
from fedssl.reports.images import (
    draw_map,
    draw_neighbours,
    draw_pictures,
    grid_cells,
    nearest_images,
    thumbnails,
    tsne,
)
from fedssl.reports.plots import Bar, draw_bars, draw_curves, draw_spectra, method_styles, png_bytes
from fedssl.reports.report import write_report
from tests.fedssl.conftest import AVERAGED


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


def test_the_spectrum_is_each_axis_share_of_the_variance_the_mean_of_the_models():
    axes = draw_spectra(
        {"ours": [[2.0, 1.0, 0.0], [1.0, 1.0]], "collapsed": [[3e200, 0.0]], "flat": [[0.0, 0.0]]}
    ).axes[0]
    ours, collapsed, flat = (np.exp(line.get_ydata()) for line in axes.lines)
    assert ours == pytest.approx([(0.8 * 0.5) ** 0.5, (0.2 * 0.5) ** 0.5])
    assert collapsed == pytest.approx([1.0, 1e-12])
    assert flat == pytest.approx([1e-12, 1e-12])
    assert axes.lines[0].get_xdata().tolist() == [1, 2]


# Images


def test_nearest_by_cosine_and_never_itself():
    features = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [-1.0, 0.0], [0.0, 0.0]])
    rows, cosines = nearest_images(features, torch.tensor([0, 2]), 3)
    assert rows[0].tolist()[:1] == [1]
    assert set(rows[0].tolist()[1:]) == {2, 4}
    assert rows[1].tolist()[0] == 1
    assert cosines[0, 0] == pytest.approx(2 / 4.01**0.5)
    assert nearest_images(features, torch.tensor([0]), 9)[0].shape == (1, 4)


def test_tsne_puts_alike_near_alike_and_repeats_and_takes_a_collapsed_representation():
    generator = torch.Generator().manual_seed(0)
    centres = 10 * torch.eye(3, 8)
    features = centres.repeat(10, 1) + 0.1 * torch.randn(30, 8, generator=generator)
    other = features + 0.01 * torch.randn(30, 8, generator=generator)
    points = tsne(torch.cat([features, other]), seed=3)
    first, second = points.split(30)
    assert first.shape == second.shape == (30, 2)
    nearest = torch.cdist(second, first).argmin(dim=1)
    assert (nearest % 3 == torch.arange(30) % 3).all()
    torch.testing.assert_close(tsne(torch.cat([features, other]), seed=3), points)
    assert torch.isfinite(tsne(torch.ones(14, 4), seed=0)).all()  # a collapsed representation


def test_no_two_images_take_one_place_and_far_ones_stay_apart():
    points = torch.cat([torch.zeros(20, 2), torch.full((20, 2), 100.0)])
    cells = grid_cells(points, 10)
    assert len({tuple(cell) for cell in cells.tolist()}) == 40
    assert cells[:20].sum(dim=1).max() < cells[20:].sum(dim=1).min()
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert grid_cells(corners, 3).tolist() == [[0, 0], [2, 0], [0, 2], [2, 2]]


@pytest.mark.parametrize(("channels", "side", "drawn"), [(1, 8, (32, 32)), (3, 200, (48, 48))])
def test_thumbnails_keep_their_look(channels, side, drawn):
    images = torch.full((3, channels, side, side), 7, dtype=torch.uint8)
    images[1] = 250
    array = thumbnails(images, torch.tensor([1, 0]))
    assert array.shape[:3] == (2, *drawn)
    assert array.ndim == (3 if channels == 1 else 4)
    assert (array[0] == 250).all()
    assert (array[1] == 7).all()


def colours_in(figure):
    pixels = np.asarray(Image.open(io.BytesIO(png_bytes(figure))).convert("RGB"), np.int64)
    return set((pixels @ (2**16, 2**8, 1)).ravel().tolist())


def test_classes_are_marked_where_there_are_labels():
    images = torch.full((12, 1, 8, 8), 90, dtype=torch.uint8)
    queries, nearest = torch.tensor([0]), torch.tensor([[1, 2]])
    green, orange, blue = 0x009E73, 0xD55E00, 0x1F77B4
    labels = torch.tensor([0, 0, 1] + [1] * 9)
    with_labels = colours_in(draw_neighbours(images, queries, nearest, torch.ones(1, 2), labels))
    assert {green, orange} <= with_labels
    assert not {green, orange} & colours_in(draw_neighbours(images, queries, nearest, torch.ones(1, 2), None))
    points = torch.rand(12, 2)
    assert blue in colours_in(draw_map(images, points, labels, ("a", "b")))
    assert blue not in colours_in(draw_map(images, points, None))


def test_a_run_is_drawn_with_its_global_model(tiny, finished, few_neighbours):
    pictures = draw_pictures(finished(tiny(**AVERAGED)))
    sheet, image_map = (picture.caption for picture in pictures)
    assert all("the global model after round 2." in caption for caption in (sheet, image_map))
    assert "those of 60 test images" in sheet
    assert re.search(r": \d{1,3}% are green\.$", sheet)
    assert "t-SNE of 60 test images" in image_map


def test_images_without_labels_and_without_a_test_set_and_images_that_are_gone(tiny, few_neighbours, tmp_path):
    file, path = tmp_path / "images.npz", tmp_path / "run"
    np.savez(file, x_train=np.random.default_rng(0).integers(0, 256, (60, 12, 12, 3), np.uint8))
    in_process.run(
        tiny(rounds=1, data={"name": "npz", "path": str(file)}, partition={"name": "iid", "clients": 2}), path
    )
    page = write_report([path]).read_text()
    assert "client 0&#39;s model" in page
    assert "Images as the encoder sees them" in page
    assert "60 training images" in page
    assert "green line" not in page
    assert "Images as the encoder" not in write_report([path], images=False).read_text()
    file.unlink()
    assert "no pictures of images: there is no file" in write_report([path]).read_text()
