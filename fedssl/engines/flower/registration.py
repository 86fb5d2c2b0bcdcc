"""Register nodes as clients: ask every new node which client it is, and compare its data with the server's.

A node is a connection of Flower's with an id of its own. A site that is started again has a new one, or with a
registered key the one that it had.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, RecordDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedkernels import __version__

from ...errors import UserError
from ...federation import Federation
from ...recipe.recipe import FlowerOptions
from ...recipe.rules import public_image_users
from ...untrusted import listed
from ..observers import Observer
from .messenger import LARGEST_WITHOUT_WEIGHTS, Messenger, NodeAnswer, config_of, growing_pauses
from .site_keys import VARIABLE, bound_clients, read_manifest

_REGISTRATION_SECONDS = 5.0  # that a round waits for a node that has just connected, where it lacks a client
_ASK_AGAIN_SECONDS = 30.0


class DataForm(BaseModel):
    """The form of a site's images, as it registers them; it holds nothing that the run does not need."""

    model_config = ConfigDict(strict=True)

    shape: list[int] = Field(min_length=3, max_length=3, description="channels, height and width")
    classes: list[str] = Field(max_length=100_000, description="in their order; empty where nothing trains on labels")
    images: int = Field(ge=0, le=10**9, description="training images; 0 where the site does not say how many")
    public: str = Field(description="equal at two sites only if their public images are; empty where the run uses none")

    @classmethod
    def of(cls, federation: Federation, client: int | None = None) -> DataForm:
        """Return the form of a federation's images, and how many a client has, if given.

        Under differential privacy or secure aggregation a client does not say how many it has.
        """
        recipe, dataset = federation.recipe, federation.dataset
        public = dataset.public_images if public_image_users(recipe) else None
        digest = hashlib.sha256()
        if public is not None:
            digest.update(str(list(public.shape)).encode())
            digest.update(public.contiguous().numpy().tobytes())
        return cls.model_construct(  # the server validates it
            shape=list(dataset.train_images.shape[1:]),
            classes=list(dataset.class_names) if recipe.objective.needs_labels else [],
            images=0 if client is None or _is_private(recipe.flower) else len(federation.client_rows[client]),
            public="" if public is None else digest.hexdigest()[:32],
        )

    def misfit(self, expected: DataForm) -> str | None:
        """Return why images of this form do not fit the server's, to follow the site's name; None where they do."""
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


