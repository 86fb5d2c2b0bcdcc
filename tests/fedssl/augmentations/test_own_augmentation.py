"""An augmentation of one's own: a part like others, seeded for each batch, its result checked."""

import pytest
import torch

from fedkernels import ViewKey
from fedssl.augmentations.base import Augmentation, draw_views
from fedssl.data.pixels import normalize
from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.recipe.reading import load_recipe, parse_recipe
from fedssl.recipe.show import resolve_recipe
from tests.fedssl.conftest import AVERAGED, tiny_values
from tests.fedssl.killed_runs import contents, killed_and_resumed

KEY, CPU = ViewKey(7, client=1, round=2, epoch=3), torch.device("cpu")
IMAGES = torch.randint(0, 256, (12, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
ROWS = torch.arange(12)
CODE = '''
"""Noise."""

import torch
from pydantic import Field
from fedssl.augmentations.base import Augmentation
from fedssl.data.pixels import normalize


class Noise(Augmentation):
    """Views with noise of a strength."""

    strength: float = Field(0.1, ge=0)

    def views(self, images, samples, key):
        return tuple(normalize(images) + self.strength * torch.randn(images.shape) for _ in range(2))
'''


@pytest.fixture
def noise(tmp_path):
    """The path of a part file."""
    path = tmp_path / "noise.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def part(noise) -> Augmentation:
    return parse_recipe(tiny_values(augmentation={"name": str(noise), "strength": 1.0})).augmentation


def test_it_draws_from_generators_that_are_seeded_by_key_and_samples_and_restored(part):
    before = torch.get_rng_state()
    views = draw_views(part, IMAGES, ROWS, KEY, CPU, count=4)
    torch.rand(3)
    again = draw_views(part, IMAGES, ROWS, KEY, CPU, count=4)
    assert all(torch.equal(one, other) for one, other in zip(views, again, strict=True))
    torch.set_rng_state(before)
    draw_views(part, IMAGES, ROWS, KEY, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    others = [draw_views(part, IMAGES, ROWS, KEY._replace(**{name: 99}), CPU) for name in KEY._fields]
    others.append(draw_views(part, IMAGES, ROWS + 1, KEY, CPU))
    noise = torch.stack([view - normalize(IMAGES) for drawn in (views, *others) for view in drawn]).flatten(1)
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.2


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (IMAGES.float(), r"got float32 \[12, 3, 8, 8\] on cpu"),
        ((IMAGES.float(),), r"got \[float32 \[12, 3, 8, 8\] on cpu\]"),
        ((IMAGES.float(), 1), r"got \[float32 \[12, 3, 8, 8\] on cpu, int\]"),
        ((IMAGES.double(), IMAGES.double()), r"got \[float64 \[12"),
        ((IMAGES[:6].float(), IMAGES.float()), r"got \[float32 \[6, 3"),
    ],
)
def test_what_it_returns_is_checked(returned, got, part, monkeypatch):
    monkeypatch.setattr(type(part), "views", lambda *_: returned)
    needed = r"noise\.py: views must return two tensors, each float32 \[12, 3, 8, 8\] on cpu, "
    with pytest.raises(UserError, match=needed + got):
        draw_views(part, IMAGES, ROWS, KEY, CPU)


def test_a_run_is_resumed_bit_for_bit(noise, noisy, finished, tmp_path):
    recipe = noisy(**AVERAGED, augmentation={"name": str(noise), "strength": 0.2})
    straight = run(recipe, tmp_path / "straight").path
    resumed, without = killed_and_resumed(recipe, tmp_path / "killed"), finished(noisy(**AVERAGED))
    assert contents(straight) == contents(resumed)
    assert (straight / "metrics.csv").read_bytes() != (without / "metrics.csv").read_bytes()


def test_an_app_for_sites_that_would_lack_its_file_is_refused(noise, tmp_path):
    recipe = parse_recipe(tiny_values(**AVERAGED, engine="flower", augmentation={"name": str(noise)}))
    with pytest.raises(UserError, match=r"names the part file .*noise\.py, which an app does not carry to the sites"):
        pytest.importorskip("fedssl.deploy.apps", reason="flwr is not installed").write_app(recipe, tmp_path / "app")
    assert not (tmp_path / "app").exists()


def test_a_preset_gives_its_options_to_random_views_alone(noise, monkeypatch):
    monkeypatch.chdir(noise.parent)
    for override, preset in (("augmentation.name=./noise.py", "digits"), ("augmentation=./noise.py", "paper:fedu2")):
        recipe = load_recipe("fedbyol", [f"preset={preset}", override])
        assert recipe.augmentation.model_dump() == {"name": str(noise), "strength": 0.1}
        assert resolve_recipe("fedbyol", [f"preset={preset}", override])[0].to_yaml() == recipe.to_yaml()
    plain = load_recipe("fedbyol", ["preset=digits"])
    for override in ("augmentation.name=random_views", "augmentation=random_views"):
        assert load_recipe("fedbyol", ["preset=digits", override]) == plain
    kept = load_recipe("fedbyol", ["preset=digits", "augmentation.flip=0.2", "augmentation.name=random_views"])
    assert (kept.augmentation.flip, kept.augmentation.blur) == (0.2, 0.0)


def test_options_without_a_name_are_those_of_random_views(tmp_path):
    for part, message in {
        "{name: blurred}": r"augmentation\.name: augmentations has no part 'blurred'; expected one of multi_crop, ",
        "{flipp: 0.5}": r"augmentation\.flipp: unknown key; did you mean flip\?",
        "null": "augmentation: expected a part such as",
    }.items():
        with pytest.raises(UserError, match=message):
            load_recipe("fedbyol", [f"augmentation={part}"])
