"""Which parts go with which: every combination trains, or is refused with one line before anything runs."""

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from fedssl.augmentations.random_views import RandomViews
from fedssl.client import LocalRound
from fedssl.data.datasets import Dataset
from fedssl.errors import UserError
from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.parts import part_class, part_names
from fedssl.recipe.reading import parse_recipe
from fedssl.regularizers.base_alignment import BaseAlignment
from fedssl.regularizers.representation_alignment import RepresentationAlignment
from tests.fedssl.conftest import TAUGHT, tiny_values
from tests.fedssl.rounds_in_memory import train_rounds

pytestmark = pytest.mark.usefixtures("teacher")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "barlow_twins": {"hidden_features": 16, "output_features": 8},
    "byol": {"hidden_features": 16, "output_features": 8},
    "byol, one direction": {"hidden_features": 16, "output_features": 8, "symmetric": False},
    "distillation": TAUGHT,
    "dino": {"hidden_features": 16, "output_features": 8, "prototypes": 12, "local_views": 3},
    "dino, two views": {"hidden_features": 16, "output_features": 8, "prototypes": 12, "local_views": 0},
    "fedx": {"output_features": 8},
    "lejepa": {"hidden_features": 16, "output_features": 8, "directions": 8},
    "moco_v3": {"hidden_features": 16, "output_features": 8},
    "orchestra": {"clusters": 8, "memory": 16, "features": 8},
    "simclr": {"hidden_features": 16, "output_features": 8},
    "simsiam": {"output_features": 8, "bottleneck_features": 4},
    "supervised": {},
    "vicreg": {"hidden_features": 16, "output_features": 8},
}
#: of regularizers, aggregators and schedules
OPTIONS: dict[str, dict[str, Any]] = {
    "base_model": {"epochs": 1},
    "dictionary": {"samples": 6},
    "distillation": TAUGHT,
    "l_dawa": {"plain_rounds": 0},
    "layer_wise": {"layers_per_stage": 2, "rounds_per_stage": 1},
    "orchestra_clusters": {"local_clusters": 4, "steps": 2},
    "progressive": {"layers_per_stage": 2, "rounds_per_stage": 1},
}
#: what a regularizer reads, and an objective's clusters
READS = {
    "base_alignment": "base_model",
    "cka_alignment": "representation_mean",
    "dictionary_contrast": "dictionary",
    "similarity_distillation": "representation_mean",
}
TWO_VIEWS = {"dictionary_contrast", "global_distillation", "relational_distillation"}
WITHOUT_PROJECTOR = TWO_VIEWS | {"representation_alignment", "sigreg", "sliced_uniformity", "uniformity"}
REFUSED: dict[str, set[str]] = {
    "barlow_twins": {"global_distillation"},  # it has no predictor, as those below
    "byol, one direction": TWO_VIEWS,
    "dino": {"global_distillation", "public_objective"},
    "dino, two views": {"global_distillation", "public_objective"},
    "distillation": TWO_VIEWS | {"public_objective"},
    "lejepa": {"global_distillation"},
    "orchestra": TWO_VIEWS | {"public_objective"},
    "simclr": {"global_distillation"},
    "supervised": WITHOUT_PROJECTOR | {"base_alignment", "public_objective"},
    "vicreg": {"global_distillation"},
}


def noise(images: int) -> torch.Tensor:
    return torch.randint(256, (images, 1, 8, 8), generator=torch.Generator().manual_seed(images), dtype=torch.uint8)


LABELS = torch.arange(8) % 2
DATASET = Dataset("noise", noise(8), LABELS, noise(8), LABELS, ("even", "odd"), noise(9))


def with_options(names: list[str]) -> list[dict[str, Any]]:
    return [{"name": name, **OPTIONS.get(name, {})} for name in names]


def federation_of(objective, regularizers, aggregators, local_update, dataset=DATASET, **changes) -> Federation:
    """One client on the noise, unless something else is given."""
    name = objective.partition(",")[0]
    values = tiny_values(
        objective={"name": name, **OBJECTIVES.get(objective, {})},
        regularizers=with_options(regularizers),
        aggregators=with_options(aggregators),
        local_update=local_update,
        architectures=["small_convnet"],
        partition={"name": "iid", "clients": 1},
    )
    return build_federation(parse_recipe(values | changes), dataset)


def losses(federation: Federation) -> list[float]:
    """The client's losses in two rounds."""
    replies = train_rounds(federation, 2).replies
    return [replies[number][0].metrics["total_loss"] for number in (1, 2)]


