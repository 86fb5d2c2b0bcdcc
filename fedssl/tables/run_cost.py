"""What a run will cost in operations and hours, from a few steps on images of noise."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import torch

from ..data.datasets import Dataset
from ..data.partitions import PartitionOptions
from ..evaluation.options import EvaluationOptions
from ..federation import build_federation
from ..recipe import Recipe
from ..reports.cost import RoundCost, estimate
from ..rules import public_image_users
from ..training import steps_of_round
from .training_data import TrainingData

#: so many stages of a schedule are all counted
_MOST_COUNTED_STAGES = 6
#: public images of the made-up data, where a regularizer does not name more in its batch
_FEWEST_PUBLIC_IMAGES = 8


@dataclass(frozen=True)
class RunCost:
    """What the local training of one run takes; where clients are sampled or drop out, on average over the draws.

    Attributes:
        steps: of all clients in all rounds.
        flops: as `fedssl cost` counts them; a multiply-add counts as two.
        seconds: on this machine, one client after another.
    """

    steps: float
    flops: float
    seconds: float


@dataclass
class StepCosts:
    """Counts and times steps, each kind once: rows that train alike share what was measured of the first of them."""

    _by_kind: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def of_run(self, recipe: Recipe, data: TrainingData) -> RunCost:
        """What a run of the recipe on this data will take.

        Raises:
            UserError: the recipe does not fit the data, or a step fails.
        """
        if not recipe.schedule.trains:
            return RunCost(0.0, 0.0, 0.0)
        steps_by_architecture: dict[str, int] = {}
        for client, size in enumerate(data.client_sizes(recipe)):
            name = recipe.architecture_of(client)
            steps = steps_of_round(recipe.training, size)
            steps_by_architecture[name] = steps_by_architecture.get(name, 0) + steps
        sampled = (recipe.clients_per_round or recipe.partition.clients) / recipe.partition.clients
        answering = sampled * (1 - recipe.client_dropout)
        flops = seconds = 0.0
        for name, steps in steps_by_architecture.items():
            by_round = self._of_steps(recipe, name, data)
            for number in range(recipe.rounds):
                flops_of_step, seconds_of_step = by_round[min(number, len(by_round) - 1)]
                flops += answering * steps * flops_of_step
                seconds += answering * steps * seconds_of_step
        return RunCost(recipe.rounds * answering * sum(steps_by_architecture.values()), flops, seconds)

    def _of_steps(self, recipe: Recipe, architecture: str, data: TrainingData) -> list[tuple[float, float]]:
        """Operations and seconds of a client's step by round; rounds that are left out equal the last one."""
        reduced = _with_one_client(recipe, architecture)
        key = _kind_of_step(reduced, data)
        if key not in self._by_kind:
            federation = build_federation(reduced, _made_up_data(reduced, data))
            ends = _ends_of_stages(reduced)
            # a client's first round in a stage may lack what its later ones have, such as a previous model
            counted = {number for end in ends for number in (end - 1, end)}
            costs = estimate(federation, timed_rounds=(ends[0], ends[-1]), without_products=True, only_rounds=counted)
            self._by_kind[key] = _by_round(reduced.rounds, [cost for cost in costs if cost.number in ends])
        return self._by_kind[key]


def _with_one_client(recipe: Recipe, architecture: str) -> Recipe:
    """The recipe with one client of an architecture, and as few rounds as have all kinds of steps."""
    one_epoch = {"local_epochs": 1, "local_steps": None, "learning_rate_schedule": "constant"}
    changes = {
        "name": "made up",
        "description": "",
        "seed": 0,
        "clients_per_round": None,
        "client_dropout": 0.0,
        "engine": "in-process",
        # the server's training before the first round is not counted, so it may be short
        "aggregators": [a.model_copy(update={"epochs": 1}) if a.trains else a for a in recipe.aggregators],
        "architectures": [architecture],
        "partition": PartitionOptions(name="iid", clients=1),
        "evaluation": EvaluationOptions(),
        "training": recipe.training.model_copy(update=one_epoch),
        # layers come and go in rounds; without that, all rounds but the first take the same
        "rounds": recipe.rounds if recipe.schedule.cuts else min(2, recipe.rounds),
    }
    return recipe.model_copy(update=changes)


def _kind_of_step(recipe: Recipe, data: TrainingData) -> str:
    """A key that recipes share whose steps take the same."""
    values = recipe.model_dump(mode="json", exclude={"data", "preset", "local_update", "guard", "flower"})
    if all(aggregator.exchanges_weights for aggregator in recipe.aggregators):
        del values["aggregators"]  # weights are only put into place, whoever has averaged them
    classes = data.classes if recipe.objective.needs_labels else 0
    return json.dumps([values, data.shape, classes], sort_keys=True)


def _made_up_data(recipe: Recipe, data: TrainingData) -> Dataset:
    """Images of noise: what a step takes does not depend on what they show."""
    generator = torch.Generator().manual_seed(0)

    def noise(count: int) -> torch.Tensor:
        return torch.randint(0, 256, (count, *data.shape), generator=generator, dtype=torch.uint8)

    samples = recipe.training.batch_size
    batches = [getattr(regularizer, "batch_size", 0) for regularizer in recipe.regularizers]
    public = noise(max(_FEWEST_PUBLIC_IMAGES, *batches)) if public_image_users(recipe) else None
    images, labels = noise(samples), torch.arange(samples) % data.classes
    names = tuple(map(str, range(data.classes)))
    return Dataset("made up", images, labels, images[:2], labels[:2], names, public)


def _ends_of_stages(recipe: Recipe) -> list[int]:
    """The last rounds of some stages, in order; what a step takes lies on straight lines between them.

    The first stage trains the patch embedding, too; the many stages after it, a transformer's, differ by their number
    of blocks. All are counted where they are few, as a ResNet's, which differ, or where depth dropout bends the line.
    """
    length = getattr(recipe.schedule, "rounds_per_stage", recipe.rounds) if recipe.schedule.cuts else recipe.rounds
    stages = recipe.rounds // length
    alike = stages > _MOST_COUNTED_STAGES and getattr(recipe.schedule, "kept_layers", None) is None
    chosen = {1, 2, stages} if alike else range(1, stages + 1)
    return [stage * length for stage in sorted(chosen)]


def _by_round(rounds: int, counted: list[RoundCost]) -> list[tuple[float, float]]:
    """(operations, seconds) of a step in each round, on straight lines between the stages that were counted."""
    ends = [cost.number for cost in counted]
    length = ends[0]
    stages = [end // length for end in ends]
    flops = [cost.step[0].flops for cost in counted]
    (fewest, shortest), (most, longest) = (
        (cost.step[0].flops, cost.step_seconds[0]) for cost in (counted[0], counted[-1])
    )
    by_round = []
    for number in range(1, rounds + 1):
        of_step = float(np.interp(-(-number // length), stages, flops))
        if most > fewest and longest > shortest:
            seconds = float(np.interp(of_step, [fewest, most], [shortest, longest]))  # never beyond what was timed
        else:
            seconds = longest * of_step / most
        by_round.append((of_step, seconds))
    return by_round
