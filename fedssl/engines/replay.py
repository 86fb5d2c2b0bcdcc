"""Run a step again at which the loss was not finite, and find where the first such value came from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..federation import build_federation, require_same_data
from ..models.model import Model
from ..randomness import deterministic_on
from ..recipe.reading import load_stored_recipe
from ..run_folder.directory import RunDirectory
from ..run_folder.failed_step import read_failed_step
from ..training import NonFiniteLoss


def replay(path: Path, trust: bool = False) -> list[str]:
    """Run the step of a run's failed_step.json again, and return lines about it: rows, terms of the loss, first layer.

    The client's round is trained again from the last commit up to this step. On the CPU it is the same bit for bit. The
    folder is not changed.

    Args:
        path: the run's folder.
        trust: run the code of your own parts even if it has changed since the run began.

    Raises:
        UserError: the folder holds no such step or has gone on since; its files or data were changed.
    """
    directory = RunDirectory.open(path)
    failed = read_failed_step(path)
    directory.require_unchanged()
    if failed.round != directory.checkpoint.round + 1:
        raise UserError(
            f"the step to replay is of round {failed.round}, but {path} is at round {directory.checkpoint.round}: the "
            "run has gone on since, and what the step started from is not kept"
        )
    recipe = load_stored_recipe(directory, trust, resuming=True)
    federation = build_federation(recipe)
    require_same_data(path, federation.data_digests())
    method = federation.method
    sent = method.broadcast(directory.server_state(), federation.sampled_clients(failed.round), failed.round)
    client = federation.client(failed.client, directory.client_state(failed.client))
    layers = _NonFiniteLayers(client.model)
    lines = [
        f"client {failed.client}, round {failed.round}, step {failed.step}: the loss was {failed.loss}",
        f"the batch's images, numbered among the client's from 0: {', '.join(map(str, failed.rows))}",
    ]
    try:
        with deterministic_on(client.model.device, recipe.training.deterministic):
            method.counted_round(client, sent[failed.client], failed.round, most_steps=failed.step)
    except NonFiniteLoss as error:
        lines += [f"{name}: {value:.6g}" for name, value in error.terms.items()]
        return [*lines, layers.first or "every layer's output is finite: a term of the loss makes the value itself"]
    return [*lines, "this time the loss is finite: on a GPU, steps round alike with training.deterministic alone"]


class _NonFiniteLayers:
    """Watches the layers of a model, and of its copies, for the first output that is not finite."""

    def __init__(self, model: Model):
        self.first = ""
        for name, layer in model.named_modules():
            layer.register_forward_hook(self._watch(name))

    def _watch(self, name: str):  # type: ignore[no-untyped-def]
        def look(layer: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            if self.first or not isinstance(output, Tensor) or _finite(output):
                return
            text = f"the first layer with a non-finite output is {name} ({type(layer).__name__})"
            if bad := [key for key, tensor in layer.state_dict().items() if not _finite(tensor)]:
                self.first = f"{text}; its {bad[0]} is not finite: the update before made it so"
            elif all(_finite(one) for one in inputs if isinstance(one, Tensor)):
                largest = [_largest(tensors) for tensors in (layer.parameters(), inputs)]
                self.first = f"{text}; its weights reach {largest[0]:.3g} and its input {largest[1]:.3g}"
            else:
                self.first = f"{text}; its input is not finite either, and its weights are"

        return look


def _largest(tensors: Iterable[object]) -> float:
    """Return the largest magnitude in tensors; 0 without any."""
    return max((float(one.detach().abs().max()) for one in tensors if isinstance(one, Tensor)), default=0.0)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
