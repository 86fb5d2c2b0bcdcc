"""Which node is which client: every new node is asked, and its data are compared with the server's.

A node is a connection of Flower's with an id of its own; a site that is started again has a new one.
"""

from __future__ import annotations

import functools
import hashlib
import time
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedkernels import __version__

from ...errors import UserError
from ...federation import Federation
from ...recipe.rules import public_image_users
from ..observers import Observer
from .messenger import Messenger, NodeAnswer, config_of, growing_pauses

_MOST_CLASSES = 100_000


_MOST_IMAGES = 10**9  # of one site; its weights count by them


@dataclass(frozen=True)
class DataForm:
    """What a site's images look like.

    Attributes:
        shape: channels, height and width.
        classes: the names of the classes in their order; empty where the run uses no labels of the sites.
        public_digest: the digest of the public images; empty where the run uses none.
        images: how many training images the client has; 0 where that is not told.
    """

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    public_digest: str
    images: int = 0

    @classmethod
    def of(cls, federation: Federation, client: int | None = None) -> DataForm:
        """The form of a federation's images, and of a client's. It holds nothing that the run does not need.

        Under differential privacy or secure aggregation the number of a client's images is its own.
        """
        recipe, dataset = federation.recipe, federation.dataset
        private = recipe.flower.differential_privacy is not None or recipe.flower.secure_aggregation is not None
        labels_used = recipe.objective.needs_labels or federation.method.personal  # a site evaluates its own model
        return cls(
            tuple(dataset.train_images.shape[1:]),
            dataset.class_names if labels_used else (),
            digest_of_public_images(federation) if public_image_users(recipe) else "",
            0 if client is None or private else len(federation.client_rows[client]),
        )

    def to_record(self) -> ConfigRecord:
        """The form as a record of a Flower message."""
        values: dict[str, Any] = {"shape": list(self.shape), "classes": list(self.classes), "images": self.images}
        return ConfigRecord(values | {"public": self.public_digest})

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> DataForm | None:
        """The form in a record of `to_record`; None where the record holds none."""
        values: list[Any] = [record.get(name) for name in ("shape", "classes", "public", "images")]
        shape, classes, public_digest, images = values
        valid = (
            isinstance(shape, list)
            and len(shape) == 3
            and all(type(size) is int for size in shape)
            and isinstance(classes, list)
            and len(classes) <= _MOST_CLASSES
            and all(isinstance(name, str) for name in classes)
            and isinstance(public_digest, str)
            and type(images) is int
            and 0 <= images <= _MOST_IMAGES
        )
        return cls(tuple(shape), tuple(classes), public_digest, images) if valid else None

    def size_difference(self, server: DataForm) -> str | None:
        """How the images differ from the server's in size or channels, as a sentence; None where they do not."""
        if self.shape == server.shape:
            return None
        own, expected = (" x ".join(map(str, form.shape)) for form in (self, server))
        return f"its images are {own} (channels x height x width), but the server's are {expected}"

    def class_difference(self, other: DataForm) -> str | None:
        """How the classes differ from another's, to follow "it"; None where they do not."""
        if self.classes == other.classes:
            return None
        differences = []
        for verb, some, rest in (("has", self, other), ("lacks", other, self)):
            known = set(rest.classes)
            names = [name for name in some.classes if name not in known]
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                differences.append(f"{verb} {', '.join(repr(name[:40]) for name in names[:3])}{more}")
        return " and ".join(differences) or "has the same classes in another order"


