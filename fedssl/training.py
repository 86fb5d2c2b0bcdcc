"""One client's local training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from .accounting import StepCost, StepCounter
from .client import LocalRound
from .data.batches import batches_of_epoch, round_batches
from .errors import UserError
from .messages import Message
from .models.model import Model
from .options import Options
from .regularizers.base import Regularizer

#: in a client's memory: an optimiser's momentum and moments, as optimizer/PARAMETER/ENTRY
_OPTIMIZER = "optimizer/"


class TrainingOptions(Options):
    """Defaults are Hetero-SSFL's (section 5.1), the weight decay FedU's.

    With `local_steps` a client with fewer images goes through them more often, and one with more stops early, in a new
    random order in each round. So clients of unequal size move about equally far, which EUA's and MGDA's weights read.
    FedU2's released code does something near to it: a client takes whole epochs, as many as fit into the steps that
    `local_epochs` takes on the largest client, but at most 10.
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
    learning_rate_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="how the learning rate changes over the rounds; cosine ends near 0"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd; adam and adamw ignore it")
    weight_decay: float = Field(
        5e-4, ge=0, description="of all weights: an L2 term for sgd and adam, decoupled for adamw"
    )


def learning_rate(options: TrainingOptions, round_number: int, rounds: int) -> float:
    """The rate of a round, from 1 to `rounds`; `cosine` starts at the full rate and would reach 0 after the last."""
    if options.learning_rate_schedule == "constant":
        return options.learning_rate
    return options.learning_rate * 0.5 * (1.0 + math.cos(math.pi * (round_number - 1) / rounds))


def steps_of_round(options: TrainingOptions, images: int) -> int:
    """Optimiser steps of a client with so many images in one round; 0 where they do not fill a batch."""
    batches = images // options.batch_size
    if options.local_steps is not None:
        return options.local_steps if batches else 0
    return options.local_epochs * batches


def train_before_rounds(local: LocalRound, options: TrainingOptions, epochs: int) -> None:
    """Train without regularizers and at a constant rate: the schedule over the rounds begins with the first of them.

    Args:
        local: the client and its round; a batch is at most all of its images.
        options: those of the run.
        epochs: in place of the run's local epochs or steps.
    """
    size = min(options.batch_size, len(local.client.images))
    changed = {
        "local_epochs": epochs,
        "local_steps": None,
        "batch_size": size,
        "learning_rate_schedule": "constant",
    }
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
    `keep_optimizer` says that it continues with the state that it left in the client's memory.

    The first step is counted (accounting.py): `memory` in bytes, `flops` of the whole round; on CUDA also
    `cuda_memory`, the allocator's own peak in bytes.

    Args:
        local: the client and its round.
        options: how long and with which numbers.
        regularizers: the terms that are added to the objective's loss.
        rounds: of the whole run.
        most_steps: stop after so many steps; for counting a step without training.
        keep_optimizer: see `LocalUpdate.keeps_optimizer`.

    Returns:
        What the first step took.

    Raises:
        UserError: the loss is not finite. It is looked at once an epoch, as each look waits for the device; the message
            names the first step at which it was not.
    """
    client, objective = local.client, local.objective
    model, device = client.model, client.model.device
    terms = [regularizer.start_round(local) for regularizer in regularizers]
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate = learning_rate(options, local.number, rounds)
    optimizer: torch.optim.Optimizer
    if options.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            parameters, lr=rate, momentum=options.momentum, weight_decay=options.weight_decay, foreach=True
        )
    else:
        adam = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
        optimizer = adam(parameters, lr=rate, weight_decay=options.weight_decay, foreach=True)
    if keep_optimizer:
        _continue_optimizer(optimizer, model, client.memory)
    order = local.generator("order")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    counter = StepCounter(model)
    cost: StepCost | None = None
    steps = 0
    batches = round_batches(len(client.images), options.batch_size, options.local_epochs, options.local_steps, order)
    steps_of_epoch = batches_of_epoch(len(client.images), options.batch_size)
    unchecked: list[Tensor] = []  # losses since the last check
    for rows in itertools.islice(batches, most_steps):
        views = local.views(client.images[rows], rows, "training", steps // steps_of_epoch, objective.views)
        try:
            with counter.forward() if cost is None else nullcontext():
                step = objective.step(model, views, client.labels[rows].to(device))
                step.views = views
                loss = step.loss
                for term in terms:
                    loss = loss + term(step)
        except Exception:
            _require_finite(unchecked, steps, local)  # what failed may have failed on a diverged model
            raise
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if cost is None:
            cost = counter.finish(optimizer)
        objective.after_step(model)
        steps += 1
        local.log("loss", step.loss.detach())
        local.log("total_loss", loss.detach())
        unchecked.append(loss.detach())
        if len(unchecked) == steps_of_epoch:
            _require_finite(unchecked, steps, local)
            unchecked = []
    _require_finite(unchecked, steps, local)
    if cost is None:
        raise UserError(
            f"client {client.index} has {len(client.images)} images, fewer than training.batch_size "
            f"{options.batch_size}"
        )
    if keep_optimizer:
        _keep_optimizer(optimizer, model, client.memory)
    local.log("memory", cost.memory)
    local.log("flops", cost.flops * steps)
    if device.type == "cuda":
        local.log("cuda_memory", torch.cuda.max_memory_allocated(device))
    return cost


def _require_finite(losses: list[Tensor], steps: int, local: LocalRound) -> None:
    """Raise a UserError if one of the last losses is not finite; `steps` are those of the round so far."""
    values = torch.stack(losses).tolist() if losses else []
    for number, value in enumerate(values, start=steps - len(values) + 1):
        if not math.isfinite(value):
            raise UserError(
                f"client {local.client.index}'s loss became {value} in round {local.number}, step {number}; "
                "lower training.learning_rate or the regularizers' weights"
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
    """Leave an optimiser's state in the client's memory, by the parameters' names."""
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                memory.tensors[f"{_OPTIMIZER}{name}/{entry}"] = value
