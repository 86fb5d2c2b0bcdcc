"""One client's local training."""

import copy
import functools
import itertools
import math
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode

from .accounting import StepCost, StepCounter, structure
from .client import LocalRound
from .data.batches import Prefetch, batches_of_epoch, device_batches, round_batches
from .errors import UserError
from .evaluation.metrics import effective_rank, view_retrieval
from .messages import Message
from .models.model import Model, untouched_running_statistics
from .models.precision import Precision, networks_compute_in, with_channels_last
from .objectives.base import Step
from .options import Options
from .randomness import generators_set_to
from .regularizers.base import Regularizer

#: in a client's memory: an optimiser's momentum and moments, as optimizer/PARAMETER/ENTRY
_OPTIMIZER = "optimizer/"
#: by which float16's first loss of a round is multiplied; torch's own 2^16 is too large: first steps would be left out
_FIRST_LOSS_SCALE = 2.0**10
_HIGHEST_RANK, _MOST_FOUND = "highest rank", "most views found"  # in a client's memory
#: of the most: a batch of few kinds of images needs few directions, and finds more than at first; collapsed ones, half
_FOUND_STILL = 0.75
#: share of a run over which `warmup_cosine` rises
_WARMUP = 0.05
#: the costs of the kinds of steps that this process has counted, and how many it remembers
STEP_COSTS: dict[Hashable, StepCost] = {}
_MOST_STEP_COSTS = 1000
#: of a step that is run to be counted or timed: it changes the weights too little for a loss to diverge
SMALLEST_RATE = 1e-9