def digest_of_public_images(federation: Federation) -> str:
    """A short text that two sites share only if their public images are the same; empty without such images."""
    images = federation.dataset.public_images
    if images is None:
        return ""
    digest = hashlib.sha256(str(list(images.shape)).encode())
    digest.update(images.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


_ASK_AGAIN_SECONDS = 30.0


_GREETING_SECONDS = 5.0  # that a round waits for a node that has just connected, where it lacks a client


_LARGEST_GREETING = 2**22  # bytes


class ConnectedClients:
    """The clients whose nodes are connected.

    Attributes:
        nodes: each connected client's node.
        images: how many training images each client that has been connected has; not of those that do not tell.
    """

    def __init__(self, messenger: Messenger, federation: Federation, progress: Observer, run: str):
        """Nobody is asked before `require_enough` or `wait_for`; `run` is the run's name at the sites."""
        self.nodes: dict[int, int] = {}
        self.images: dict[int, int] = {}
        self._messenger, self._federation, self._progress, self._run = messenger, federation, progress, run
        self._options = federation.recipe.flower
        self._waiting: dict[str, int] = {}  # nodes that have not answered yet, by the message that asks them
        self._ask_at: dict[int, float] = {}  # when to ask a node; again only where its answer was refused
        self._forms: dict[int, DataForm] = {}  # what the clients' images look like
        self._misfits: dict[int, str] | None = {}  # clients whose data do not fit; None once the run has begun

    def require_enough(self) -> None:
        """Wait for all clients before a run begins.

        Raises:
            UserError: when the time is over, fewer than guard.minimum_answers are connected, or their data do not fit
                together.
        """
        clients = len(self._federation.client_rows)
        self._wait(set(range(clients)), self._options.connect_seconds)
        missing = sorted(set(range(clients)) - self.nodes.keys())
        least = self._federation.recipe.guard.minimum_answers
        if len(self.nodes) < least:
            raise UserError(
                f"{len(self.nodes)} of {clients} clients are connected after {self._options.connect_seconds:g} s "
                f"(flower.connect_seconds), but guard.minimum_answers is {least}; not connected: "
                f"{', '.join(map(str, missing))}; start these clients' SuperNodes and run again"
            )
        if self._misfits:
            reasons = [f"client {k}: {reason}" for k, reason in sorted(self._misfits.items())]
            raise UserError(
                f"the sites' data do not fit together: {'; '.join(reasons)}; change these sites' data or the recipe's"
            )
        self._misfits = None
        for k in missing:
            self._progress.warn(f"client {k} is not connected: the run begins without it")

    def wait_for(self, clients: set[int]) -> None:
        """Wait for the clients of a round, but only until guard.minimum_answers of them are connected."""
        enough = len(clients & self.nodes.keys()) >= self._federation.recipe.guard.minimum_answers
        self._wait(clients, 0.0 if enough else self._options.connect_seconds)

    def _wait(self, clients: set[int], seconds: float) -> None:
        deadline, pauses = time.monotonic() + seconds, growing_pauses()
        while True:
            if self._ask_new_nodes():
                deadline = max(deadline, time.monotonic() + _GREETING_SECONDS)
            for answer in self._messenger.collect(self._waiting, 0.0, _LARGEST_GREETING):
                self._register(answer)
            if clients <= self.nodes.keys() or time.monotonic() >= deadline:
                return
            time.sleep(next(pauses))

    def _ask_new_nodes(self) -> bool:
        """Ask nodes which client they are; whether any is asked for the first time.

        The answer may be looked for after a whole round.
        """
        connected = self._messenger.connected_nodes()
        self.nodes = {k: node for k, node in self.nodes.items() if node in connected}
        self._ask_at = {node: at for node, at in self._ask_at.items() if node in connected}
        due = [node for node in connected if time.monotonic() >= self._ask_at.get(node, 0.0)]
        if not due:
            return False
        question = ConfigRecord({"run": self._run, "version": __version__})
        seconds = self._options.connect_seconds + self._options.round_seconds
        contents = {node: RecordDict({"task": question}) for node in due}
        self._waiting |= self._messenger.send("query", contents, 0, seconds)
        first_time = any(node not in self._ask_at for node in due)
        self._ask_at |= dict.fromkeys(due, float("inf"))
        return first_time

    def _register(self, answer: NodeAnswer) -> None:
        """Take a node's client as connected, or tell why it is left out."""
        failure = answer.failure
        if answer.content is not None:
            k = config_of(answer.content, "answer").get("client")
            clients = len(self._federation.client_rows)
            if type(k) is not int or not 0 <= k < clients:
                failure = f"its client number is invalid: expected 0 to {clients - 1}, got {str(k)[:100]}"
            elif self.nodes.get(k, answer.node) != answer.node:
                failure = (
                    f"its site file names client {k}, but node {self.nodes[k]} is already client {k}: "
                    "give each site a client number of its own"
                )
            elif (failure := self._data_fault(k, answer.content)) is None:
                self.nodes[k] = answer.node
                return
        self._ask_at[answer.node] = time.monotonic() + _ASK_AGAIN_SECONDS
        self._progress.warn(f"node {answer.node} is left out: {failure}")

    def _data_fault(self, client: int, content: RecordDict) -> str | None:
        """Why a client is left out for what its images look like; None where it takes part.

        Before the run has begun, images or classes that do not fit are noted instead: then the run does not begin.
        """
        form = DataForm.from_record(config_of(content, "data"))
        if form is None:
            return "it does not describe its images: expected valid shape, classes, public and images"
        if form.shape == self._server_form.shape and form.public_digest != self._server_form.public_digest:
            return "its public images differ from the server's: give all sites the same file as data.public_path"
        fault = self._difference(client, form)
        self.images.pop(client, None)
        if fault is None and form.images:
            self.images[client] = form.images
        if self._misfits is None:
            return fault
        self._misfits.pop(client, None)  # of an earlier attempt
        if fault:
            self._misfits[client] = fault
        return None

    def _difference(self, client: int, form: DataForm) -> str | None:
        """How a client's images or classes do not fit the server's; None where they do."""
        if fault := form.size_difference(self._server_form):
            return fault
        if self._federation.recipe.objective.needs_labels:
            difference = form.class_difference(self._server_form)
            return difference and f"its classes differ from those that the objective trains on: it {difference}"
        if len(form.classes) > 1:  # with one class there are no labels to speak of
            self._warn_of_classes(client, form)
        return None

    def _warn_of_classes(self, client: int, form: DataForm) -> None:
        if client in self._forms:
            return
        first = min(self._forms, default=client)
        if self._forms and (difference := form.class_difference(self._forms[first])):
            self._progress.warn(
                f"client {client}: its classes differ from those of client {first}: it {difference}; each client is "
                "evaluated on its own classes, so their figures cannot be compared"
            )
        self._forms[client] = form

    @functools.cached_property
    def _server_form(self) -> DataForm:
        return DataForm.of(self._federation)
