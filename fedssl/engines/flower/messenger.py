"""Messages to Flower's nodes and their answers, over Flower's grid: when to look for an answer, and when to give up.

A node's answer is data from outside: it may be missing, broken or far too large.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError
from google.protobuf.message import DecodeError

from .answer_size import TooLarge
from .arriving_answer import ArrivingAnswer, NotWhole

#: what the SuperLink answers in a node's place; a message expires at the round's deadline
_SUPERLINK_REASONS = {
    ErrorCode.NODE_UNAVAILABLE: "its node is no longer connected",
    ErrorCode.MESSAGE_UNAVAILABLE: "no answer in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "no answer in time",
}
#: the code of an error that `fedssl superlink` puts in the place of an answer that it does not take
REFUSED_BY_SUPERLINK = 1000
#: what Flower raises for an answer of a wrong form
_UNREADABLE = (
    DecodeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    UnexpectedObjectContentError,
)


class Stopped(BaseException):
    """The simulation was interrupted (Ctrl-C)."""


@dataclass(frozen=True)
class NodeAnswer:
    """What one node answered.

    Attributes:
        node: the node's id.
        content: the answer's records; None where the node failed or its answer cannot be used.
        failure: one line that says why there is no content.
    """

    node: int
    content: RecordDict | None = None
    failure: str | None = None


class Messenger:
    """Sends messages to nodes and collects their answers."""

    def __init__(self, grid: Grid, stop: threading.Event):
        """Use a grid until `stop` is set; then `collect` raises `Stopped`."""
        self._grid, self._stop = grid, stop
        self._arriving: dict[str, ArrivingAnswer] = {}  # by message id

    def connected_nodes(self) -> set[int]:
        """The ids of the nodes that the SuperLink has heard of lately."""
        return set(self._grid.get_node_ids())

    def send(self, kind: str, contents: dict[int, RecordDict], round_number: int, seconds: float) -> dict[str, int]:
        """Send a message to each node.

        Args:
            kind: Flower's message type: query, train or evaluate.
            contents: the records for each node.
            round_number: Flower groups messages by it.
            seconds: how long the SuperLink keeps the messages and their answers.

        Returns:
            The nodes by message id, as `collect` takes them; a node whose message could not be sent is missing.
        """
        messages = [
            FlowerMessage(content, dst_node_id=node, message_type=kind, group_id=str(round_number), ttl=seconds)
            for node, content in contents.items()
        ]
        ids = list(self._grid.push_messages(messages))
        return {message_id: node for message_id, node in zip(ids, contents, strict=False) if message_id}

    def collect(self, waiting: dict[str, int], seconds: float, largest: int) -> Iterator[NodeAnswer]:
        """Yield answers as they arrive, until all are there or the time is over.

        Args:
            waiting: nodes by message id. Those that have answered are removed.
            seconds: how long to wait; with 0 every answer is looked for once.
            largest: bytes that an answer may have.

        Raises:
            Stopped: see the class.
        """
        deadline, pauses = time.monotonic() + seconds, growing_pauses()
        while waiting:
            if self._stop.is_set():
                raise Stopped
            for message_id, node in list(waiting.items()):
                answer = self._pull(message_id, node, largest)
                if answer is not None:
                    del waiting[message_id]
                    self._arriving.pop(message_id, None)
                    yield answer
            if not waiting or time.monotonic() >= deadline:
                return
            time.sleep(next(pauses))

    def _pull(self, message_id: str, node: int, largest: int) -> NodeAnswer | None:
        """The answer to one message; None while there is none, or not all of it.

        One message at a time: where one answer cannot be read, Flower returns none of those that it was asked for.
        """
        arriving = self._arriving.setdefault(message_id, ArrivingAnswer(largest))
        try:
            with arriving.pulling(self._grid):
                replies = list(self._grid.pull_messages([message_id]))
        except NotWhole:
            return None
        except TooLarge as error:
            return NodeAnswer(node, failure=str(error))
        except _UNREADABLE as error:
            return NodeAnswer(node, failure=f"its answer cannot be read: {one_line(str(error))}")
        if not replies:
            return None
        reply = replies[0]
        if reply.has_error():
            code, reason = reply.error.code, one_line(reply.error.reason or "no reason given")
            if code != REFUSED_BY_SUPERLINK:
                reason = _SUPERLINK_REASONS.get(code, f"its app failed: {reason}")
            return NodeAnswer(node, failure=reason)
        if "failure" in reply.content:
            return NodeAnswer(node, failure=one_line(str(config_of(reply.content, "failure").get("reason"))))
        return NodeAnswer(node, reply.content)


def growing_pauses() -> Iterator[float]:
    """Seconds between two looks for answers, from 0.1 to 2: each look is a request to the SuperLink."""
    pause = 0.1
    while True:
        yield pause
        pause = min(1.3 * pause, 2.0)


def config_of(content: RecordDict, name: str) -> dict[str, Any]:
    """A config record as a plain mapping; empty where there is no such record."""
    record = content.get(name)
    return dict(record) if isinstance(record, ConfigRecord) else {}


def one_line(text: str) -> str:
    """A text from outside as one line of at most 500 characters."""
    return " ".join(text.split())[:500]