class TrainingOptions(Options):
    """Defaults are Hetero-SSFL's (section 5.1), the weight decay FedU's.

    With `local_steps` a client with fewer images goes through them more often, and one with more stops early, in a new
    random order in each round. So clients of unequal size move about equally far, which EUA's weights read.
    FedU2's released code is near to it: a client takes as many whole epochs, at most 10, as fit into the steps that
    `local_epochs` takes on the largest client.
    """

    local_epochs: int = Field(
        5, ge=1, description="passes over a client's images in each round; not used where local_steps is given"
    )
    local_steps: int | None = Field(
        None,
        ge=1,
        description="optimiser steps in each round, the same for all clients whatever their number of images (default: "
        "those of local_epochs)",
    )
    batch_size: int = Field(200, ge=2, description="images a step; an epoch's incomplete last batch is left out")
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="a new one starts in every round, unless the local update keeps it (keep_own)"
    )
    learning_rate: float = Field(0.032, gt=0, description="of the first round")
    learning_rate_schedule: Literal["constant", "cosine", "warmup_cosine"] = Field(
        "constant",
        description="how the learning rate changes: cosine falls from round to round, and ends near 0; warmup_cosine "
        "rises over the first twentieth of the run and then falls to 0, from step to step",
    )
    encoder_rate: float = Field(
        1.0,
        gt=0,
        le=1,
        description="the encoder's learning rate as a share of the heads', for good starting weights; below "
        "1 it also stays as it is while warmup_cosine rises, in which the new heads learn to fit it",
    )
    stop_at_collapse: bool = Field(
        False,
        description="whether a run ends when the effective rank of a batch has fallen below a quarter of the highest "
        "that one had at the beginning of a round, and its views find one another at most three quarters as often, in "
        "most clients",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd; adam and adamw ignore it")
    weight_decay: float = Field(
        5e-4, ge=0, description="of all weights: an L2 term for sgd and adam, decoupled for adamw"
    )
    precision: Precision = Field(
        "float32",
        description="in which type networks compute while they train; weights, gradients, losses and evaluation stay "
        "float32. float16 needs CUDA. On CUDA the contrastive losses of simclr, moco_v3, fedx and global_distillation "
        "take rows that are rounded to it, and sum in float32",
    )
    deterministic: bool = Field(
        False,
        description="whether a run on a GPU, its evaluation included, takes operations alone that always round alike: "
        "two runs on one model of GPU are then bit-identical, and an operation that cannot do so is an error. Runs on "
        "the CPU are bit-identical without it",
    )


def learning_rate(options: TrainingOptions, round_number: int, rounds: int, done: float = 0.0) -> float:
    """Return the rate in a round, from 1 to `rounds`, of which a share `done` is over; cosines reach 0 at the end."""
    if options.learning_rate_schedule == "constant":
        return options.learning_rate
    if options.learning_rate_schedule == "cosine":
        return options.learning_rate * 0.5 * (1.0 + math.cos(math.pi * (round_number - 1) / rounds))
    passed = (round_number - 1 + done) / rounds
    if passed < _WARMUP:
        return options.learning_rate * passed / _WARMUP
    return options.learning_rate * 0.5 * (1.0 + math.cos(math.pi * (passed - _WARMUP) / (1.0 - _WARMUP)))


def steps_of_round(options: TrainingOptions, images: int) -> int:
    """Return a client's optimiser steps in one round; 0 if its images do not fill a batch."""
    batches = images // options.batch_size
    if options.local_steps is not None:
        return options.local_steps if batches else 0
    return options.local_epochs * batches


def train_before_rounds(local: LocalRound, options: TrainingOptions, epochs: int) -> None:
    """Train without regularizers and at a constant rate; a batch is at most all of the client's images."""
    size = min(options.batch_size, len(local.client.images))
    changed = {"local_epochs": epochs, "local_steps": None, "batch_size": size, "learning_rate_schedule": "constant"}
    train_locally(local, options.model_copy(update=changed), [], rounds=1)


def train_locally(
    local: LocalRound,
    options: TrainingOptions,
    regularizers: Sequence[Regularizer],
    rounds: int,
    most_steps: int | None = None,
    keep_optimizer: bool = False,
) -> StepCost:
    """Train the client's model for one round; the metrics of the round are logged in `local`.

    The optimiser is new in every round, as its state describes weights that the server may have replaced, unless
    `keep_optimizer` says that it continues with the state that it left in the client's memory. Training stops after
    `most_steps`, for timing them; with 0 a step is counted and, where that is possible, not run (`_count_step`).
    Returns what the first step took.

    The first step is counted (accounting.py): `memory` in bytes, `flops` of the whole round; on CUDA also
    `cuda_memory`, the allocator's own peak in bytes. A process counts each kind of step once (`_kind_of_step`).

    With `training.precision` float16 the loss is scaled, and a step whose gradients overflow is left out
    (Micikevicius et al. 2018, Mixed precision training, section 3.2). For this the host waits once a step.

    Raises:
        UserError: the loss is not finite. It is looked at once an epoch, as each look waits for the device; the
            message names the first step at which it was not, and the terms of the last one.
    """
    client, objective = local.client, local.objective
    model, device = client.model, client.model.device
    if most_steps == 0:
        if device.type == "cpu":  # on a GPU nobody has compared the memory yet
            with suppress(Exception):  # a part that reads numbers cannot do without; any other error comes again below
                return _count_step(local, options, regularizers, rounds, keep_optimizer)
        options, most_steps = options.model_copy(update={"learning_rate": SMALLEST_RATE}), 1
    without_numbers = isinstance(next(model.parameters()), FakeTensor)
    if device.type == "cpu":
        keep_freed_memory()
    step_kind = _kind_of_step(local, options, regularizers)
    cost = None if without_numbers else STEP_COSTS.get(step_kind)
    optimizer = _new_optimizer(model, options)
    if keep_optimizer:
        _continue_optimizer(optimizer, model, client.memory)
    _set_rates(optimizer, options, local.number, rounds)
    scaler = torch.amp.GradScaler(device.type, init_scale=_FIRST_LOSS_SCALE, enabled=options.precision == "float16")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    images, size = len(client.images), options.batch_size
    batches = round_batches(images, size, options.local_epochs, options.local_steps, local.generator("order"))
    batches = itertools.islice(batches, most_steps)
    steps, steps_of_epoch, steps_in_round = 0, batches_of_epoch(images, size), steps_of_round(options, images)
    last_step = min(steps_in_round, most_steps or sys.maxsize)
    unchecked: list[Tensor] = []  # losses since the last check
    parts: dict[str, Tensor] = {}  # of the last step's loss

    def require_finite() -> None:
        if not without_numbers:
            _require_finite(unchecked, steps, local, parts)

    with networks_compute_in(model, options.precision), model.views_at_a_time() as threads:
        terms = [regularizer.start_round(local) for regularizer in regularizers]
        batches_in_views = Prefetch(_views(local, device_batches(client.images, batches, device), steps_of_epoch))
        for rows, views in batches_in_views:
            counter = None if cost else StepCounter(model, threads.statistics() if threads else ())
            if threads is not None:
                threads.at_a_time = counter is None
            try:
                # a weight's cast to training.precision is used again until the outermost autocast ends
                with torch.autocast(device.type, enabled=False), counter.forward() if counter else nullcontext():
                    step = objective.step(model, views, client.labels[rows].to(device, non_blocking=True))
                    step.views = views
                    loss, parts = step.loss, {f"objective {objective.name}": step.loss.detach()}
                    for i, (regularizer, term) in enumerate(zip(regularizers, terms, strict=True)):
                        added = term(step)
                        loss = loss + added
                        parts[f"regularizer {i} {regularizer.name}"] = added.detach()
            except Exception:
                require_finite()  # what failed may have failed on a diverged model
                raise
            scaler.scale(loss).backward()
            if threads is not None and not local.augmentation.uses_global_generators:
                batches_in_views.start(threads.idle_thread)
            if steps + 1 == last_step:
                _log_gradient_norm(local, scaler)
            if options.learning_rate_schedule == "warmup_cosine":  # the middle of a step: no step has the rate 0
                _set_rates(optimizer, options, local.number, rounds, (steps + 0.5) / steps_in_round)
            scaler.step(optimizer)
            scaler.update()
            if counter:
                cost = counter.finish(optimizer)
                if len(STEP_COSTS) >= _MOST_STEP_COSTS:
                    STEP_COSTS.clear()
                if not without_numbers:
                    STEP_COSTS[step_kind] = cost
            optimizer.zero_grad(set_to_none=True)
            objective.after_step(model)
            steps += 1
            local.log("loss", step.loss.detach())
            unchecked.append(loss.detach())
            local.log("total_loss", unchecked[-1])
            if options.stop_at_collapse and steps in (1, last_step):
                require_finite()  # before its rank, which could name neither the client nor the step
                _log_rank_kept(step, local, begins=steps == 1, ends=steps == last_step)
            if len(unchecked) == steps_of_epoch:
                require_finite()
                unchecked.clear()
    require_finite()
    if cost is None or not steps:
        raise UserError(f"client {client.index} has {images} images, fewer than training.batch_size {size}")
    if keep_optimizer:
        _keep_optimizer(optimizer, model, client.memory)
    local.log("memory", cost.memory)
    local.log("flops", cost.flops * steps)
    if device.type == "cuda":
        local.log("cuda_memory", torch.cuda.max_memory_allocated(device))
    return cost


class _RoundWithoutNumbers(LocalRound):
    """A round whose views have a shape, a type and a device, and no pixels."""

    def views(
        self, images: Tensor, samples: Tensor, purpose: str, epoch: int = 0, count: int = 2
    ) -> tuple[Tensor, ...]:
        shape = tuple(images.shape[1:])
        shapes = [shape if i < 2 else self.augmentation.further_shape(shape) for i in range(count)]
        return tuple(torch.empty(len(images), *one, device=self.client.model.device) for one in shapes)


def _count_step(
    local: LocalRound, options: TrainingOptions, regularizers: Sequence[Regularizer], rounds: int, keep_optimizer: bool
) -> StepCost:
    """Return what a step takes, without its products: a copy of the round is trained whose tensors hold no numbers.

    What a step logs is logged as 0. The client's memory gets what a step leaves there, new tensors as zeros, and its
    weights move a little, as some parts log nothing of a client that has not moved.
    """
    client, mode = local.client, FakeTensorMode(allow_non_fake_inputs=True)
    images = torch.zeros((), dtype=torch.uint8).expand(client.images.shape)  # those in a file cannot be copied
    of_round = local.received, local.number, local.seed, local.objective, local.augmentation, local.previous
    with mode, FakeCopyMode(mode):
        bare = copy.deepcopy(_RoundWithoutNumbers(replace(client, images=images), *of_round))
        plain = options.model_copy(update={"stop_at_collapse": False})  # which reads numbers
        cost = train_locally(bare, plain, regularizers, rounds, most_steps=1, keep_optimizer=keep_optimizer)
    for name in (*bare._logged, *["rank_kept"] * options.stop_at_collapse):
        local.log(name, 0.0)
    left, memory = bare.client.memory, client.memory
    zeros = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in left.tensors.items()}
    memory.tensors = {name: memory.tensors.get(name, zeros[name]) for name in zeros}
    memory.numbers, memory.config = left.numbers, left.config
    with torch.no_grad():
        for parameter in client.model.parameters():
            parameter.mul_(1 + 1e-6)
    return cost


