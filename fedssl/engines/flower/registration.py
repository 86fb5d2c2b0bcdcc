"""Register nodes as clients: tell every new node which client it is, and ask whether its images fit the server's.

A node is a connection of Flower's with an id of its own. A site that is started again has the one that it had, as its
key is registered.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from flwr.app import ConfigRecord, RecordDict

from fedkernels import __version__

from ...errors import UserError
from ...federation import Federation
from ...recipe.recipe import FlowerOptions
from ...recipe.rules import public_image_users
from ...untrusted import listed
from ..observers import Observer
from .messenger import LARGEST_WITHOUT_WEIGHTS, Messenger, NodeAnswer, config_of, growing_pauses

_REGISTRATION_SECONDS = 5.0  # that a round waits for a node that has just connected, where it lacks a client
_ASK_AGAIN_SECONDS = 30.0
_MOST_IMAGES = 10**9  # of a client


@dataclass(frozen=True)
class DataForm:
    """The form that the sites' images must have; it holds nothing that the run does not need.

    Attributes:
        shape: channels, height and width.
        classes: in their order; empty where nothing trains on labels.
        public: equal at two sites only if their public images are; empty where the run uses none.
    """

    shape: list[int]
    classes: list[str]
    public: str

    @classmethod
    def of(cls, federation: Federation) -> DataForm:
        """Return the form of a federation's images."""
        recipe, dataset = federation.recipe, federation.dataset
        public = dataset.public_images if public_image_users(recipe) else None
        digest = hashlib.sha256()
        if public is not None:
            digest.update(str(list(public.shape)).encode())
            digest.update(public.contiguous().numpy().tobytes())
        return cls(
            shape=list(dataset.train_images.shape[1:]),
            classes=list(dataset.class_names) if recipe.objective.needs_labels else [],
            public="" if public is None else digest.hexdigest()[:32],
        )

    def misfit(self, expected: DataForm) -> str | None:
        """Return why a site's images of this form do not fit the server's; None where they do."""
        if self.shape != expected.shape:
            own, wanted = (" x ".join(map(str, shape)) for shape in (self.shape, expected.shape))
            channels = [f"channels: {expected.shape[0]}"] if self.shape[0] != expected.shape[0] else []
            size = [f"image_size: {expected.shape[1]}"] if self.shape[1:] != expected.shape[1:] else []
            return (
                f"its images are {own} (channels x height x width), but the server's are {wanted}: set "
                f"{' and '.join(channels + size)} under data in the site's file"
            )
        if self.public != expected.public:
            return "its public images differ from the server's: give all sites the same file as data.public_path"
        if expected.classes and self.classes != expected.classes:
            other = sorted({*self.classes} ^ {*expected.classes})  # none where the order alone differs
            names = listed([repr(name[:40]) for name in other or expected.classes], most=3)
            return f"its classes differ from those that the objective trains on, or their order: {names}; rename them"
        return None


def counts_are_private(options: FlowerOptions) -> bool:
    """Return whether clients do not say how many images they have."""
    return options.differential_privacy is not None or options.secure_aggregation is not None


