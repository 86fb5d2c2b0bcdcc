"""Simulate the Flower engine in this process: the same server, clients and messages as in a deployment.

The clients answer one after another. What they compute is what `in_process` computes; what is tried here beside it is
Flower's messages, its differential privacy and its secure aggregation.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from ...errors import UserError
from ...federation import Federation, build_federation
from ...recipe.recipe import Recipe
from ...run_folder.directory import RunDirectory
from ..continuing import Engine
from ..observers import Observer
from ..rounds import run_rounds
from .client import Site, make_client_app
from .messenger import Messenger
from .privacy import private_federation
from .registration import ConnectedClients
from .server import FlowerClients
from .site import SiteStates


def _prepared(recipe: Recipe) -> Federation:
    if recipe.engine == "flower":
        raise UserError(
            "engine flower runs across machines and cannot be started with fedssl run: write its app with "
            "fedssl app RECIPE FOLDER and start it with flwr run FOLDER (docs/deploy.md), or use "
            "engine=flower-simulation on this machine"
        )
    return private_federation(build_federation(recipe))


def _simulate(federation: Federation, directory: RunDirectory, observer: Observer) -> RunDirectory:
    # messages name them; a SuperLink would set them
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    clients = {1 + k: k for k in range(len(federation.client_rows))}
    nodes = LocalNodes(simulated_app(federation, directory.path), {node: {} for node in clients})
    connected = ConnectedClients(Messenger(nodes), lambda: clients, federation, observer, "simulation")
    connected.require_enough()
    return run_rounds(federation, directory, observer, FlowerClients(connected, federation, directory, observer))


_ENGINE = Engine(_prepared, _simulate)
run, resume = _ENGINE.run, _ENGINE.resume


def simulated_app(federation: Federation, folder: Path) -> ClientApp:
    """Return the ClientApp of simulated clients, whose states a run's folder keeps."""

    def site_of(client: int) -> Site:
        states = SiteStates(folder / "checkpoints", client, prune=False)
        return Site(federation, client, lambda run: states, lambda text: None)

    return make_client_app(folder.absolute() / "recipe.yaml", site_of)


class LocalNodes:
    """Nodes in this process, as the grid that a `Messenger` sends to: a node works when its answer is asked for."""

    def __init__(self, app: ClientApp, configs: dict[int, Any]):
        self.app = app
        self.contexts = {node: Context(0, node, config, RecordDict(), {}) for node, config in configs.items()}
        self._numbers = itertools.count()
        self._waiting: dict[str, FlowerMessage] = {}

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        pushed = {f"message {next(self._numbers)}": message for message in messages}
        self._waiting |= pushed
        return list(pushed)

    def pull_messages(self, names: Iterable[str]) -> list[FlowerMessage]:
        return [self.answer(self._waiting.pop(name)) for name in names if name in self._waiting]

    def answer(self, message: FlowerMessage) -> FlowerMessage:
        return self.app(message, self.contexts[message.metadata.dst_node_id])
