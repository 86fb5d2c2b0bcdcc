"""How long a run takes on this machine, by a few timed steps, and how many rounds a given time holds."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from ..accounting import StepCost
from ..aggregators.base import PUBLIC_IMAGES
from ..client import Client
from ..errors import UserError
from ..federation import Federation, build_federation
from ..messages import Message
from ..recipe.recipe import Recipe
from ..training import SMALLEST_RATE, steps_of_round
from .progress import format_duration
from .rounds import evaluate_after

#: for which steps are timed before a run, and where its number of rounds follows from them
SECONDS, _SECONDS_FOR_ROUNDS = 1.0, 3.0
_SHORT = 60.0  # seconds of a run of which nothing is said
#: of what is timed; in a step the public images are more where a regularizer has a larger batch of them
_SMALLEST_BATCH, _MOST_STEPS, _FEWEST_PUBLIC_IMAGES = 16, 1000, 8
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
    others: float = 0.0  # seconds of a round in which public images are represented and the server aggregates
    before: float = 0.0  # seconds before the first round, in which the same is done and the server may train

    def seconds(self, rounds: int) -> float:
        """Return the seconds of so many rounds, evaluations left out."""
        return self.before + rounds * (self.others + self.steps * self.step / self.parallel)


def step_cost(federation: Federation, k: int, seconds: float) -> tuple[float, float]:
    """Return the seconds and operations of client k's step, the mean of steps of about so many `seconds` in all.

    The first step of a round is left out, as it is counted and takes longer. Where a whole batch takes long a smaller
    one is timed, and the whole one takes as much longer as it has more images; where no second step fits, it is at most
    what the first one took. Of a schedule's stages it is the mean of the first and the last.
    """
    rounds = (1, federation.method.rounds) if federation.method.schedule.cuts else (1,)
    costs = [_step_cost(federation, k, number, seconds / len(rounds)) for number in rounds]
    return fmean(step for step, _ in costs), fmean(flops for _, flops in costs)


def _step_cost(federation: Federation, k: int, number: int, seconds: float) -> tuple[float, float]:
    whole = federation.method.training.batch_size

    def timed(size: int, steps: int) -> tuple[float, StepCost]:
        small = _with_few_images(federation, size)
        server, replies = _opening(small, [k])
        opened = small.method.aggregate(server, replies, 0) if replies else server
        client, received = small.client(k, Message()), small.method.broadcast(opened, [k], number)[k]
        began = time.perf_counter()
        _, cost = small.method.counted_round(client, received, number, most_steps=steps)
        return _since(began, federation), cost

    def first_step(size: int) -> float:
        timed(size, 1)  # warms up
        return timed(size, 1)[0]

    size, first = _largest(first_step, _SMALLEST_BATCH, whole, seconds)
    more = min(_MOST_STEPS - 1, int(seconds / first))
    taken, cost = timed(size, 1 + more)
    step = max(taken - first, 0.01 * first) / more if more else first
    return step * whole / size, cost.flops * whole / size


def _largest(timed: Callable[[int], float], least: int, whole: int, seconds: float) -> tuple[int, float]:
    """Return a size and its seconds: from `least` on the first that takes an eighth of `seconds`, or the whole."""
    size = min(whole, least)
    while (taken := timed(size)) <= seconds / 8 and size < whole:
        size = min(whole, 4 * size)
    return size, taken


def _since(began: float, federation: Federation) -> float:
    if federation.device.type == "cuda":
        torch.cuda.synchronize(federation.device)
    return time.perf_counter() - began


def _with_few_images(federation: Federation, size: int, public_images: int = 0) -> Federation:
    """Return the federation with batches of so many images, the images of some of them, and so many public images.

    By default there are as many public images as a step takes.
    """
    method, dataset, whole = federation.method, federation.dataset, federation.method.training.batch_size
    training = method.training.model_copy(update=_TIMED | {"batch_size": size})
    terms = tuple(
        r.model_copy(update={"batch_size": max(2, r.batch_size * size // whole)}) if hasattr(r, "batch_size") else r
        for r in method.regularizers
    )
    taken = public_images or max(_FEWEST_PUBLIC_IMAGES, 0, *(getattr(r, "batch_size", 0) for r in terms))
    public = None if dataset.public_images is None else dataset.public_images[:taken]
    short = method.with_short_server_training()
    return replace(
        federation,
        dataset=replace(dataset, public_images=public),
        client_rows=[rows[: 8 * size] for rows in federation.client_rows],
        method=replace(short, training=training, regularizers=terms, public_images=public, transport="float32"),
    )


def _opening(federation: Federation, clients: list[int]) -> tuple[Message, dict[int, Message]]:
    """Return the server's first state, and the clients' answers in the opening round, if there is one.

    One model of each architecture answers for all its clients.
    """
    method, first, replies = federation.method, dict[str, Client](), dict[int, Message]()
    server = method.initial_state()
    sent = method.broadcast_opening(server, clients) if method.opening_round else {}
    for k, message in sent.items():
        name = federation.recipe.architecture_of(k)
        first[name] = replace(first[name], index=k) if name in first else federation.client(k, Message())
        replies[k] = method.client_round(first[name], message, 0)
    return server, replies


def _opening_seconds(federation: Federation, k: int, seconds: float) -> float:
    """Return the seconds of client k's opening round, by as many public images as that time holds.

    What it sends in it, it sends again in later rounds.
    """
    public = federation.dataset.public_images
    whole = _FEWEST_PUBLIC_IMAGES if public is None else len(public)

    def timed(count: int) -> float:
        small = _with_few_images(federation, _SMALLEST_BATCH, count)
        client, method = small.client(k, Message()), small.method
        received = method.broadcast_opening(method.initial_state(), [k])[k]
        began = time.perf_counter()
        method.client_round(client, received, 0)
        return _since(began, federation)

    count, taken = _largest(timed, _FEWEST_PUBLIC_IMAGES, whole, seconds)
    return taken * whole / count


def _server_seconds(federation: Federation) -> float:
    """Return the seconds in which the server joins the clients' answers and makes messages of them.

    The answers are those on few public images, with random numbers in place of what all of them would give.
    """
    everyone = list(range(len(federation.client_rows)))
    server, replies = _opening(_with_few_images(federation, _SMALLEST_BATCH), everyone)
    method, generator = replace(federation.method, transport="float32"), torch.Generator().manual_seed(0)
    for k, reply in replies.items():
        for aggregator in method.aggregators:
            for name, shape in (aggregator.expected(server, k, []) or {}).items():
                if shape[0] == PUBLIC_IMAGES:
                    sizes = method.sizes[PUBLIC_IMAGES], *reply.tensors[name].shape[1:]
                    reply.tensors[name] = torch.randn(sizes, generator=generator)
    began = time.perf_counter()
    method.broadcast(method.aggregate(server, replies, 0), everyone, 1)
    return time.perf_counter() - began


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
            step, flops_of_step = step_cost(federation, owned[0], seconds / len(owners))
            steps, training, flops = steps + count, training + count * step, flops + count * flops_of_step
            if method.opening_round:
                sending += len(owned) * _opening_seconds(federation, owned[0], seconds / len(owners))
    finally:
        torch.set_num_threads(threads)
    server = _server_seconds(federation) if method.opening_round else 0.0
    before = server + sending / parallel
    if method.public_images is not None:
        passes = sum(getattr(aggregator, "epochs", 0) for aggregator in method.aggregators if aggregator.trains)
        before += passes * max(1, len(method.public_images) // recipe.training.batch_size) * training / steps
    others = server + answering * sending / parallel
    return Pace(training / steps, flops / steps, answering * steps, parallel, others, before)


def told_duration(federation: Federation) -> str | None:
    """Return how long the training of a run takes, by steps of about a second; None for less than a minute."""
    recipe = federation.recipe
    if not recipe.schedule.trains:
        return None
    for seconds in (0.0, SECONDS):  # the first steps alone tell that most short runs are short
        in_all = measure_pace(federation, seconds).seconds(recipe.rounds)
        if in_all < _SHORT:
            return None
    return f"training takes about {format_duration(in_all)} on this machine, by timed steps; evaluations come on top"


def _evaluation_seconds(federation: Federation) -> tuple[float, float]:
    """Return the seconds of all measuring before and after training, and of an evaluation between rounds.

    Fine-tuning is timed by one epoch.
    """
    recipe, options = federation.recipe, federation.recipe.evaluation
    if not len(federation.dataset.measured_images) and not federation.downstream:
        return 0.0, 0.0

    def seconds(number: int, **changes: object) -> float:
        evaluation = options.model_copy(update={"semi_supervised": [], "fine_tune": None} | changes)
        changed = replace(federation, recipe=recipe.model_copy(update={"evaluation": evaluation}))
        began = time.perf_counter()
        evaluate_after(changed, federation.new_model(0), number)
        return _since(began, federation)

    models, once = len(federation.client_rows) if federation.method.personal else 1, seconds(0)
    ends = 2 * once
    for key, asked in (("semi_supervised_protocol", "semi_supervised"), ("fine_tune", "fine_tune")):
        if getattr(options, asked):
            protocol, changes = getattr(options, key), {asked: getattr(options, asked)}
            changes[key] = protocol.model_copy(update={"epochs": 1, "warmup_epochs": 0})
            ends += protocol.tuning().epochs * max(0.0, seconds(recipe.rounds, **changes) - once)
    return models * ends, models * seconds(-1) if options.every else 0.0


def require_equal_rounds(recipe: Recipe) -> None:
    """Raise a UserError where rounds take different times, as a schedule's stages do, so that none can be foretold."""
    if recipe.schedule.cuts or not recipe.schedule.trains:
        instead = "give rounds and schedule.rounds_per_stage" if recipe.schedule.trains else "leave it out"
        raise UserError(
            f"--minutes does not go with schedule {recipe.schedule.name}, whose rounds take different times or train "
            f"nothing: {instead}"
        )


