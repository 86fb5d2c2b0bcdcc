"""Flower's grid with its nodes in this process: the server and client apps of a run, without processes."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict
from flwr.app.error import Error
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedssl.engines.flower.client import make_client_app
from fedssl.engines.flower.messenger import Messenger
from fedssl.engines.flower.privacy import private_federation
from fedssl.engines.flower.registration import ConnectedClients
from fedssl.engines.flower.secure_aggregation import quantization_range
from fedssl.engines.flower.server import FlowerClients
from fedssl.engines.flower.simulation import LocalNodes, simulated_app
from fedssl.engines.flower.site_files import bound_clients, key_fingerprint, manifest_of_run
from fedssl.engines.observers import Observer
from fedssl.engines.rounds import first_files, run_rounds
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.method import Method
from fedssl.recipe.recipe import Recipe
from fedssl.run_folder.directory import SITES_RUN, RunDirectory
from tests.fedssl.conftest import AVERAGED, LW_FEDSSL
from tests.fedssl.engines.short_runs import SMALL, metric


class LoopGrid(LocalNodes):
    """The simulation's nodes, whose messages are noted, lost or changed; a node works when its message is sent."""

    def __init__(self, app, configs: dict[int, dict]):
        super().__init__(app, configs)
        self.replies: dict[str, FlowerMessage] = {}
        self.silent: set[int] = set()  # nodes that answer no round
        self.tamper = lambda node, reply: None
        self.tasks: list[dict[str, Any]] = []  # of the messages to the nodes
        self.sent: list[FlowerMessage] = []  # by the nodes
        #: which messages of SecAgg+ are lost, by node, stage and round
        self.loses: Callable[[int, str, str], bool] = lambda node, stage, number: False
        self.stages: list[tuple[int, str]] = []

    def push_messages(self, messages):
        assert messages, "the SuperLink refuses a request without messages"
        names = super().push_messages(messages)
        for name, message in zip(names, messages, strict=True):
            node = message.metadata.dst_node_id
            self.tasks.append(dict(message.content["task"]))
            if node in self.silent and message.metadata.message_type != "query":
                continue
            if record := message.content.get(RECORD_KEY_CONFIGS):
                stage = str(record[Key.STAGE])
                self.stages.append((node, stage))
                if self.loses(node, stage, message.metadata.group_id):
                    continue
            try:
                reply = self.answer(message)
            except Exception as error:
                reply = FlowerMessage(Error(2, str(error)), reply_to=message)
            self.tamper(node, reply)
            self.sent.append(reply)
            self.replies[name] = reply
        return names

    def pull_messages(self, names):
        return [self.replies.pop(name) for name in list(names) if name in self.replies]


#: what is done to a grid before its run, such as `changed`
Prepare = Callable[[LoopGrid, pytest.MonkeyPatch], object]


def changed(change: Callable[[RecordDict], object], client: int = 1, kind: str = "train") -> Prepare:
    """Change a client's answers of a kind (train, evaluate or query) on their way."""

    def tamper(node: int, reply: FlowerMessage) -> None:
        if (node, reply.metadata.message_type) == (11 + client, kind) and reply.has_content():
            change(reply.content)

    return lambda grid, patch: patch.setattr(grid, "tamper", tamper)


def after_training(change: Callable[[Message], object], client: int = 1) -> Prepare:
    """Change a client's message once it has trained, or do something else there."""

    def prepare(grid: LoopGrid, patch: pytest.MonkeyPatch) -> None:
        real = Method.client_round

        def client_round(method, trained, *arguments):
            reply = real(method, trained, *arguments)
            if trained.index == client:
                change(reply)
            return reply

        patch.setattr(Method, "client_round", client_round)

    return prepare


def silent(node: int) -> Prepare:
    """A node answers no round."""
    return lambda grid, patch: patch.setattr(grid, "silent", {node})