@pytest.mark.parametrize("objective", [*OBJECTIVES, *sorted(set(part_names("objectives")) - set(OBJECTIVES))])
def test_every_regularizer_works_with_an_objective_or_is_refused(objective):
    """Those that work train together."""
    refused = REFUSED.get(objective, set())
    clusters = ["orchestra_clusters"] if objective == "orchestra" else []
    for regularizer in refused:
        aggregators = ["weighted_mean", *([READS[regularizer]] if regularizer in READS else []), *clusters]
        with pytest.raises(UserError, match=rf"^[^\n]*({regularizer}|base_model)[^\n]*$"):
            federation_of(objective, [regularizer], aggregators, "replace")
    works = [name for name in part_names("regularizers") if name not in refused]
    aggregators = ["weighted_mean", *dict.fromkeys(READS[name] for name in works if name in READS), *clusters]
    assert all(map(math.isfinite, losses(federation_of(objective, works, aggregators, "replace"))))


@pytest.mark.parametrize("local_update", part_names("local_updates"))
def test_every_pair_of_aggregators_works_or_is_refused(local_update):
    names = part_names("aggregators")
    exchanging = {name for name in names if part_class("aggregators", name).exchanges_weights}
    for aggregators in [[], *([name] for name in names), *map(list, itertools.combinations_with_replacement(names, 2))]:
        exchanged = [name for name in aggregators if name in exchanging]
        fits = (
            len(set(aggregators)) == len(aggregators)
            and len(exchanged) == (0 if local_update == "keep_own" else 1)
            and "orchestra_clusters" not in aggregators  # goes with another objective
            and (exchanged or "base_model" not in aggregators)
        )
        with nullcontext() if fits else pytest.raises(UserError):
            federation = federation_of("byol", [], aggregators, local_update)
            if local_update == "replace":  # the others train in test_no_label_leak.py
                assert all(map(math.isfinite, losses(federation))), aggregators


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("orchestra", ["public_objective"], ["weighted_mean", "orchestra_clusters"], "replace"), "orchestra needs 3"),
        (("supervised", ["representation_alignment"], ["weighted_mean"], "replace"), "no projector: use simclr"),
        (("byol", [], ["weighted_mean", "eua"], "replace"), "weighted_mean and eua both join the weights"),
        (("byol", [], ["dictionary", "dictionary"], "keep_own"), "name dictionary twice"),
        (("orchestra", [], ["orchestra_clusters"], "keep_own"), "orchestra_clusters works with the global model"),
        (("orchestra", [], ["weighted_mean"], "replace"), "orchestra reads what orchestra_clusters sends"),
        (("byol", [], ["weighted_mean", "orchestra_clusters"], "replace"), "needs objective orchestra"),
        (("simclr", [], ["weighted_mean"], "fedu"), "fedu works on the predictor's outputs, but objective simclr"),
        (("supervised", [], ["weighted_mean", "base_model"], "replace"), "trains on labels, but base_model trains it"),
        (("byol", ["base_alignment"], ["base_model"], "keep_own"), r"add \{name: weighted_mean\}"),
        (("fedx", ["global_distillation"], [], "keep_own"), "global_distillation works with the global model"),
    ],
)
def test_what_is_refused_is_told_with_what_to_change(changes, message):
    with pytest.raises(UserError, match=message):
        federation_of(*changes)


def test_orchestras_one_online_view_is_the_one_that_others_compare_it_with():
    """The second of its three views passes the online network, so other models must look at the second too."""
    federation = federation_of("orchestra", [], ["weighted_mean", "orchestra_clusters"], "replace")
    objective = federation.method.objective
    client = federation.client(0, Message())
    model = client.model.eval()
    views = tuple(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    step = objective.step(model, views, torch.zeros(4, dtype=torch.int64))
    step.views = views
    assert torch.equal(step.online_views[0], views[1])
    weights = Message(model.online_state())
    local = LocalRound(client, weights, 1, 0, objective, RandomViews())
    local.previous = weights.tensors
    client.memory.tensors = {f"base_model.{name}": t for name, t in model.encoder.state_dict().items()}
    client.memory.numbers["representation_alignment.stage"] = 1
    assert BaseAlignment().start_round(local)(step).item() == pytest.approx(0.0, abs=1e-9)
    assert RepresentationAlignment().start_round(local)(step).item() == pytest.approx(math.log(2), rel=1e-5)