def _is_private(options: FlowerOptions) -> bool:
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

    def __init__(self, messenger: Messenger, federation: Federation, progress: Observer, run: str):
        self.messenger, self.run = messenger, run
        self.nodes: dict[int, int] = {}
        self.images: dict[int, int] = {}
        self._federation, self._progress = federation, progress
        self._options = federation.recipe.flower
        self._waiting: dict[str, int] = {}  # nodes that have not answered yet, by the message that asks them
        self._ask_at: dict[int, float] = {}  # when to ask a node that is not registered by then
        self._expected = DataForm.of(federation)
        # it binds the sites' keys to clients' numbers; without keys there is none
        self._manifest = Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
        self._bound: dict[int, int] = {}  # by node, the client that its key is registered for
        self._left_out: dict[int, tuple[int | None, str]] = {}  # the client, if known, and the reason, by node

    def require_enough(self) -> None:
        """Wait for all clients before a run begins; raise UserError if too few connect in time whose data fit."""
        if self._manifest is not None:
            read_manifest(self._manifest)  # one that is missing or wrong is told before anyone is asked
        clients = len(self._federation.client_rows)
        self._wait(set(range(clients)), self._options.connect_seconds)
        missing = sorted(set(range(clients)) - self.nodes.keys())
        least = self._federation.recipe.guard.minimum_answers
        if len(self.nodes) < least:
            reasons = [f"node {node} is left out: {reason}" for node, (_, reason) in sorted(self._left_out.items())]
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
        return next((reason for other, reason in self._left_out.values() if other == client), None)

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
        """Ask nodes which client they are; return whether any is asked for the first time."""
        connected = set(self.messenger.grid.get_node_ids())  # those that the SuperLink has heard of lately
        self.nodes = {k: node for k, node in self.nodes.items() if node in connected}
        self._ask_at = {node: at for node, at in self._ask_at.items() if node in connected}
        self._left_out = {node: reason for node, reason in self._left_out.items() if node in connected}
        known = set(self.nodes.values())
        self._waiting = {message: node for message, node in self._waiting.items() if node not in known}
        due = [node for node in connected - known if time.monotonic() >= self._ask_at.get(node, 0.0)]
        if not due:
            return False
        first_time = any(node not in self._ask_at for node in due)
        # once more, as what was asked is lost with a process that ended; no oftener, as a site may only be slow
        later = time.monotonic() + max(_ASK_AGAIN_SECONDS, self._options.connect_seconds)
        asked = set(self._waiting.values())
        self._ask_at |= {node: float("inf") if node in asked else later for node in due}
        bound: Mapping[int, int | str | None] = dict.fromkeys(due)
        if self._manifest is not None:
            bound = bound_clients(self.messenger.grid, self._manifest)
        contents, expected = {}, ConfigRecord(self._expected.model_dump())
        for node in due:
            question: dict[str, Any] = {"run": self.run, "version": __version__}
            client = bound.get(node, "it is no longer connected")
            if isinstance(client, str):
                self._leave_out(node, client)
                continue
            if client is not None:
                self._bound[node] = question["client"] = client  # so that an honest site tells its own log
            contents[node] = RecordDict({"task": ConfigRecord(question), "expected": expected})
        seconds = self._options.connect_seconds + self._options.round_seconds  # the next look may be a round later
        if contents:
            self._waiting |= self.messenger.send("query", contents, 0, seconds)
        return first_time

    def _register(self, answer: NodeAnswer) -> None:
        """Register a node's client as connected, or warn why it is left out."""
        content, bound, clients = answer.content, self._bound.get(answer.node), len(self._federation.client_rows)
        k = answer.client if bound is None else bound
        if content is not None:
            k = config_of(content, "answer").get("client")
        is_client = type(k) is int and 0 <= k < clients
        if content is None:
            failure = str(answer.failure)
        elif not is_client:
            failure = f"its client number is invalid: expected 0 to {clients - 1}, got {str(k)[:100]}"
        elif bound not in (None, k):
            failure = f"it answers as client {k}, but its key is registered for client {bound}"
        elif self.nodes.get(k, answer.node) != answer.node:
            failure = (
                f"its site file names client {k}, but node {self.nodes[k]} is already client {k}: "
                "give each site a client number of its own"
            )
        elif (fault := self._data_fault(k, content)) is not None:
            failure = fault
        else:
            self.nodes[k] = answer.node
            self._left_out.pop(answer.node, None)
            return
        self._leave_out(answer.node, failure, k if is_client and k not in self.nodes else None)

    def _leave_out(self, node: int, failure: str, client: int | None = None) -> None:
        self._ask_at[node] = time.monotonic() + _ASK_AGAIN_SECONDS
        if self._left_out.get(node) != (client, failure):  # it is asked again and again
            self._left_out[node] = (client, failure)
            self._progress.warn(f"node {node} is left out: {failure}")

    def _data_fault(self, client: int, content: RecordDict) -> str | None:
        """Return why a client's images leave it out, if they do; an honest site has found that itself."""
        try:
            form = DataForm.model_validate(config_of(content, "data"))
        except ValidationError:
            return "it does not describe its images: expected valid shape, classes, public and images"
        if fault := form.misfit(self._expected):
            return fault
        if not (form.images or _is_private(self._options)):
            return "it states no images: expected at least 1"
        before = self.images.pop(client, form.images)
        if form.images != before:
            self._progress.warn(f"client {client} states {form.images} images, and {before} when it connected before")
        if form.images:
            self.images[client] = form.images
        return None