class ConnectedClients:
    """The clients whose nodes are connected.

    Attributes:
        messenger: reaches the nodes.
        run: the run's name at the sites.
        nodes: the connected clients' nodes.
        images: the number of training images of each client that has stated it.
    """

    def __init__(
        self,
        messenger: Messenger,
        look: Callable[[], Mapping[int, int | str]],
        federation: Federation,
        progress: Observer,
        run: str,
    ):
        """Connect no client yet; `look` returns the nodes that are there, each with its client or why it has none."""
        self.messenger, self._look, self.run = messenger, look, run
        self.nodes: dict[int, int] = {}
        self.images: dict[int, int] = {}
        self._federation, self._progress = federation, progress
        self._options = federation.recipe.flower
        self._waiting: dict[str, int] = {}  # nodes that have not answered yet, by the message that asks them
        self._ask_at: dict[int, float] = {}  # when to ask a node that is not registered by then
        self._expected = DataForm.of(federation)
        self._client_of: dict[int, int] = {}  # of the nodes that were asked
        self._left_out: dict[int, str] = {}  # the reason, by node

    def require_enough(self) -> None:
        """Wait for all clients before a run begins; raise UserError if too few connect in time whose data fit."""
        clients = len(self._federation.client_rows)
        self._wait(set(range(clients)), self._options.connect_seconds)
        missing = sorted(set(range(clients)) - self.nodes.keys())
        least = self._federation.recipe.guard.minimum_answers
        if len(self.nodes) < least:
            reasons = [f"node {node} is left out: {reason}" for node, reason in sorted(self._left_out.items())]
            problem = (
                f"{len(self.nodes)} of {clients} clients are connected after {self._options.connect_seconds:g} s "
                f"(flower.connect_seconds), but guard.minimum_answers is {least}; not connected: "
                f"{', '.join(map(str, missing))}"
            )
            raise UserError("; ".join([problem, *reasons, "start or mend these clients' SuperNodes and run again"]))
        for k in missing:
            what = "left out" if self._reason(k) else "not connected"
            self._progress.warn(f"client {k} is {what}: the run begins without it")

    def absence(self, client: int) -> str:
        """Return why a client takes no part in a round."""
        return self._reason(client) or "it is not connected"

    def _reason(self, client: int) -> str | None:
        return next((reason for node, reason in self._left_out.items() if self._client_of.get(node) == client), None)

    def wait_for(self, clients: set[int]) -> None:
        """Wait for the clients of a round, but only until guard.minimum_answers of them are connected."""
        enough = len(clients & self.nodes.keys()) >= self._federation.recipe.guard.minimum_answers
        self._wait(clients, 0.0 if enough else self._options.connect_seconds)

    def _wait(self, clients: set[int], seconds: float) -> None:
        deadline, pauses = time.monotonic() + seconds, growing_pauses()
        while True:
            if self._ask_new_nodes():
                deadline = max(deadline, time.monotonic() + _REGISTRATION_SECONDS)
            for answer in self.messenger.collect(self._waiting, 0.0, LARGEST_WITHOUT_WEIGHTS):
                self._register(answer)
            if clients <= self.nodes.keys() or time.monotonic() >= deadline:
                return
            time.sleep(next(pauses))

    def _ask_new_nodes(self) -> bool:
        """Ask nodes for their clients' images; return whether any is asked for the first time."""
        found, clients = self._look(), len(self._federation.client_rows)  # those that the SuperLink has heard of lately
        self.nodes = {k: node for k, node in self.nodes.items() if node in found}
        self._ask_at = {node: at for node, at in self._ask_at.items() if node in found}
        self._left_out = {node: reason for node, reason in self._left_out.items() if node in found}
        known = set(self.nodes.values())
        self._waiting = {message: node for message, node in self._waiting.items() if node not in known}
        due = [node for node in found if node not in known and time.monotonic() >= self._ask_at.get(node, 0.0)]
        if not due:
            return False
        first_time = any(node not in self._ask_at for node in due)
        # once more, as what was asked is lost with a process that ended; no oftener, as a site may only be slow
        later = time.monotonic() + max(_ASK_AGAIN_SECONDS, self._options.connect_seconds)
        asked = set(self._waiting.values())
        self._ask_at |= {node: float("inf") if node in asked else later for node in due}
        contents, expected = {}, ConfigRecord(asdict(self._expected))
        for node in due:
            k = found[node]
            if isinstance(k, str):
                self._leave_out(node, k)
            elif k >= clients:
                self._leave_out(node, f"its key is that of client {k}, but the recipe has partition.clients={clients}")
            else:
                self._client_of[node] = k
                task = ConfigRecord({"run": self.run, "version": __version__, "client": k})
                contents[node] = RecordDict({"task": task, "expected": expected})
        seconds = self._options.connect_seconds + self._options.round_seconds  # the next look may be a round later
        if contents:
            self._waiting |= self.messenger.send("query", contents, 0, seconds)
        return first_time

    def _register(self, answer: NodeAnswer) -> None:
        """Register a node's client as connected, or warn why it is left out."""
        k = self._client_of[answer.node]
        if answer.content is None:
            self._leave_out(answer.node, str(answer.failure))
        elif fault := self._images_fault(k, config_of(answer.content, "answer").get("images")):
            self._leave_out(answer.node, fault)
        else:
            self.nodes[k] = answer.node
            self._left_out.pop(answer.node, None)

    def _leave_out(self, node: int, failure: str) -> None:
        self._ask_at[node] = time.monotonic() + _ASK_AGAIN_SECONDS
        if self._left_out.get(node) != failure:  # it is asked again and again
            self._left_out[node] = failure
            self._progress.warn(f"node {node} is left out: {failure}")

    def _images_fault(self, client: int, images: object) -> str | None:
        """Note how many training images a client states; return why that leaves it out, if it does."""
        private = counts_are_private(self._options)
        if type(images) is not int or not (images == 0 if private else 0 < images <= _MOST_IMAGES):
            return f"it states {str(images)[:20]} images: expected {'none' if private else f'1 to {_MOST_IMAGES}'}"
        before = self.images.pop(client, images)
        if images != before:
            self._progress.warn(f"client {client} states {images} images, and {before} when it connected before")
        if images:
            self.images[client] = images
        return None
