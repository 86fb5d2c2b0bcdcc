"""An encoder cut into layers, so that it can grow stage by stage and part of it can be frozen.

`StagedEncoder` puts a switch around each layer of a network and runs the network's own `forward`. It works for timm's
ResNets, the small ones included (a layer is what their paper calls a stage), for any timm vision transformer that has
`patch_embed` and `blocks`, and for the small convolutional networks.

| | layers | same role as the first layer | active at every depth |
|---|---|---|---|
| vision transformer | each of `blocks` | patch embedding, class token, position embedding | last norm, pooling |
| ResNet | `layer1` to `layer4` | the stem | pooling |
| small convnet | each convolution with BatchNorm and ReLU | - | pooling |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import UserError
from .encoders import Encoder, SmallConvNet

Role = Literal["absent", "frozen", "active"]
# Modules after the last layer of timm's networks, and before the first layer of its vision transformers.
_TOP = ("norm", "fc_norm", "attn_pool", "global_pool", "head", "head_dist", "head_drop", "fc")
_BOTTOM = ("patch_embed", "pos_drop", "patch_drop", "norm_pre", "rope", "rel_pos_bias")


class Switch(nn.Module):
    """A module that is left out (`absent`), run without gradients (`frozen`), or run as it is (`active`)."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.role: Role = "active"
        #: an output that was computed before; if set, it is returned and the module does not run
        self.known_output: Tensor | None = None

    def extra_repr(self) -> str:
        return self.role

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.role == "absent":
            return x
        if self.known_output is not None:
            return self.known_output
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.role == "active"):
            out: Tensor = self.module(x, *args, **kwargs)
        return out


class FrozenOutputs:
    """The frozen layers' outputs for the last two batches of images, looked up by the identity of the images tensor.

    The target network's frozen layers equal the online network's, so each view passes through them only once.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=2)

    def find(self, images: Tensor) -> Tensor | None:
        # a tuple, as another thread may keep an output meanwhile
        return next((output for recent, output in tuple(self._recent) if recent is images), None)

    def keep(self, images: Tensor, output: Tensor) -> None:
        self._recent.append((images, output))

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenOutputs:
        return FrozenOutputs()  # a copy of the network may get other weights


class StagedEncoder(Encoder):
    """A network whose first layers can be run alone, with a role for each layer (`use`).

    Where the network at a depth has another width than at its full depth, a linear layer maps the pooled output to
    `num_features` (LW-FedSSL, section 4.5). Each such depth has its own linear layer, so a new stage starts with a new
    one. `depth` is the number of layers up to the last one that is not absent.

    Raises:
        UserError: this kind of network cannot be cut into layers.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        cuts, widths = _layers(network)
        self.num_features = features = int(network.num_features)  # type: ignore[arg-type]
        self._paths = cuts
        for path in chain(*cuts):
            network.set_submodule(path, Switch(network.get_submodule(path)))
        self.network = network
        self.reshape = nn.ModuleDict(
            {str(depth): nn.Linear(width, features) for depth, width in enumerate(widths, start=1) if width != features}
        )
        #: whether layers in the middle can be skipped, as in a transformer, whose layers all have the same shape
        self.can_skip = hasattr(network, "patch_embed")
        self.frozen_outputs: FrozenOutputs | None = None
        self.use(active=range(self.layers))

    @property
    def layers(self) -> int:
        return len(self._paths)

    def switches(self, layer: int) -> list[Switch]:
        """Return the switches of a layer (from 0); there are several if a layer consists of several modules."""
        return [self.network.get_submodule(path) for path in self._paths[layer]]  # type: ignore[misc]

    def use(self, active: Collection[int], frozen: Collection[int] = ()) -> None:
        """Give each layer (from 0) its role and set modes and `requires_grad`; layers in neither argument are absent.

        Frozen layers are in evaluation mode, so their buffers do not change either. Modules before the first layer have
        its role. Modules after the last layer are always active, as is this depth's reshaping layer, if there is one.
        """
        self._active, self._frozen = frozenset(active), frozenset(frozen)
        self.depth = 1 + max(self._active | self._frozen)
        for layer in range(self.layers):
            role: Role = "active" if layer in active else "frozen" if layer in frozen else "absent"
            for switch in self.switches(layer):
                switch.role = role
        trained = set(self.names(active, top=self.depth))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in trained)
        self.train(self.training)

    def train(self, mode: bool = True) -> StagedEncoder:
        """Set the mode; layers that do not train stay in evaluation mode."""
        super().train(mode)
        if mode:
            for layer in set(range(self.layers)) - self._active:
                for switch in self.switches(layer):
                    switch.eval()
            if 0 not in self._active:
                others = {*_TOP, *(path.split(".")[0] for path in chain(*self._paths))}
                for name, child in self.network.named_children():
                    if name not in others:
                        child.eval()
        return self

    def plain_network(self) -> nn.Module:
        """Return the network as it was before it was cut; this encoder cannot be used afterwards."""
        for path in chain(*self._paths):
            self.network.set_submodule(path, self.network.get_submodule(path).module)  # type: ignore[arg-type]
        return self.network

    def names(self, layers: Collection[int], top: int | None = None) -> list[str]:
        """Return state-dict names of layers (from 0); `top` adds the modules after the last layer at that depth."""
        names = []
        for name in self.state_dict():
            group, _, rest = name.partition(".")
            layer = _layer_of(rest, self._paths)
            if group == "reshape":
                included = rest.split(".")[0] == str(top)
            else:
                included = top is not None if layer is None else layer in layers
            if included:
                names.append(name)
        return names

    def forward(self, images: Tensor) -> Tensor:
        with self._frozen_part(images):
            out: Tensor = self.network(images)
        if str(self.depth) in self.reshape:
            out = self.reshape[str(self.depth)](out)
        return out

    def share_frozen_outputs(self, *others: nn.Module) -> None:
        """Share the frozen layers' outputs with networks whose frozen layers are equal, so that they run only once."""
        shared = self.frozen_outputs or FrozenOutputs()
        for encoder in (self, *others):
            if isinstance(encoder, StagedEncoder):
                encoder.frozen_outputs = shared

    @contextmanager
    def _frozen_part(self, images: Tensor) -> Any:
        """Take the frozen layers' output from `frozen_outputs` while the network runs, or store it there."""
        if self.frozen_outputs is None or not self._frozen:
            yield
            return
        known_output = self.frozen_outputs.find(images)
        if known_output is None:
            outputs: list[Tensor] = []
            last = self.switches(max(self._frozen))[-1]
            with last.register_forward_hook(lambda module, inputs, output: outputs.append(output)):
                yield
            self.frozen_outputs.keep(images, outputs[0])
            return
        frozen = [switch for layer in self._frozen for switch in self.switches(layer)]
        for switch in frozen:
            switch.known_output = known_output
        try:
            yield
        finally:
            for switch in frozen:
                switch.known_output = None


