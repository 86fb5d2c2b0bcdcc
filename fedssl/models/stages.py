"""An encoder cut into layers, so that it can grow stage by stage and part of it can be frozen.

`StagedEncoder` puts a switch around each layer of a network and runs the network's own `forward`, so nothing of a
family's forward pass is written again here. It works for timm's ResNets (the four blocks of layers that their paper
calls stages; this repository's small ResNets are such), for any timm vision transformer that has `patch_embed` and
`blocks`, and for the small convolutional networks.

| | layers | goes with the first layer | on top at every depth |
|---|---|---|---|
| vision transformer | each of `blocks` | patch embedding, class token, position embedding | last norm, pooling |
| ResNet | `layer1` to `layer4` | the stem | pooling |
| small convnet | each convolution with BatchNorm and ReLU | - | pooling |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import UserError
from .encoders import Encoder, SmallConvNet

Role = Literal["absent", "frozen", "active"]

# What stands after the last layer in timm's networks, and before the first one in its vision transformers.
_TOP = ("norm", "fc_norm", "attn_pool", "global_pool", "head", "head_dist", "head_drop", "fc")
_BOTTOM = ("patch_embed", "pos_drop", "patch_drop", "norm_pre", "rope", "rel_pos_bias")


class Switch(nn.Module):
    """A module that is left out (`absent`), run without gradients (`frozen`), or run as it is (`active`)."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.role: Role = "active"
        #: if set, the output, known from before; the module is not run
        self.known: Tensor | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.role == "absent":
            return x
        if self.known is not None:
            return self.known
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.role == "active"):
            out: Tensor = self.module(x, *args, **kwargs)
        return out


