"""What two_views draws: Philox's published vectors, torchvision's distributions, options that are refused."""

import math

import pytest
import torch

from fedkernels import ViewKey, ViewOptions, view_parameters
from fedkernels.reference._philox import philox

pytestmark = pytest.mark.cpu_only(reason="plain PyTorch")

DRAWS = 200_000  # of each parameter; a view has one, so half as many samples
OF_TORCHVISION = 50_000  # which draws them one by one
HEIGHT, WIDTH = 224, 160
OPTIONS = ViewOptions(saturation=1.3, solarize=0.3)
NUMBERS = torch.arange(DRAWS // 2)


def words_of(counter, key):
    return [int(word) for word in philox(*([torch.tensor(word) for word in of] for of in (counter, key)))]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    """Those of Random123's kat_vectors, "philox4x32 10"."""
    counter, key, words = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    assert words_of(counter, key) == words


def test_words_are_counted_by_sample_view_and_draw():
    """As they stand in the docstrings, for one view of one sample: the flip is word 6, so the third of block 1."""
    key, sample = ViewKey(seed=5 + (6 << 32), client=7, round=8, epoch=9), (3 << 32) + 4
    derived = words_of((7, 8, 9, 0), key=(5, 6))[:2]
    flip = words_of((4, 3, 1, 1), key=derived)[2] / 2**32
    for probability, expected in ((flip, False), (flip + 2**-32, True)):
        drawn = view_parameters(torch.tensor([sample]), key, 9, 9, ViewOptions(flip=probability))
        assert bool(drawn.flip[1, 0]) is expected


def kolmogorov_smirnov(some, others):
    """The largest difference of the two empirical distributions."""
    some, others = some.double().sort().values, others.double().sort().values
    at = torch.cat((some, others)).unique()
    below = [torch.searchsorted(values, at, right=True).double() / len(values) for values in (some, others)]
    return float((below[0] - below[1]).abs().max())


# One comparison of equal distributions in 10,000 exceeds this; the draws are fixed, so that the tests are too.
CRITICAL = math.sqrt(-math.log(1e-4 / 2) / 2) * math.sqrt(1 / DRAWS + 1 / OF_TORCHVISION)


@pytest.fixture(scope="module")
def ours():
    return view_parameters(NUMBERS, ViewKey(11), HEIGHT, WIDTH, OPTIONS)


@pytest.fixture(scope="module")
def boxes_of_torchvision():
    transforms = pytest.importorskip("torchvision.transforms")
    image = torch.empty(1, HEIGHT, WIDTH)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draw = transforms.RandomResizedCrop.get_params
        return torch.tensor([draw(image, OPTIONS.crop_scale, OPTIONS.crop_ratio) for _ in range(OF_TORCHVISION)])


MEASURES = {
    "area": lambda boxes: boxes[:, 2] * boxes[:, 3],
    "ratio": lambda boxes: boxes[:, 3] / boxes[:, 2],
    "top in its range": lambda boxes: boxes[:, 0] / (HEIGHT - boxes[:, 2] + 1),
    "left in its range": lambda boxes: boxes[:, 1] / (WIDTH - boxes[:, 3] + 1),
}


@pytest.mark.parametrize("name", MEASURES)
def test_boxes_are_distributed_as_torchvisions(ours, boxes_of_torchvision, name):
    measure = MEASURES[name]
    assert kolmogorov_smirnov(measure(ours.boxes.flatten(0, 1)), measure(boxes_of_torchvision)) < CRITICAL


def test_factors_and_sigma_are_uniform_in_their_ranges(ours):
    transforms = pytest.importorskip("torchvision.transforms")
    names = "brightness", "contrast", "saturation", "hue"
    jitter = transforms.ColorJitter(*(getattr(OPTIONS, name) for name in names))
    ranges = [*(getattr(jitter, name) for name in names), OPTIONS.blur_sigma]
    for found, (low, high) in zip([*ours.factors.flatten(0, 1).T, ours.sigma.flatten()], ranges, strict=True):
        evenly = low + (high - low) * (torch.arange(DRAWS) + 0.5) / DRAWS
        assert kolmogorov_smirnov(found, evenly) < CRITICAL


def test_every_order_is_equally_frequent(ours):
    _, counts = ours.order.flatten(0, 1).unique(dim=0, return_counts=True)
    assert len(counts) == 24
    chi_square = float((counts - DRAWS / 24).square().sum() / (DRAWS / 24))
    assert chi_square < 60  # 23 degrees of freedom exceed 57 once in 10,000 times


@pytest.mark.parametrize("name", ["flip", "jitter", "grayscale", "blur", "solarize"])
def test_choices_have_their_probability(ours, name):
    probability = getattr(OPTIONS, "jitter_probability" if name == "jitter" else name)
    deviation = math.sqrt(probability * (1 - probability) / DRAWS)
    assert abs(float(getattr(ours, name).double().mean()) - probability) < 4 * deviation


def test_what_is_drawn_is_independent(ours):
    """Of a sample's two views, and of each other."""
    for view in range(2):
        columns = [
            *ours.boxes[view].T,
            *ours.factors[view].T,
            ours.sigma[view],
            *(getattr(ours, name)[view] for name in ("flip", "jitter", "grayscale", "blur", "solarize")),
        ]
        others = [ours.boxes[1][:, 2], ours.factors[1][:, 0], ours.flip[1]] if view == 0 else []
        correlations = torch.corrcoef(torch.stack([column.double() for column in (*columns, *others)]))
        off_diagonal = correlations - torch.eye(len(correlations), dtype=torch.float64)
        off_diagonal[2:4, 0:4] = off_diagonal[0:4, 2:4] = 0  # a large box leaves little room: its sides and corner
        off_diagonal[0:2, 0:2] = 0
        assert off_diagonal.abs().max() < 5 / math.sqrt(DRAWS / 2)


@pytest.mark.parametrize(
    ("height", "width", "ratio", "box"),
    [
        (10, 30, (0.5, 0.8), [0, 11, 10, 8]),
        (30, 10, (1.5, 2.0), [11, 0, 7, 10]),
        (30, 10, (1 / 3, 1.0), [0, 0, 30, 10]),
        (2, 2, (1000.0, 1000.0), [0, 0, 1, 2]),
    ],
)
def test_where_no_shape_fits_the_largest_central_one_is_cut(height, width, ratio, box):
    options = ViewOptions(crop_scale=(1, 1), crop_ratio=ratio)
    boxes = view_parameters(torch.arange(50), ViewKey(0), height, width, options).boxes
    assert box in boxes.flatten(0, 1).tolist()


def test_boxes_lie_inside():
    for height, width in ((2, 2), (2, 9), (50, 3), (31, 31)):
        boxes = view_parameters(torch.arange(500), ViewKey(1), height, width, ViewOptions()).boxes
        top, left, box_height, box_width = boxes.unbind(-1)
        assert min(top.min(), left.min()) >= 0
        assert min(box_height.min(), box_width.min()) >= 1
        assert (top + box_height).max() <= height
        assert (left + box_width).max() <= width


def test_shapes_dtypes_and_numbers_of_samples():
    drawn = view_parameters(torch.tensor([-1, 2**63 - 1, 0]), ViewKey(0), 9, 9)
    assert [tuple(one.shape) for one in drawn] == [(2, 3, 4), *[(2, 3)] * 2, *[(2, 3, 4)] * 2, *[(2, 3)] * 4]
    assert [one.dtype for one in drawn] == [
        *(torch.int64, torch.bool, torch.bool, torch.int64, torch.float32),
        *(torch.bool, torch.bool, torch.float32, torch.bool),
    ]
    again = view_parameters(torch.tensor([0, -1]), ViewKey(0), 9, 9)
    assert all(torch.equal(some[:, [2, 0]], others) for some, others in zip(drawn, again, strict=True))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"crop_scale": 0.2}, TypeError, "crop_scale must be two numbers, got 0.2"),
        ({"crop_scale": ("a", 1)}, TypeError, "crop_scale must be a number, got str"),
        ({"crop_scale": (0.2, 1.5)}, ValueError, r"crop_scale must be two numbers with .* <= 1, got \(0.2, 1.5\)"),
        ({"crop_ratio": (2.0, 1.0)}, ValueError, r"crop_ratio must be two numbers with .* got \(2.0, 1.0\)"),
        ({"blur_sigma": (0.1, math.inf)}, ValueError, "blur_sigma must be two numbers with .* high <= 1e\\+06"),
        ({"flip": 1.5}, ValueError, "flip must be between 0 and 1, got 1.5"),
        ({"hue": 0.6}, ValueError, "hue must be between 0 and 0.5, got 0.6"),
        ({"brightness": -0.1}, ValueError, "brightness must be between 0 and 1e\\+06, got -0.1"),
        ({"contrast": math.nan}, ValueError, "contrast must be between 0 and .* got nan"),
        ({"solarize": 10**400}, ValueError, "solarize must be between 0 and 1, got an integer of 1329 bits"),
    ],
)
def test_bad_options_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        ViewOptions(**changes)
