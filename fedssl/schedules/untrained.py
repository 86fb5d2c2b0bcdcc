"""Nothing trains: the encoder stays as it was initialised."""

from typing import ClassVar

from .base import Plan, Schedule


class Untrained(Schedule):
    """No layer trains in any round, so what is measured after the run is the encoder before it.

    It gives a row to what a table compares training with, such as "Scratch" in LW-FedSSL's Table 2: the untrained
    encoder, fine-tuned on labels. Messages travel as in an end-to-end round; a client takes no step.
    """

    trains: ClassVar[bool] = False

    def plan(self, layers: int, round_number: int, seed: int) -> Plan:
        return Plan(stage=1, depth=layers, active=())
