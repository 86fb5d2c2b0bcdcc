"""How long a run takes on this machine, by a few timed steps, and how many rounds a given time holds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from ..errors import UserError
from ..federation import Federation, build_federation
from ..messages import Message
from ..recipe.recipe import Recipe
from ..training import SMALLEST_RATE, steps_of_round
from .rounds import evaluate_after
from .time_left import format_duration

#: for which steps are timed before a run, and where its number of rounds follows from them
SECONDS, _SECONDS_FOR_ROUNDS = 1.0, 3.0
_SHORT = 60.0  # seconds of a run of which nothing is said
#: of what is timed; the public images are more where a regularizer has a larger batch of them
_SMALLEST_BATCH, _MOST_STEPS, FEWEST_PUBLIC_IMAGES = 16, 1000, 8
_TIMED = {"local_steps": _MOST_STEPS, "learning_rate": SMALLEST_RATE, "stop_at_collapse": False}
#: a central run's rounds are pauses at which its state is kept: as many as are worth looking at
_FEWEST_PAUSES, _MOST_PAUSES = 20, 100


@dataclass(frozen=True)
class Pace:
    """What the training of a run takes on this machine."""

    step: float  # seconds of a step of a client, the mean over the clients' steps
    steps: float  # of all clients in one round
    parallel: int  # how many clients train at a time


def steps_by_architecture(recipe: Recipe, client_rows: Sequence[Tensor]) -> dict[str, float]:
    """Return the steps of a round, on average over the draws of clients that are sampled or drop out."""
    clients, steps = recipe.partition.clients, Counter[str]()
    for k, rows in enumerate(client_rows):
        steps[recipe.architecture_of(k)] += steps_of_round(recipe.training, len(rows))
    answering = (recipe.clients_per_round or clients) / clients * (1 - recipe.client_dropout)
    return {architecture: answering * count for architecture, count in steps.items()}


def step_seconds(federation: Federation, k: int, seconds: float) -> float:
    """Return the seconds of client k's step, the mean of steps that take about so many `seconds` in all.

    The first step of a round is left out, as it is counted and takes longer. Where a whole batch takes long a smaller
    one is timed, and the whole one takes as much longer as it has more images; where no second step fits, it is at most
    what the first one took. Of a schedule's stages it is the mean of the first and the last.
    """
    rounds = (1, federation.method.rounds) if federation.method.schedule.cuts else (1,)
    return fmean(_step_seconds(federation, k, number, seconds / len(rounds)) for number in rounds)


def _step_seconds(federation: Federation, k: int, number: int, seconds: float) -> float:
    whole = federation.method.training.batch_size
    size = min(whole, _SMALLEST_BATCH)
    while True:
        small = _with_few_images(federation, size)
        server = _opened(small, k)
        _timed(small, server, k, number, 1)  # warms up
        first = _timed(small, server, k, number, 1)
        if size == whole or first > seconds / 8:
            break
        size = min(whole, 4 * size)
    more = min(_MOST_STEPS - 1, int(seconds / first))
    step = max(_timed(small, server, k, number, 1 + more) - first, 0.01 * first) / more if more else first
    return step * whole / size


def _with_few_images(federation: Federation, size: int) -> Federation:
    """Return the federation with batches of so many images, and the images that some of them take."""
    method, dataset, whole = federation.method, federation.dataset, federation.method.training.batch_size
    training = method.training.model_copy(update=_TIMED | {"batch_size": size})
    terms = tuple(
        r.model_copy(update={"batch_size": max(2, r.batch_size * size // whole)}) if hasattr(r, "batch_size") else r
        for r in method.regularizers
    )
    taken = max(FEWEST_PUBLIC_IMAGES, *(getattr(r, "batch_size", 0) for r in terms), 0)
    public = None if dataset.public_images is None else dataset.public_images[:taken]
    return replace(
        federation,
        dataset=replace(dataset, public_images=public),
        client_rows=[rows[: 8 * size] for rows in federation.client_rows],
        method=replace(method, training=training, regularizers=terms, public_images=public),
    )


def _opened(federation: Federation, k: int) -> Message:
    """Return the server's state after the opening round, if there is one, of client k alone."""
    method = federation.method.with_short_server_training()
    server = method.initial_state()
    if not method.opening_round:
        return server
    received = method.broadcast_opening(server, [k])[k]
    return method.aggregate(server, {k: method.client_round(federation.client(k, Message()), received, 0)}, 0)


