"""What of an encoder trains (`model.train`): all of it, its last layers, or low-rank adapters of its attention."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ..errors import UserError, install_command
from .stages import names_of_last_layers
from .weights import keep_in_evaluation_mode

_ADAPTER = "lora_"  # in the names of adapters' modules, by peft


def freeze(encoder: nn.Module, train: str, architecture: str, image_shape: Collection[int]) -> list[str]:
    """Keep in evaluation mode what `train` leaves out of an encoder's training, and return its state-dict names.

    `last:N` trains the last N layers (stages.py) and the modules after them. `lora:R` adds adapters to the encoder (Hu
    et al. 2022, LoRA, Eq. 3), which alone train: each linear layer of attention gives W x + B A x, with A [R, in] drawn
    and B [out, R] zero at the start. Images are [C, H, W].

    Raises:
        UserError: the network has no such layers, or calls them in a way that adapters cannot follow; or no peft.
    """
    kind, _, number = train.partition(":")
    if kind == "all":
        return []
    if kind == "lora":
        _add_adapters(encoder, int(number), architecture, image_shape)
        trained = [name for name in encoder.state_dict() if _ADAPTER in name]
    else:
        trained = names_of_last_layers(encoder, int(number), architecture)
    frozen = set(encoder.state_dict()) - set(trained)
    for path, module in encoder.named_modules():
        entries = {f"{path}.{name}" for name in module.state_dict()}
        if entries and entries <= frozen:
            keep_in_evaluation_mode(module)
    return sorted(frozen)


def _add_adapters(encoder: nn.Module, rank: int, architecture: str, image_shape: Collection[int]) -> None:
    targets = {n: m for n, m in encoder.named_modules() if isinstance(m, nn.Linear) and "attn" in n.split(".")}
    called: set[nn.Module] = set()
    with torch.no_grad(), register_module_forward_hook(lambda module, *_: called.add(module)):
        encoder.eval()(torch.zeros(1, *image_shape))
    encoder.train()
    if not targets or not called >= set(targets.values()):  # some networks take a layer's weights and do not call it
        raise UserError(
            f"model.train=lora:{rank} adapts the linear layers of attention, and {architecture} has none that it calls "
            "as they are: train its last layers, such as model.train=last:1, or take a vision transformer"
        )
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(f"model.train=lora:{rank} needs peft ({error}): {install_command('lora')}") from error
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets)), encoder)


def merged(encoder: nn.Module) -> nn.Module:
    """Return an encoder as a plain network: adapters are added to what they adapt, and every module can train."""
    adapted: dict[str, Any] = {path: m for path, m in encoder.named_modules() if hasattr(m, "lora_A")}
    for path, module in adapted.items():
        module.merge()
        encoder.set_submodule(path, module.get_base_layer())
    for module in encoder.modules():
        vars(module).pop("train", None)  # of `keep_in_evaluation_mode`
    return encoder
