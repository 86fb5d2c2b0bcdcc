"""How long a run takes on this machine, by a few timed steps, and how many rounds a given time holds."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from ..accounting import StepCost
from ..errors import UserError
from ..federation import Federation, build_federation
from ..messages import Message
from ..recipe.recipe import Recipe
from ..training import SMALLEST_RATE, steps_of_round
from .durations import format_duration
from .rounds import evaluate_after

#: for which steps are timed before a run, and where its number of rounds follows from them
SECONDS, _SECONDS_FOR_ROUNDS = 1.0, 3.0
_SHORT = 60.0  # seconds of a run of which nothing is said
#: of what is timed; the public images are more where a regularizer has a larger batch of them
_SMALLEST_BATCH, _MOST_STEPS, _PUBLIC_IMAGES = 16, 1000, 100
_TIMED = {"local_steps": _MOST_STEPS, "learning_rate": SMALLEST_RATE, "stop_at_collapse": False}
#: a central run's rounds are pauses at which its state is kept: as many as are worth looking at
_FEWEST_PAUSES, _MOST_PAUSES = 20, 100


@dataclass(frozen=True)
class Pace:
    """What the training of a run takes on this machine."""

    step: float  # seconds of a step of a client, the mean over the clients' steps
    flops: float  # of such a step
    steps: float  # of all clients in one round
    parallel: int  # how many clients train at a time
    others: float = 0.0  # seconds of a round in which the clients represent public images
    before: float = 0.0  # seconds before the first round, in which they do the same and the server may train

    def seconds(self, rounds: int) -> float:
        """Return the seconds of so many rounds, evaluations left out."""
        return self.before + rounds * (self.others + self.steps * self.step / self.parallel)


def step_cost(federation: Federation, k: int, seconds: float) -> tuple[float, float, float]:
    """Return the seconds and operations of client k's step, and the seconds of its opening round.

    They are means of steps of about so many `seconds` in all. The first step of a round is left out, as it is counted
    and takes longer. Where a whole batch takes long a smaller one is timed, and the whole one takes as much longer as
    it has more images; where no second step fits, it is at most what the first one took. Of a schedule's stages it is
    the mean of the first and the last. Public images are timed alike: what a client sends in the opening round, it
    sends again in later rounds.
    """
    rounds = (1, federation.method.rounds) if federation.method.schedule.cuts else (1,)
    costs = [_step_cost(federation, k, number, seconds / len(rounds)) for number in rounds]
    step, flops, opening = map(fmean, zip(*costs, strict=True))
    return step, flops, opening


def _step_cost(federation: Federation, k: int, number: int, seconds: float) -> tuple[float, float, float]:
    whole = federation.method.training.batch_size

    def timed(size: int, steps: int) -> tuple[float, StepCost, float]:
        small = _with_few_images(federation, size)
        server, opening = _opened(small, k)
        if small.dataset.public_images is not None and federation.dataset.public_images is not None:
            opening *= len(federation.dataset.public_images) / len(small.dataset.public_images)
        client, received = small.client(k, Message()), small.method.broadcast(server, [k], number)[k]
        began = time.perf_counter()
        _, cost = small.method.counted_round(client, received, number, most_steps=steps)
        return _since(began, federation), cost, opening

    size = min(whole, _SMALLEST_BATCH)
    timed(size, 1)  # warms up
    while (first := timed(size, 1)[0]) <= seconds / 8 and size < whole:
        size = min(whole, 4 * size)
        timed(size, 1)
    more = min(_MOST_STEPS - 1, int(seconds / first))
    taken, cost, opening = timed(size, 1 + more)
    step = max(taken - first, 0.01 * first) / more if more else first
    return step * whole / size, cost.flops * whole / size, opening


def _since(began: float, federation: Federation) -> float:
    if federation.device.type == "cuda":
        torch.cuda.synchronize(federation.device)
    return time.perf_counter() - began


def _with_few_images(federation: Federation, size: int) -> Federation:
    """Return the federation with batches of so many images, the images of some of them, and few public images."""
    method, dataset, whole = federation.method, federation.dataset, federation.method.training.batch_size
    training = method.training.model_copy(update=_TIMED | {"batch_size": size})
    terms = tuple(
        r.model_copy(update={"batch_size": max(2, r.batch_size * size // whole)}) if hasattr(r, "batch_size") else r
        for r in method.regularizers
    )
    taken = max([_PUBLIC_IMAGES, *(getattr(r, "batch_size", 0) for r in terms)])
    public = None if dataset.public_images is None else dataset.public_images[:taken]
    short = method.with_short_server_training()
    return replace(
        federation,
        dataset=replace(dataset, public_images=public),
        client_rows=[rows[: 8 * size] for rows in federation.client_rows],
        method=replace(short, training=training, regularizers=terms, public_images=public, transport="float32"),
    )


def _opened(federation: Federation, k: int) -> tuple[Message, float]:
    """Return the server's state before round 1 if client k alone opens it, and the seconds that this takes k."""
    method = federation.method
    server = method.initial_state()
    if not method.opening_round:
        return server, 0.0
    client, received = federation.client(k, Message()), method.broadcast_opening(server, [k])[k]
    began = time.perf_counter()
    reply = method.client_round(client, received, 0)
    seconds = _since(began, federation)
    return method.aggregate(server, {k: reply}, 0), seconds