def within(federation: Federation, minutes: float, began: float) -> Federation:
    """Return the federation for a run that ends about `minutes` after `began`, a time of `time.perf_counter`.

    The number of rounds follows from timed steps and evaluations. A central run (`local_update.keep_optimizer`) also
    gets rounds of another length, and evaluations between rounds are counted as if their length stayed as it is; else a
    round is what the recipe says. Shorter than a pass, each draws its images anew.
    """
    recipe = federation.recipe
    pace, (ends, between) = measure_pace(federation, _SECONDS_FOR_ROUNDS), _evaluation_seconds(federation)
    left = max(0.0, 60 * minutes - (time.perf_counter() - began) - ends - pace.before)
    held = left / (pace.seconds(1) - pace.before + between / max(1, recipe.evaluation.every))
    if not recipe.local_update.keeps_optimizer:
        return build_federation(recipe.model_copy(update={"rounds": max(1, int(held))}), federation.dataset)
    steps_of_pass = len(federation.client_rows[0]) // recipe.training.batch_size
    steps = max(1, int(held * pace.steps / recipe.partition.clients))
    passes_of_round = max(1, -(-steps // (steps_of_pass * _MOST_PAUSES)))
    local_steps = None
    rounds = steps // (steps_of_pass * passes_of_round)
    if rounds < _FEWEST_PAUSES:
        # so many that few steps are left over; a step has none before it with which collapse could be told
        most = max(1, min(_FEWEST_PAUSES, steps // 2))
        rounds = max(range(-(-most // 2), most + 1), key=lambda count: (steps // count * count, count))
        local_steps = steps // rounds
    training = recipe.training.model_copy(update={"local_epochs": passes_of_round, "local_steps": local_steps})
    return build_federation(recipe.model_copy(update={"rounds": rounds, "training": training}), federation.dataset)