def _timed(federation: Federation, server: Message, k: int, number: int, steps: int) -> float:
    """Return the seconds of client k's first steps in a round."""
    client, received = federation.client(k, Message()), federation.method.broadcast(server, [k], number)[k]
    began = time.perf_counter()
    federation.method.counted_round(client, received, number, most_steps=steps)
    if federation.device.type == "cuda":
        torch.cuda.synchronize(federation.device)
    return time.perf_counter() - began


def measure_pace(federation: Federation, seconds: float) -> Pace:
    """Train models that are thrown away about so long; the run's own numbers stay as they were."""
    recipe, threads = federation.recipe, torch.get_num_threads()
    parallel = min(recipe.clients_parallel, recipe.clients_per_round or recipe.partition.clients)
    steps = steps_by_architecture(recipe, federation.client_rows)
    first = {recipe.architecture_of(k): k for k in reversed(range(recipe.partition.clients))}
    torch.set_num_threads(max(1, threads // parallel))
    try:
        taken = {name: step_seconds(federation, first[name], seconds / len(steps)) for name in steps}
    finally:
        torch.set_num_threads(threads)
    in_all = sum(steps.values())
    return Pace(sum(steps[name] * taken[name] for name in steps) / in_all, in_all, parallel)


def told_duration(federation: Federation) -> str | None:
    """Return how long the training of a run takes, by steps of some three seconds; None for less than a minute."""
    recipe = federation.recipe
    if not recipe.schedule.trains:
        return None
    for seconds in (0.0, SECONDS):  # the first steps alone tell that most short runs are short
        pace = measure_pace(federation, seconds)
        in_all = recipe.rounds * pace.steps * pace.step / pace.parallel
        if in_all < _SHORT:
            return None
    return f"training takes about {format_duration(in_all)} on this machine, by timed steps; evaluations come on top"


def _evaluation_seconds(federation: Federation) -> float:
    """Evaluate once; return the seconds of all measuring before and after training."""
    began = time.perf_counter()
    if len(federation.dataset.measured_images) or federation.downstream:
        evaluate_after(federation, federation.new_model(0), 0)
    return 2 * (len(federation.client_rows) if federation.method.personal else 1) * (time.perf_counter() - began)


def recipe_within(recipe: Recipe, minutes: float, began: float) -> Recipe:
    """Return a recipe whose run ends about `minutes` after `began`, a time of `time.perf_counter`.

    The number of rounds follows from timed steps. A central run (`local_update.keep_optimizer`) also gets rounds of
    another length, which changes nothing that it trains; else a round is what the recipe says.

    Raises:
        UserError: the schedule's stages take different times, so the rounds cannot be told.
    """
    if recipe.schedule.cuts or not recipe.schedule.trains:
        raise UserError(
            f"--minutes does not go with schedule {recipe.schedule.name}, whose rounds take different times or train "
            "nothing: give rounds and schedule.rounds_per_stage"
        )
    federation = build_federation(recipe)
    pace, evaluations = measure_pace(federation, _SECONDS_FOR_ROUNDS), _evaluation_seconds(federation)
    left = max(0.0, 60 * minutes - (time.perf_counter() - began) - evaluations)
    steps = max(1, int(left * pace.parallel / pace.step))
    if not recipe.local_update.keeps_optimizer:
        return recipe.model_copy(update={"rounds": max(1, int(steps / pace.steps))})
    steps_of_pass = len(federation.client_rows[0]) // recipe.training.batch_size
    steps = max(1, steps // recipe.partition.clients)
    passes_of_round = max(1, -(-steps // (steps_of_pass * _MOST_PAUSES)))
    local_steps = None
    rounds = steps // (steps_of_pass * passes_of_round)
    if rounds < _FEWEST_PAUSES:
        rounds = min(_FEWEST_PAUSES, steps)
        local_steps = steps // rounds
    training = recipe.training.model_copy(update={"local_epochs": passes_of_round, "local_steps": local_steps})
    return recipe.model_copy(update={"rounds": rounds, "training": training})