def measure_pace(federation: Federation, seconds: float) -> Pace:
    """Train models that are thrown away about so long; the run's own numbers stay as they were."""
    recipe, method, threads = federation.recipe, federation.method, torch.get_num_threads()
    clients = recipe.partition.clients
    parallel = min(recipe.clients_parallel, recipe.clients_per_round or clients)
    answering = (recipe.clients_per_round or clients) / clients * (1 - recipe.client_dropout)
    owners: dict[str, list[int]] = {}
    for k in range(clients):
        owners.setdefault(recipe.architecture_of(k), []).append(k)
    steps, training, flops, sending = 0, 0.0, 0.0, 0.0  # of all clients, one after another
    torch.set_num_threads(max(1, threads // parallel))
    try:
        for owned in owners.values():
            count = sum(steps_of_round(recipe.training, len(federation.client_rows[k])) for k in owned)
            step, flops_of_step, opening = step_cost(federation, owned[0], seconds / len(owners))
            steps, training, flops = steps + count, training + count * step, flops + count * flops_of_step
            sending += len(owned) * opening
    finally:
        torch.set_num_threads(threads)
    before = sending / parallel
    if method.public_images is not None:
        passes = sum(getattr(aggregator, "epochs", 0) for aggregator in method.aggregators if aggregator.trains)
        before += passes * max(1, len(method.public_images) // recipe.training.batch_size) * training / steps
    return Pace(training / steps, flops / steps, answering * steps, parallel, answering * sending / parallel, before)


def told_duration(federation: Federation) -> str | None:
    """Return how long the training of a run takes, by steps of some three seconds; None for less than a minute."""
    recipe = federation.recipe
    if not recipe.schedule.trains:
        return None
    for seconds in (0.0, SECONDS):  # the first steps alone tell that most short runs are short
        pace = measure_pace(federation, seconds)
        in_all = pace.seconds(recipe.rounds)
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
    left = max(0.0, 60 * minutes - (time.perf_counter() - began) - evaluations - pace.before)
    held = left / (pace.seconds(1) - pace.before)
    if not recipe.local_update.keeps_optimizer:
        return recipe.model_copy(update={"rounds": max(1, int(held))})
    steps_of_pass = len(federation.client_rows[0]) // recipe.training.batch_size
    steps = max(1, int(held * pace.steps / recipe.partition.clients))
    passes_of_round = max(1, -(-steps // (steps_of_pass * _MOST_PAUSES)))
    local_steps = None
    rounds = steps // (steps_of_pass * passes_of_round)
    if rounds < _FEWEST_PAUSES:
        rounds = min(_FEWEST_PAUSES, steps)
        local_steps = steps // rounds
    training = recipe.training.model_copy(update={"local_epochs": passes_of_round, "local_steps": local_steps})
    return recipe.model_copy(update={"rounds": rounds, "training": training})