class Faults(Observer):
    """Keeps the warnings, and prepares a grid for rounds by their numbers, for each round alone."""

    def __init__(self, grid: LoopGrid, faults: dict[int, Prepare]):
        self.grid, self.faults, self.patch = grid, faults, pytest.MonkeyPatch()
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def run_began(self, recipe: Recipe, path: Path, first_round: int) -> None:
        self.prepare(first_round)

    def round_ended(self, number: int, rows: object) -> None:
        self.patch.undo()
        self.prepare(number + 1)

    def run_ended(self, finished: bool) -> None:
        self.patch.undo()

    def prepare(self, number: int) -> None:
        if fault := self.faults.get(number):
            fault(self.grid, self.patch)


HOSPITALS = ("hospital-a", "hospital-b", "hospital-c")
KEYS = {name: ec.generate_private_key(ec.SECP384R1()).public_key() for name in (*HOSPITALS, "stranger")}
PRINTS = {name: key_fingerprint(key) for name, key in KEYS.items()}


class LoopRun:
    """A run's folder, and its nodes from number 11 on: simulated ones, or one for each site file."""

    def __init__(self, recipe: Recipe, path: Path, sites: list[Path] | None = None):
        self.recipe, self.path = recipe, path
        federation = build_federation(recipe)
        self.directory = RunDirectory.create(path, first_files(federation) | ({SITES_RUN: "run"} if sites else {}))
        own: list[dict[str, Any]] = [{} for _ in federation.client_rows]
        app = simulated_app(federation, path)
        if sites:
            own, app = [{"site": str(file)} for file in sites], make_client_app((path / "recipe.yaml").absolute())
        self.grid = LoopGrid(app, {11 + i: config for i, config in enumerate(own)})
        #: the nodes that are there, each with its client or why it has none
        self.look: Callable[[], dict[int, int | str]] = lambda: {node: node - 11 for node in self.grid.contexts}

    def bind(self, owners: Iterable[str] = HOSPITALS, keys: dict[str, str] | None = None) -> None:
        """Let the nodes from 11 on have the keys of these owners, and write the server's manifest of the hospitals."""
        publics = [public_key_to_bytes(KEYS[owner]) for owner in owners]
        nodes = [SimpleNamespace(node_id=11 + i, public_key=public) for i, public in enumerate(publics)]
        self.grid.get_nodes = lambda: nodes
        self.look = lambda: bound_clients(self.grid)
        listed = keys or {name: PRINTS[name] for name in HOSPITALS}
        manifest_of_run().write_text(yaml.safe_dump({"sites": listed}, sort_keys=False))

    def register(self) -> list[str]:
        """Register the nodes, and run nothing; the warnings."""
        return self.go(rounds=False)

    def go(self, faults: dict[int, Prepare] | None = None, rounds: bool = True) -> list[str]:
        """Run the rounds that are left, with faults by round; the warnings."""
        self.directory = RunDirectory.open(self.path)
        self.directory.roll_back()
        told = Faults(self.grid, faults or {})
        federation = private_federation(build_federation(self.recipe))
        connected = ConnectedClients(Messenger(self.grid), lambda: self.look(), federation, told, "run")
        connected.require_enough()
        if rounds:
            run_rounds(federation, self.directory, told, FlowerClients(connected, federation, self.directory, told))
        return told.warnings

    def metric(self, name: str, number: int) -> dict[str, float]:
        return metric(self.path, name, number)


def write_sites(folder: Path, count: int = 3, own: dict[int, dict] | None = None, **keys) -> list[Path]:
    """Site files for the first clients, each with further keys; `own` has those of one client."""
    files = []
    for k in range(count):
        file = folder / f"site{k}.yaml"
        values = {"state": str(folder / f"state{k}")} | keys | (own or {}).get(k, {})
        file.write_text(yaml.safe_dump(values))
        files.append(file)
    return files


# Runs with Flower's privacy, and what their results are compared by


HUGE = {"name": "fixed_clipping", "clipping_norm": 1e9, "noise_multiplier": 0}
SECURE = {"name": "secagg_plus", "max_weight": 60}
WEIGHTS = AVERAGED | SMALL
EQUAL = WEIGHTS | {"partition": {"name": "iid", "clients": 3}}  # differential privacy counts all clients the same
#: with small steps: rounding by the masks or by clipping stays small
LAYER_WISE = LW_FEDSSL | SMALL | {"training": {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.001}}


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