@functools.cache
def keep_freed_memory() -> None:
    """Let this process keep up to 64 MiB of freed memory, where its malloc is glibc's.

    By default glibc returns the memory of a step's activations to the system, which clears it page by page for the next
    step. Its thresholds adapt to the largest block of up to 32 MiB that was ever freed (mallopt(3), M_MMAP_THRESHOLD),
    so freeing one raises them. Nothing is written into the block, so it takes no memory. With thresholds of your own
    (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_) nothing changes.
    """
    torch.empty(2**25 - 2**13, dtype=torch.uint8)  # 32 MiB with what malloc adds to it


def _views(
    local: LocalRound, batches: Iterable[tuple[Tensor, Tensor]], steps_of_epoch: int
) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    for step, (rows, images) in enumerate(batches):
        views = local.views(images, rows, "training", step // steps_of_epoch, local.objective.views)
        # here already, so that all networks get the same tensors (FrozenOutputs)
        yield rows, tuple(with_channels_last(view) for view in views)


def _new_optimizer(model: Model, options: TrainingOptions) -> torch.optim.Optimizer:
    parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
    if options.encoder_rate != 1.0:
        encoder = set(model.encoder.parameters())
        heads = {"params": [p for p in parameters if p not in encoder]}
        parameters = [{"params": [p for p in parameters if p in encoder], "share": options.encoder_rate}, heads]
    rate, decay = options.learning_rate, options.weight_decay
    if options.optimizer == "sgd":
        # one pass over the weights in place of four
        how = {"fused": True} if model.device.type == "cpu" else {"foreach": True}
        return torch.optim.SGD(parameters, lr=rate, momentum=options.momentum, weight_decay=decay, **how)
    adam = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
    # foreach reads the number of steps, which a step without numbers does not have
    fused = isinstance(next(model.parameters()), FakeTensor)
    return adam(parameters, lr=rate, weight_decay=decay, foreach=not fused, fused=fused)


def _set_rates(
    optimizer: torch.optim.Optimizer, options: TrainingOptions, round_number: int, rounds: int, done: float = 0.0
) -> None:
    rate = learning_rate(options, round_number, rounds, done)
    heads_alone = options.learning_rate_schedule == "warmup_cosine" and (round_number - 1 + done) / rounds < _WARMUP
    for group in optimizer.param_groups:
        share = group.get("share")
        group["lr"] = rate if share is None else 0.0 if heads_alone else share * rate


def _kind_of_step(local: LocalRound, options: TrainingOptions, regularizers: Sequence[Regularizer]) -> Hashable:
    """Return a cache key: steps with equal keys cost the same memory and FLOPs.

    A regularizer may read the client's images and what it has received and remembers: of numbers the values count, of
    tensors the shapes.
    """
    client = local.client
    parts = tuple((type(part), repr(part)) for part in (local.objective, local.augmentation, options, *regularizers))
    step = (structure(client.model), parts, tuple(client.images.shape[1:]), str(client.model.device))
    if not regularizers:
        return step
    public_shape = None if client.public_images is None else tuple(client.public_images.shape)
    forms = (_message_form(local.received), _message_form(client.memory))
    return *step, local.number, len(client.images), public_shape, *forms, local.previous is None


def _message_form(message: Message) -> Hashable:
    tensors = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in message.tensors.items())
    return tensors, tuple(message.numbers.items()), repr(message.config)