def names_of_last_layers(network: nn.Module, count: int, architecture: str) -> list[str]:
    """Return state-dict names of a network's last layers and of the modules after them.

    A layer is here also a stage of timm's networks that keep theirs in one `blocks`, `stages` or `layers`, such as
    EfficientNet, MobileNet, ConvNeXt and Swin, which cannot be run to a smaller depth.

    Raises:
        UserError: it has no such layers, or no more than `count`.
    """
    stages = {name: child for name, child in network.named_children() if name in ("blocks", "stages", "layers")}
    container, module = next(iter(stages.items()), ("", None))
    paths: list[tuple[str, ...]]
    if isinstance(module, nn.Sequential) and not isinstance(network, SmallConvNet):
        paths = [(f"{container}.{name}",) for name, _ in module.named_children()]
    else:
        paths, _ = _layers(network)
    if not count < len(paths):
        raise UserError(
            f"model.train=last:{count} is for encoders of more layers, and {architecture} has {len(paths)}: expected "
            f"last:1 to last:{len(paths) - 1}, or all"
        )
    names = list(network.state_dict())  # in the order of the forward pass
    return names[next(i for i, name in enumerate(names) if name.startswith(paths[-count][0] + ".")) :]


def _layer_of(name: str, paths: list[tuple[str, ...]]) -> int | None:
    """Return the layer (from 0) that a network's entry belongs to; None after the last one."""
    if name.split(".")[0] in _TOP:
        return None
    # entries before the first layer belong to it
    return next((i for i, own in enumerate(paths) if any(name.startswith(path + ".") for path in own)), 0)


def _layers(network: nn.Module) -> tuple[list[tuple[str, ...]], list[int]]:
    """Return the module paths of each layer, and the width of the pooled output after each layer."""
    from timm.models.resnet import ResNet  # here, as importing timm takes seconds

    if isinstance(network, SmallConvNet):
        cuts = [tuple(f"blocks.{3 * i + j}" for j in range(3)) for i in range(len(network.blocks) // 3)]
        return cuts, [network.blocks[3 * i].out_channels for i in range(len(cuts))]  # type: ignore[misc]
    if isinstance(network, ResNet):
        info: list[dict[str, Any]] = network.feature_info[-4:]
        return [(str(entry["module"]),) for entry in info], [int(entry["num_chs"]) for entry in info]
    blocks, width = getattr(network, "blocks", None), getattr(network, "embed_dim", None)
    only_known_modules = all(
        name in ("blocks", *_BOTTOM, *_TOP) or not list(child.parameters()) for name, child in network.named_children()
    )
    if only_known_modules and isinstance(blocks, nn.Sequential | nn.ModuleList) and isinstance(width, int):
        return [(f"blocks.{i}",) for i in range(len(blocks))], [width] * len(blocks)
    raise UserError(
        f"architectures: {type(network).__name__} cannot be cut into layers; a layer-wise or progressive "
        "schedule needs a ResNet or a vision transformer, for example resnet18 or vit_tiny_patch16_224, and "
        "model.train=last:N one of them or a network that keeps its stages in one module, such as EfficientNet"
    )
