"""Progressive training: one stage after another adds layers, and all layers so far train."""

from .base import Plan
from .layer_wise import LayerWise


class Progressive(LayerWise):
    """Prog-FedSSL (Tun et al. 2024, LW-FedSSL, section 3.2, Algorithms 3 and 4).

    Stages and options are those of `layer_wise`, but no layer is frozen: all layers so far train and travel in every
    round, so no client lacks any. The layers that depth dropout leaves out of a round neither train nor travel in it.
    """

    def plan(self, layers: int, round_number: int, seed: int) -> Plan:
        stage, earlier, newest = self._stage(layers, round_number)
        active = (*self._kept(len(earlier), round_number, seed), *newest)
        return Plan(stage, len(earlier) + len(newest), active)