def _log_gradient_norm(local: LocalRound, scaler: torch.amp.GradScaler) -> None:
    """Log the L2 norm of all gradients, which are the scaler's scale times what they should be.

    Of every step it would take 1.3 to 2.9 % of the step's time, so it is that of a round's last step alone.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in local.client.model.parameters() if p.grad is not None])
    if scaler.is_enabled():  # the host waits for the scale in each step anyway
        norm = norm / scaler.get_scale()
        if not norm.isfinite():  # the step is left out
            return
    local.log("gradient_norm", norm)


def _log_rank_kept(step: Step, local: LocalRound, begins: bool, ends: bool) -> None:
    """Log what share of the highest rank a batch has at a round's end; 1.0 while its views still find each other.

    Where the online network saw one view of several, another one passes through its encoder here.
    """
    views, model, numbers = step.representations, local.client.model, local.client.memory.numbers
    if len(views) == 1 < len(step.views):
        with torch.no_grad(), untouched_running_statistics(model), generators_set_to(0):
            views += (model.encoder(step.views[step.first_view - 1]),)
    rank, found = effective_rank(views[0]), view_retrieval((views[0], views[-1])) or 0.0
    highest, most = max(rank, numbers.get(_HIGHEST_RANK, 0.0)), max(found, numbers.get(_MOST_FOUND, 0.0))
    if begins:
        numbers |= {_HIGHEST_RANK: highest, _MOST_FOUND: most}
    if ends:
        local.log("rank_kept", rank / highest if found <= _FOUND_STILL * most else 1.0)


def _require_finite(losses: list[Tensor], steps: int, local: LocalRound, parts: dict[str, Tensor]) -> None:
    """Raise a UserError if one of the last losses is not finite.

    `steps` are those of the round so far, and `parts` the parts of the last one's loss by name.
    """
    values = torch.stack(losses).tolist() if losses else []
    for number, value in enumerate(values, start=steps - len(values) + 1):
        if not math.isfinite(value):
            terms = ", ".join(f"{name} {float(part):.4g}" for name, part in parts.items())
            whose = f"client {local.client.index}'s" if local.number else "the server's"
            raise UserError(
                f"{whose} loss became {value} in round {local.number}, step {number}; at step "
                f"{steps} it was the sum of {terms}; lower training.learning_rate or the regularizers' weights"
            )


def _continue_optimizer(optimizer: torch.optim.Optimizer, model: Model, memory: Message) -> None:
    """Give an optimiser the state of each parameter that `_keep_optimizer` left; its learning rate stays as it is."""
    stored: dict[str, dict[str, Tensor]] = {}
    for name, tensor in memory.tensors.items():
        if name.startswith(_OPTIMIZER):
            parameter, _, entry = name.removeprefix(_OPTIMIZER).rpartition("/")
            stored.setdefault(parameter, {})[entry] = tensor
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    states = {number: stored[name] for number, name in enumerate(trained) if name in stored}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": states})


def _keep_optimizer(optimizer: torch.optim.Optimizer, model: Model, memory: Message) -> None:
    """Leave an optimiser's state in the client's memory."""
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                memory.tensors[f"{_OPTIMIZER}{name}/{entry}"] = value
