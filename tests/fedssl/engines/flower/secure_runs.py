"""Runs with Flower's privacy on a grid in this process, and what their results are compared by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from fedssl.engines.flower.secure_aggregation import quantization_range
from fedssl.federation import build_federation
from fedssl.recipe.recipe import Recipe
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, LW_FEDSSL
from tests.fedssl.engines.flower.loop_grid import LoopGrid, start
from tests.fedssl.engines.short_runs import SMALL

HUGE = {"name": "fixed_clipping", "clipping_norm": 1e9, "noise_multiplier": 0}
SECURE = {"name": "secagg_plus", "max_weight": 60}
WEIGHTS = AVERAGED | SMALL
EQUAL = WEIGHTS | {"partition": {"name": "iid", "clients": 3}}  # differential privacy counts all clients the same
FEDEMA = WEIGHTS | {"local_update": "fedema"}
#: with small steps: rounding by the masks or by clipping stays small
LAYER_WISE = LW_FEDSSL | SMALL | {"training": {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.001}}


class StageGrid(LoopGrid):
    """Loses the messages of some nodes in a stage of SecAgg+, in every round or in one."""

    def __init__(self, app, configs):
        super().__init__(app, configs)
        self.loses: Callable[[int, str, str], bool] = lambda node, stage, number: False
        self.stages: list[tuple[int, str]] = []

    def push_messages(self, messages):
        names = []
        for message in messages:
            node = message.metadata.dst_node_id
            record = message.content.get(RECORD_KEY_CONFIGS)
            stage = str(record[Key.STAGE]) if record else ""
            self.stages += [(node, stage)] if stage else []
            if stage and self.loses(node, stage, message.metadata.group_id):
                names.append(f"lost {next(self.numbers)}")
            else:
                names += super().push_messages([message])
        return names


def start_stages(recipe: Recipe, path: Path, sites: list[Path] | None = None) -> tuple[RunDirectory, StageGrid]:
    """`loop_grid.start` with a `StageGrid`."""
    directory, grid = start(recipe, path, sites)
    return directory, StageGrid(grid.app, grid.configs)


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The floating-point weights of the server's last state."""
    state = RunDirectory.open(path).server_state().tensors
    return {name: t for name, t in state.items() if name.startswith("online.") and t.is_floating_point()}


def assert_close(a: Path, b: Path, *, atol: float) -> None:
    """The server's last weights of two runs agree."""
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-5, atol=atol)


def quantisation_error(recipe: Recipe) -> float:
    """The largest error of the secure mean: each client's integer is off by less than one step."""
    secure = recipe.flower.secure_aggregation
    counts = [len(rows) for rows in build_federation(recipe).client_rows]
    step = 2 * secure.clipping_range / quantization_range(len(counts))
    return len(counts) * step / (sum(counts) / secure.max_weight)
