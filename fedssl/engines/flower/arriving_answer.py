"""One answer on its way: pulled from Flower's grid when all its objects are at the SuperLink, given up if too large.

A node announces an answer and then uploads its objects. Flower's grid, asked for an answer that has been announced,
waits until the last object is there. A slow node would make all others wait, and one that never uploads its objects
would make them miss the deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flwr.proto.message_pb2 import PullObjectRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

from .answer_size import AnswerSize


class NotWhole(Exception):
    """Some objects of an answer have not arrived at the SuperLink yet."""


class ArrivingAnswer:
    """The answer to one message, for which the grid may be asked several times."""

    def __init__(self, largest: int):
        """Wait for an answer that may have `largest` bytes."""
        self._largest = largest
        self._announced: Any = None  # Flower's response; the SuperLink gives it once
        self._missing: PullObjectRequest | None = None
        self._arrived: set[str] = set()

    @contextmanager
    def pulling(self, grid: Grid) -> Iterator[None]:
        """Let the body call `grid.pull_messages` for this answer; it does not wait, and does not read too much.

        Flower returns whole answers only. Its grid between machines gets each object of an answer by a call of its
        client's PullObject: that is where they are counted, before the next ones are asked for. The simulation's grid
        has no such client; its sites are this machine's own.

        Raises:
            NotWhole: from the body: ask again later.
            TooLarge: from the body: the answer has more than the largest number of bytes.
        """
        client: Any = getattr(grid, "_runtime_client", None)
        if client is None:
            yield
            return
        pull_messages, pull_object = client.PullMessages, client.PullObject
        lock, size = threading.Lock(), AnswerSize(self._largest)

        def announced(request: Any) -> Any:
            if self._announced is None:
                response = pull_messages(request)
                if not response.messages_list:
                    return response
                self._announced = response
            self._look_for_missing(pull_object)
            return self._announced

        def counted(request: PullObjectRequest) -> Any:
            response = pull_object(request)
            if not response.object_content:
                if response.object_found:
                    self._missing = request
                    raise NotWhole
                return response  # the SuperLink has given up on it
            with lock:  # Flower pulls several at a time
                size.add(request.object_id, response.object_content)
                self._arrived.add(request.object_id)
            return response

        client.PullMessages, client.PullObject = announced, counted
        try:
            yield
        finally:
            client.PullMessages, client.PullObject = pull_messages, pull_object

    def _look_for_missing(self, pull_object: Any) -> None:
        """Raise NotWhole where an object is still missing.

        Only objects that have not been seen are asked for, one after another: so each is read twice at the most,
        however often the grid is asked.
        """
        if self._missing is None:
            return
        trees = self._announced.message_object_trees
        for name in dict.fromkeys(node.object_id for tree in trees for node in iterate_object_tree(tree)):
            if name in self._arrived:
                continue
            request = PullObjectRequest(node=self._missing.node, run_id=self._missing.run_id, object_id=name)
            response = pull_object(request)
            if response.object_found and not response.object_content:
                raise NotWhole
            self._arrived.add(name)
