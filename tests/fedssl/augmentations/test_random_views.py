"""random_views: fedkernels.two_views with a recipe's options, by keys of the client, the round and the purpose."""

import dataclasses
import itertools
import types
from unittest.mock import Mock

import pytest
import torch

from fedkernels import ViewKey, ViewOptions, two_views
from fedssl.aggregators.orchestra_clusters import fill_memory
from fedssl.augmentations.base import draw_views
from fedssl.augmentations.random_views import RandomViews
from fedssl.client import LocalRound
from fedssl.data.datasets import Dataset
from fedssl.evaluation import evaluate, fine_tuning
from fedssl.evaluation.evaluate import EvaluationOptions
from fedssl.evaluation.fine_tuning import FineTuning, fine_tuned_network
from fedssl.models.model import Model
from fedssl.regularizers.public_objective import PublicObjective
from tests.fedssl.evaluation.conftest import bright_quarters, tiny_encoder
from tests.fedssl.small_models import local_round, scalar_model

KEY, CPU = ViewKey(7, client=1, round=2, epoch=3), torch.device("cpu")
IMAGES = torch.randint(0, 256, (12, 3, 17, 13), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
ROWS = torch.arange(12)
#: six images that are all alike, so two equal views would have been drawn alike
ALIKE = torch.randint(0, 256, (1, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
ALIKE = ALIKE.expand(6, -1, -1, -1).contiguous()


def distinct(*views: torch.Tensor) -> bool:
    flat = torch.cat(views).flatten(1)
    return len(flat.unique(dim=0)) == len(flat)


def client_of_alike_images() -> LocalRound:
    local = local_round(scalar_model(), images=ALIKE)
    local.augmentation = RandomViews(jitter_probability=1.0, brightness=0.9)  # no view is left as it is
    return local


def test_the_options_are_those_of_fedkernels():
    assert RandomViews().model_dump(exclude={"name"}) == dataclasses.asdict(ViewOptions())
    options = {"crop_scale": (0.3, 0.6), "solarize": 0.5, "hue": 0.0, "blur_sigma": (0.5, 3)}
    views = RandomViews(**options).views(IMAGES, ROWS, KEY)
    assert all(map(torch.equal, views, two_views(IMAGES, ROWS, KEY, ViewOptions(**options))))


@pytest.mark.parametrize("count", [0, 1, 4])
def test_any_number_of_views_begins_with_the_same_two(count):
    views = draw_views(RandomViews(), IMAGES, ROWS, KEY, CPU, count)
    assert len(views) == count
    assert all(map(torch.equal, views, two_views(IMAGES, ROWS, KEY)))
    assert count == 0 or distinct(*views)


def test_every_seed_client_round_purpose_and_epoch_has_its_own_views():
    before = torch.get_rng_state()
    local, views = client_of_alike_images(), []
    for seed, client, number in itertools.product((0, 1, 2**70), (-1, 0, 1), (0, 1, 2)):
        local.seed, local.client.index, local.number = seed, client, number
        for purpose, epoch in itertools.product(("training", "public_objective", "memory"), (0, 1)):
            views += local.views(ALIKE[:1], ROWS[:1], purpose, epoch)
    assert len(views) == 3 * 3 * 3 * 3 * 2 * 2
    assert distinct(*views)
    assert torch.equal(torch.get_rng_state(), before)


# Parts that draw views beside the training step: each purpose and pass over the images has its own


def test_the_public_objective_draws_other_views_in_every_pass_and_not_those_of_the_step():
    local = client_of_alike_images()
    local.client.public_images = ALIKE
    seen: list[torch.Tensor] = []

    def step(model, views, labels):
        seen.extend(views)
        return types.SimpleNamespace(loss=torch.zeros(()))

    local.objective = types.SimpleNamespace(step=step)
    term = PublicObjective(batch_size=4).start_round(local)
    for _ in range(5):
        term(None)
    assert [len(views) for views in seen] == [4] * 10
    assert distinct(*seen, *local.views(ALIKE, torch.arange(6), "training"))


def test_orchestras_memory_has_several_views_of_each_of_few_images(monkeypatch):
    """A memory of 15 places and 6 images: the third time round there are 3 left."""
    seen: list[torch.Tensor] = []
    local = client_of_alike_images()
    model = types.SimpleNamespace(memory=torch.zeros(15, 2), remember=lambda projections: None, train=lambda: model)
    model.target_of_views = lambda views: seen.extend(views) or (torch.ones(len(views[0]), 2),)
    monkeypatch.setattr("fedssl.aggregators.orchestra_clusters.copy.deepcopy", lambda _: model)
    fill_memory(local, model)
    assert len(seen[0]) == 15
    assert distinct(*seen)


def test_alignment_does_not_depend_on_how_many_views_are_made_at_a_time(monkeypatch):
    images, labels = bright_quarters(30)
    dataset = Dataset("unlabelled", images, labels, images, labels, (), None)
    measured = []
    for at_a_time in (7, 30):
        monkeypatch.setattr(evaluate, "_VIEWS_AT_A_TIME", at_a_time)
        torch.manual_seed(0)
        model = Model({"encoder": tiny_encoder()})
        measured.append(evaluate.evaluate_model(model, dataset, EvaluationOptions(), 3, linear=False)[0]["alignment"])
    assert measured[0] == pytest.approx(measured[1], rel=1e-6)
    assert measured[0] > 0


def test_fine_tuning_draws_other_crops_in_every_epoch(monkeypatch):
    images, labels = bright_quarters(20)
    draw = Mock(wraps=fine_tuning.draw_views)
    monkeypatch.setattr(fine_tuning, "draw_views", draw)
    tuning = FineTuning(3, 8, "sgd", 0.01, augmentation="crop_and_flip")
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        fine_tuned_network(tiny_encoder(), images, labels, 4, tuning, seed, generator)
    drawn = [(call.args[3], call.args[2].tolist()) for call in draw.call_args_list]
    assert [key.epoch for key, _ in drawn] == [0, 0, 0, 1, 1, 1, 2, 2, 2] * 2
    assert sorted(drawn[0][1] + drawn[1][1] + drawn[2][1]) == list(range(20))
    assert drawn[0][0].seed != drawn[9][0].seed
