"""Layer-wise training: one stage after another adds layers and freezes the earlier ones."""

from typing import ClassVar

import torch
from pydantic import Field

from ..errors import UserError
from ..models.stages import StagedEncoder
from ..randomness import generator_for
from .base import Plan, Schedule


class LayerWise(Schedule):
    """LW-FedSSL (Tun et al. 2024, LW-FedSSL: Resource-efficient Layer-wise Federated Self-supervised Learning,
    Algorithms 1 and 2).

    An encoder of L layers is trained in S = L / layers_per_stage stages of R_s = rounds_per_stage rounds. In stage s
    the encoder has its first s * layers_per_stage layers, with pooling and heads. Only the newest layers and the heads
    train and travel. The earlier layers run forward only, in evaluation mode, and have no optimiser state. After a
    stage its aggregated layers go to the clients (Algorithm 1, line 14), here with the first message of the next stage.
    A client that joins late or missed rounds receives every final layer that it lacks in the same way; a client that
    has none of them is the paper's worst case (section 4.3).

    The paper leaves open the following. The norm after a vision transformer's last block follows the newest layer at
    every depth, so it trains and travels with the heads. Patch embedding, class token, position embedding and a
    ResNet's stem belong to the first stage. New layers start from the encoder's initialisation. The target network
    starts every round as a copy of the online one (Algorithm 2, line 4). Its frozen layers are then the same, so each
    view passes through them once for both networks.

    Depth dropout (`kept_layers`; DD in section 4.6) draws layers anew for every round, the same for all clients. The
    paper prints no rate; five kept layers of twelve give its Table 6 (FLOPs 0.80 and 0.73, traffic 0.79). The first
    layer, which holds the patch embedding, is always kept. Evaluation uses all layers.
    """

    cuts: ClassVar[bool] = True

    layers_per_stage: int = Field(1, ge=1, description="layers that each stage adds")
    rounds_per_stage: int = Field(15, ge=1, description="rounds of each stage")
    kept_layers: int | None = Field(
        None, ge=1, description="depth dropout: earlier layers that a round uses (default: all)"
    )

    def check(self, encoder: StagedEncoder, rounds: int) -> None:
        layers = encoder.layers
        if layers % self.layers_per_stage:
            raise UserError(
                f"schedule.layers_per_stage is {self.layers_per_stage}, which does not divide the encoder's {layers} "
                "layers"
            )
        stages = layers // self.layers_per_stage
        if rounds != stages * self.rounds_per_stage:
            raise UserError(
                f"rounds is {rounds}, but {stages} stages of schedule.rounds_per_stage {self.rounds_per_stage} take "
                f"{stages * self.rounds_per_stage}: set rounds to that"
            )
        if self.kept_layers is not None and not encoder.can_skip:
            raise UserError(
                "schedule.kept_layers leaves layers out, which only an encoder whose layers keep their input's shape "
                "allows: use a vision transformer, or leave kept_layers out"
            )

    def plan(self, layers: int, round_number: int, seed: int) -> Plan:
        stage, earlier, newest = self._stage(layers, round_number)
        frozen = self._kept(len(earlier), round_number, seed)
        return Plan(stage, len(earlier) + len(newest), tuple(newest), frozen, done=len(earlier))

    def _stage(self, layers: int, round_number: int) -> tuple[int, range, range]:
        """Return the stage, the layers of earlier stages, and those that it adds."""
        stage = 1 + (round_number - 1) // self.rounds_per_stage
        first = (stage - 1) * self.layers_per_stage
        return stage, range(first), range(first, first + self.layers_per_stage)

    def _kept(self, earlier: int, round_number: int, seed: int) -> tuple[int, ...]:
        if self.kept_layers is None or earlier <= self.kept_layers:
            return tuple(range(earlier))
        shuffled = 1 + torch.randperm(earlier - 1, generator=generator_for(seed, "depth_dropout", round_number))
        return (0, *sorted(shuffled[: self.kept_layers - 1].tolist()))