class FrozenOutputs:
    """The frozen layers' outputs for the last two batches of images, found again by the images tensor itself.

    The target network's frozen layers equal the online network's, so each view needs to pass them only once.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=2)

    def find(self, images: Tensor) -> Tensor | None:
        return next((output for known, output in self._recent if known is images), None)

    def keep(self, images: Tensor, output: Tensor) -> None:
        self._recent.append((images, output))

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenOutputs:
        return FrozenOutputs()  # a copied network may get other weights


class StagedEncoder(Encoder):
    """A network whose first layers can be run alone, with a role for each layer (`use`).

    Where the network at a depth has another width than at its full depth, a linear layer of that depth reshapes the
    pooled output to `num_features` (LW-FedSSL, section 4.5). There is one for each such depth, so that one is never
    taken over into the next stage.

    Args:
        network: an encoder as `build_encoder` gives it.

    Attributes:
        layers: number of layers.
        depth: layers up to the last one that is not absent.

    Raises:
        UserError: the network is of no family that can be cut.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        cuts, widths = _layers(network)
        self.num_features = int(network.num_features)  # type: ignore[arg-type]
        self._paths = cuts
        for paths in cuts:
            for path in paths:
                _wrap(network, path)
        self.network = network
        self.reshape = nn.ModuleDict(
            {
                str(depth): nn.Linear(width, self.num_features)
                for depth, width in enumerate(widths, start=1)
                if width != self.num_features
            }
        )
        #: whether a layer between others can be left out: in a transformer, where all layers have one shape
        self.can_skip = hasattr(network, "patch_embed")
        self.frozen_outputs: FrozenOutputs | None = None
        self.use(active=range(self.layers))

    @property
    def layers(self) -> int:
        return len(self._paths)

    def switches(self, layer: int) -> list[Switch]:
        """The switches of a layer, from 0; more than one where a layer is made of several modules."""
        return [self.network.get_submodule(path) for path in self._paths[layer]]  # type: ignore[misc]

    def use(self, active: Collection[int], frozen: Collection[int] = ()) -> None:
        """Give each layer (from 0) its role; those named in neither are absent. Sets modes and `requires_grad`.

        Frozen layers are in evaluation mode, so their buffers stay too. What stands before the first layer goes with
        it. What stands on top is always active, and so is the reshaping layer of this depth, if any.
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
        """As of any module, but that layers which do not train stay in evaluation mode."""
        super().train(mode)
        if mode:
            for layer in set(range(self.layers)) - self._active:
                for switch in self.switches(layer):
                    switch.eval()
            if 0 not in self._active:
                for name, child in self.network.named_children():
                    if name not in _TOP and not self._holds_layers(name):
                        child.eval()
        return self

    def _holds_layers(self, child: str) -> bool:
        return any(path.split(".")[0] == child for paths in self._paths for path in paths)

    def names(self, layers: Collection[int], top: int | None = None) -> list[str]:
        """State-dict names of some layers (from 0); `top` adds what stands on top at that depth."""
        found = []
        for name in self.state_dict():
            group, _, rest = name.partition(".")
            if group == "reshape":
                wanted = rest.split(".")[0] == str(top)
            elif rest.split(".")[0] in _TOP:
                wanted = top is not None
            else:
                wanted = self._layer_of(rest) in layers
            if wanted:
                found.append(name)
        return found

    def _layer_of(self, name: str) -> int:
        """The layer that an entry of the network belongs to; what stands before the first goes with it."""
        for layer, paths in enumerate(self._paths):
            if any(name.startswith(path + ".") for path in paths):
                return layer
        return 0

    def forward(self, images: Tensor) -> Tensor:
        with self._frozen_part(images):
            out: Tensor = self.network(images)
        if str(self.depth) in self.reshape:
            out = self.reshape[str(self.depth)](out)
        return out

    def share_frozen_outputs(self, *others: nn.Module) -> None:
        """Let networks whose frozen layers equal these run them once for each batch of images."""
        shared = self.frozen_outputs or FrozenOutputs()
        for encoder in (self, *others):
            if isinstance(encoder, StagedEncoder):
                encoder.frozen_outputs = shared

    @contextmanager
    def _frozen_part(self, images: Tensor) -> Any:
        """While the network runs: take the frozen layers' output from `frozen_outputs`, or put it there."""
        if self.frozen_outputs is None or not self._frozen:
            yield
            return
        known = self.frozen_outputs.find(images)
        if known is None:
            outputs: list[Tensor] = []
            last = self.switches(max(self._frozen))[-1]
            handle = last.register_forward_hook(lambda module, inputs, output: outputs.append(output))
            try:
                yield
            finally:
                handle.remove()
            self.frozen_outputs.keep(images, outputs[0])
            return
        frozen = [switch for layer in self._frozen for switch in self.switches(layer)]
        for switch in frozen:
            switch.known = known
        try:
            yield
        finally:
            for switch in frozen:
                switch.known = None


def _wrap(network: nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    holder = network.get_submodule(parent)
    setattr(holder, name, Switch(network.get_submodule(path)))


def _layers(network: nn.Module) -> tuple[list[tuple[str, ...]], list[int]]:
    """The module paths of each layer, and the width of the pooled output after each layer."""
    from timm.models.resnet import ResNet  # here, as importing timm takes seconds

    if isinstance(network, SmallConvNet):
        cuts = [tuple(f"blocks.{3 * i + j}" for j in range(3)) for i in range(len(network.blocks) // 3)]
        return cuts, [network.blocks[3 * i].out_channels for i in range(len(cuts))]  # type: ignore[misc]
    if isinstance(network, ResNet):
        info: list[dict[str, Any]] = network.feature_info[-4:]
        return [(str(entry["module"]),) for entry in info], [int(entry["num_chs"]) for entry in info]
    blocks, width = getattr(network, "blocks", None), getattr(network, "embed_dim", None)
    known = all(
        name in ("blocks", *_BOTTOM, *_TOP) or not list(child.parameters()) for name, child in network.named_children()
    )
    if known and isinstance(blocks, nn.Sequential | nn.ModuleList) and isinstance(width, int):
        return [(f"blocks.{i}",) for i in range(len(blocks))], [width] * len(blocks)
    raise UserError(
        f"architectures: {type(network).__name__} cannot be cut into layers; a layer-wise or progressive "
        "schedule needs a ResNet or a vision transformer, for example resnet18 or vit_tiny_patch16_224"
    )
