"""All layers train in every round."""

from .base import Plan, Schedule


class EndToEnd(Schedule):
    """The whole online network trains and travels; the target network stays with its client."""

    def plan(self, layers: int, round_number: int, seed: int) -> Plan:
        return Plan(stage=1, depth=layers, active=tuple(range(layers)))
