"""Schedules say which layers train and travel in a round."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..models.model import Model
from ..models.stages import StagedEncoder
from ..parts import Part


@dataclass(frozen=True)
class Plan:
    """A round's use of the encoder's layers, numbered from 0. The heads train and travel in every round.

    Attributes:
        stage: the stage, from 1.
        depth: number of layers that the encoder has so far.
        active: layers that train and travel.
        frozen: layers that run forward only, without changing or travelling.
        done: number of first layers that are final. A client that lacks one of them receives it.

    Layers below `depth` that are neither active nor frozen are left out of this round (depth dropout).
    """

    stage: int
    depth: int
    active: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    done: int = 0


class Schedule(Part):
    """Plans the rounds. A new one overrides `plan`, and sets `cuts` if it does not train all layers in every round."""

    #: True where the encoder must be cut into layers (models/stages.py). Then clients exchange weights, and a target
    #: network starts every round as a copy of the online one, so that both have the same frozen layers.
    cuts: ClassVar[bool] = False
    #: False where clients take no step in any round
    trains: ClassVar[bool] = True

    @abstractmethod
    def plan(self, layers: int, round_number: int, seed: int) -> Plan:
        """Return the plan of a round, counted from 1; an encoder that is not cut has 1 layer, `seed` is the run's."""

    def check(self, encoder: StagedEncoder, rounds: int) -> None:
        """Raise a UserError for options that do not fit the encoder or the number of rounds."""

    def adapt(self, encoder: nn.Module) -> nn.Module:
        """Return the encoder that the model is built around, cut into layers if the schedule needs that."""
        return StagedEncoder(encoder) if self.cuts else encoder

    def prepare(self, model: Model, plan: Plan) -> None:
        """Set the modes and `requires_grad` with which a round trains, on the online and the target network."""
        model.train()
        model.let_train()
        if isinstance(model.encoder, StagedEncoder):
            model.encoder.use(plan.active, plan.frozen)
            model.encoder.frozen_outputs = None  # they are another round's
            target = dict(model.target.items()).get("encoder")
            if isinstance(target, StagedEncoder):
                target.use(plan.active, plan.frozen)
                target.requires_grad_(False)
                model.encoder.share_frozen_outputs(target)

    def travelling(self, model: Model, plan: Plan) -> list[str]:
        """Return state-dict names of what a weight-exchanging aggregator sends up and down in a round."""
        online = [name for name in model.state_dict() if name.startswith("online.") and name not in model.frozen]
        if not isinstance(model.encoder, StagedEncoder):
            return online
        encoder = {"online.encoder." + name for name in model.encoder.names(plan.active, top=plan.depth)}
        return [name for name in online if name in encoder or not name.startswith("online.encoder.")]
