"""Whether a run has learned, told without labels: by views that find their image, and by how often images were seen."""

import functools

import pytest
import torch

from fedssl.evaluation.metrics import view_retrieval
from fedssl.evaluation.verdict import enough_passes, too_short, verdict
from fedssl.run_folder.record import read_run
from tests.fedssl.reports.synthetic_runs import write_run


def test_views_find_their_image_as_counted_by_hand():
    first = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-2.0, 0.4], [0.0, -3.4]])  # both of mean 0, so as they are
    second = torch.tensor([[5.0, 0.1], [-1.0, 0.0], [-4.0, 0.9], [0.0, -1.0]])
    assert view_retrieval((first, second)) == 75.0  # the second image's views are a quarter turn apart
    assert view_retrieval((first[:1], second[:1])) is None
    assert view_retrieval(()) is None


def test_one_point_finds_nothing_and_noise_finds_by_chance():
    assert view_retrieval((torch.ones(50, 8), torch.ones(50, 8))) == 0.0
    noise = torch.randn(2, 400, 16, generator=torch.Generator().manual_seed(0))
    assert view_retrieval((noise[0], noise[1])) < 2
    assert view_retrieval((noise[0], noise[0])) == 100.0


def measured(tiny, folder, before, after, pixels, ranks=(20.0, 30.0), linear=(), images=1000):
    """The sentences about a finished run with these figures; `linear` is the accuracy after, of pixels and before."""
    measures = {(0, "view_retrieval"): before, (2, "view_retrieval"): after, (0, "pixel_view_retrieval"): pixels}
    measures[2, "viewed_images"] = images
    measures |= dict(zip([(2, "linear"), (0, "pixel_linear"), (0, "linear")], linear, strict=False))
    rows = [(number, "global", name, value) for (number, name), value in measures.items()]
    rows += [(number, "global", "effective_rank", rank) for number, rank in zip((0, 2), ranks, strict=True)]
    write_run(folder, tiny(), rows)
    return " ".join(verdict(read_run(folder)))


@pytest.mark.parametrize(
    ("before", "after", "pixels", "told"),
    [
        (10.0, 60.0, 20.0, "So it has learned: it is ahead of the encoder before training and of raw pixels"),
        (10.0, 21.0, 20.0, "has NOT learned: it is not ahead of raw pixels by more than chance"),
        (59.0, 60.0, 20.0, "has NOT learned: it is not ahead of the encoder before training by more than"),
        (10.0, 1.0, 20.0, "has NOT learned: it is not ahead of the encoder before training and raw pixels by"),
    ],
)
def test_an_encoder_must_be_ahead_of_its_start_and_of_the_pixels(before, after, pixels, told, tiny, tmp_path):
    text = measured(tiny, tmp_path / "run", before, after, pixels)
    assert told in text
    assert text.startswith(f"{after} % of random views find their own image")
    assert "collapsed" not in text


def test_few_images_must_differ_by_more(tiny, tmp_path):
    """Two standard errors of 60 % minus 50 % are 4.4 points with 1,000 images and 19.8 with 50."""
    assert "So it has learned" in measured(tiny, tmp_path / "many", 10.0, 60.0, 50.0)
    text = measured(tiny, tmp_path / "few", 10.0, 60.0, 50.0, images=50)
    assert "has NOT learned: it is not ahead of raw pixels by more than chance (19.8 points with 50 images)" in text


def test_values_that_are_no_percentages_end_no_report(tiny, tmp_path):
    assert "find their own image" in measured(tiny, tmp_path / "run", -300.0, 150.0, 20.0)


def test_an_accuracy_that_is_not_above_raw_pixels_is_named(tiny, tmp_path):
    told = "Its linear accuracy, 83.1 %, is NOT above that of raw pixels, 83.7 %"
    assert told in measured(tiny, tmp_path / "below", 10.0, 60.0, 20.0, linear=(83.1, 83.7))
    assert measured(tiny, tmp_path / "above", 10.0, 60.0, 20.0, linear=(83.8, 83.7)).endswith("and of raw pixels.")
    told = "images. Yet its linear accuracy is 99.3 %, above the 98.3 % of raw pixels and the 89.8 % before training."
    assert measured(tiny, tmp_path / "by labels", 2.2, 5.2, 3.8, linear=(99.3, 98.3, 89.8)).endswith(told)
    told = "Yet its linear accuracy is 8.3 %, above the 7.1 % of raw pixels and the 0.0 % before training."
    assert measured(tiny, tmp_path / "none right before", 2.2, 5.2, 3.8, linear=(8.3, 7.1, 0.0)).endswith(told)
    assert "linear" not in measured(tiny, tmp_path / "untrained", 2.2, 5.2, 3.8, linear=(99.3, 98.3, 99.3))


def test_training_from_weights_is_shorter():
    assert [enough_passes(images) for images in (500, 10_000, 10**6)] == [400, 120, 30]
    assert [enough_passes(images, from_weights=True) for images in (500, 10_000, 10**6)] == [30, 6, 3]


def test_a_collapse_is_named(tiny, tmp_path):
    text = measured(tiny, tmp_path / "run", 10.0, 4.0, 20.0, ranks=(159.0, 20.0))
    assert "have collapsed: their effective rank fell from 159.0 to 20.0. Take objective simclr, a lower" in text
    assert "collapsed" not in measured(tiny, tmp_path / "learned", 6.9, 28.6, 8.1, ranks=(86.5, 20.2))
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("objective:", "purpose:"))  # as somebody else's may be
    assert "Take objective simclr, a lower" in " ".join(verdict(read_run(tmp_path / "run")))


def test_a_run_that_is_not_finished_not_measured_or_not_trained_says_nothing(tiny, tmp_path):
    assert measured(functools.partial(tiny, schedule={"name": "untrained"}), tmp_path / "scratch", 10.0, 9.0, 8.0) == ""
    write_run(tmp_path / "run", tiny(), [(0, "global", "view_retrieval", 5.0), (1, "global", "view_retrieval", 6.0)])
    assert verdict(read_run(tmp_path / "run")) == []
    write_run(tmp_path / "other", tiny(), [(number, "global", "knn", 5.0) for number in (0, 2)])
    assert verdict(read_run(tmp_path / "other")) == []


@pytest.mark.parametrize(
    ("changes", "images", "short"),
    [
        ({"rounds": 1}, 10_000, True),  # one pass of 120
        ({"rounds": 24}, 10_000, False),
        ({"rounds": 24, "clients_per_round": 1}, 10_000, True),  # a third of the clients a round
        ({"rounds": 20, "training": {"local_steps": 50, "batch_size": 8}}, 10_000, True),
        ({"rounds": 2000, "training": {"local_steps": 50, "batch_size": 8}}, 10_000, False),
        ({"rounds": 1}, 0, False),  # at sites, which do not say
        ({"rounds": 1, "model": {"weights": "encoder"}}, 10_000, False),
    ],
)
def test_a_run_that_sees_its_images_too_rarely_is_called_short(changes, images, short, tiny):
    sentence = too_short(tiny(**changes).model_dump(), images)
    assert (sentence is not None) == short
    if sentence:
        assert sentence.startswith("this run is short: it sees each of 10,000 images ")
        assert f"and {enough_passes(images)} times are worth taking" in sentence
