"""What the layers of a network return on a batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Afterwards each module has the mode that it had, also after an error."""
    training = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode


def run(
    model: nn.Module,
    batch: Any,
    device: torch.device | str | None,
    layers: Mapping[str, nn.Module],
    keep: Callable[[str, Any], None],
) -> None:
    """Runs the model on a batch without its labels; `keep` gets each layer's name and output whenever it has run.

    The batch is a tensor, a tuple or list whose first element is the input, or a mapping, as the input may be. The
    model gets a mapping as keyword arguments. The output may be changed in place afterwards.
    """
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ValueError("a DataParallel over several devices shows its layers parts of a batch: give its .module")
    if isinstance(batch, (tuple, list)) and not batch:
        raise ValueError(f"a batch must begin with the network's input, got an empty {type(batch).__name__}")
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    # Only for this run: another network may share the layers.
    hooks = [layer.register_forward_hook(partial(_call, keep, name)) for name, layer in layers.items()]
    try:
        if isinstance(inputs, Mapping):
            model(**{name: _moved(value, device) for name, value in inputs.items()})
        else:
            model(_moved(inputs, device))
    finally:
        for hook in hooks:
            hook.remove()


def _call(keep: Callable[[str, Any], None], name: str, _layer: nn.Module, _inputs: Any, output: Any) -> None:
    keep(name, output)


def _moved(value: Any, device: torch.device | str | None) -> Any:
    return value.to(device) if isinstance(value, Tensor) and device is not None else value


def rows(output: Any, layer: str) -> Tensor:
    """The output's first floating tensor [L, ...] as [L, d]; `layer` names the layer in the error."""
    tensor = _first_tensor(output)
    if tensor is None or tensor.ndim == 0:
        raise ValueError(
            f"{layer} must return a floating tensor [L, ...], or a tuple, list or mapping with one, "
            f"got {type(output).__name__}"
        )
    if tensor.numel() == 0:
        raise ValueError(f"{layer} must return at least one number for each sample, got shape {list(tensor.shape)}")
    return tensor.detach().reshape(len(tensor), -1)


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return next((tensor for tensor in map(_first_tensor, parts) if tensor is not None), None)
