"""How long a run takes on this machine, by a few timed steps, and how many rounds a given time holds."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ..errors import UserError
from ..federation import Federation, build_federation
from ..messages import Message
from ..recipe.recipe import Recipe
from ..training import steps_of_round
from .rounds import evaluate_after

_TIMED_SECONDS = 3.0
#: a central run's rounds are pauses at which its state is kept: as many as are worth looking at
_FEWEST_PAUSES, _MOST_PAUSES = 20, 100


@dataclass(frozen=True)
class Pace:
    """What a run takes on this machine, in seconds.

    Attributes:
        step: a step of a client, the mean over the clients' steps.
        steps: of all clients in one round.
        parallel: how many clients train at a time.
        evaluations: all measuring before and after training.
    """

    step: float
    steps: float
    parallel: int
    evaluations: float


def opened(federation: Federation) -> Message:
    """Return the server's state after the opening round, if there is one."""
    method, everyone = federation.method.with_short_server_training(), list(range(len(federation.client_rows)))
    server = method.initial_state()
    if not method.opening_round:
        return server
    sent = method.broadcast_opening(server, everyone)
    replies = {k: method.client_round(federation.client(k, Message()), sent[k], 0) for k in everyone}
    return method.aggregate(server, replies, 0)


def timed_step(federation: Federation, server: Message, k: int, number: int, seconds: float) -> tuple[float, int]:
    """Return the seconds of client k's step in a round, and its operations.

    It is the mean over the steps that `seconds` hold, all but the first one, which is counted and takes longer. Of a
    round of one step it is that step.
    """
    method, all_steps = federation.method, steps_of_round(federation.method.training, len(federation.client_rows[k]))

    def timed(most_steps: int) -> tuple[float, int]:
        client, received = federation.client(k, Message()), method.broadcast(server, [k], number)[k]
        began = time.perf_counter()
        _, cost = method.counted_round(client, received, number, most_steps)
        if federation.device.type == "cuda":
            torch.cuda.synchronize(federation.device)
        return time.perf_counter() - began, cost.flops

    timed(1)  # warms up
    first, flops = timed(1)
    step, more = first, min(8, max(1, int(seconds / first)), all_steps - 1)
    while more > 0:
        taken, flops = timed(1 + more)
        step = max(taken - first, 0.01 * taken) / more
        longer = min(int(seconds / step), all_steps - 1)
        if longer <= more:
            break
        more = longer
    return step, flops


def measure_pace(federation: Federation) -> Pace:
    """Train some seconds and evaluate once, in models that are thrown away; the run's own numbers stay as they were."""
    recipe, method = federation.recipe, federation.method
    parallel = min(recipe.clients_parallel, recipe.clients_per_round or recipe.partition.clients)
    everyone = list(range(recipe.partition.clients))
    server = opened(federation)
    steps, seconds, threads = 0, 0.0, torch.get_num_threads()
    torch.set_num_threads(max(1, threads // parallel))
    try:
        for architecture in dict.fromkeys(map(recipe.architecture_of, everyone)):
            mine = [k for k in everyone if recipe.architecture_of(k) == architecture]
            steps_of_mine = sum(steps_of_round(recipe.training, len(federation.client_rows[k])) for k in mine)
            seconds += steps_of_mine * timed_step(federation, server, mine[0], 1, _TIMED_SECONDS)[0]
            steps += steps_of_mine
        models = len(everyone) if method.personal else 1
        began = time.perf_counter()
        if len(federation.dataset.measured_images) or federation.downstream:
            evaluate_after(federation, federation.new_model(0), 0)
        evaluations = 2 * models * (time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    sampled = (recipe.clients_per_round or len(everyone)) / len(everyone) * (1 - recipe.client_dropout)
    return Pace(seconds / steps, steps * sampled, parallel, evaluations)


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
    pace = measure_pace(federation)
    left = max(0.0, 60 * minutes - (time.perf_counter() - began) - pace.evaluations)
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
