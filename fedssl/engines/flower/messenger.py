"""Send messages to Flower's nodes over its grid and collect their answers.

An answer is data from outside: it may be missing, broken or far too large. It is counted while its objects arrive, and
an answer that is not whole does not keep the others waiting.
"""

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Array, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.supercore.inflatable import inflatable_object as objects
from google.protobuf.message import DecodeError

#: the code of an error that `fedssl superlink` puts in the place of an answer that it does not take
REFUSED_BY_SUPERLINK = 1000
#: other errors that the SuperLink answers in a node's place; a message expires at the round's deadline
_SUPERLINK_REASONS = {
    ErrorCode.NODE_UNAVAILABLE: "its node is no longer connected",
    ErrorCode.MESSAGE_UNAVAILABLE: "no answer in time",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "no answer in time",
}
#: errors that Flower raises for an answer of a wrong form
_PYTHON_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_UNREADABLE = (DecodeError, objects.UnexpectedObjectContentError, *_PYTHON_ERRORS)
#: bytes of a registration or of an answer that holds an evaluation alone
LARGEST_WITHOUT_WEIGHTS = 2**22
#: reasons for which a site was left out that a message brings it, the latest ones
MOST_REASONS = 10
#: bytes of an answer's records without the pieces of arrays; as Python's numbers they take thirty times as much
_LARGEST_RECORDS = 2**22


class TooLarge(Exception):
    """An answer is larger than allowed; the text is the reason for the log."""


class NotWhole(Exception):
    """Some objects of an answer have not arrived at the SuperLink yet."""


class ArrivingAnswer:
    """The answer to one message, of at most `largest` bytes, whose objects arrive in any order.

    The grid may be asked for it several times.
    """

    def __init__(self, largest: int):
        self._largest = largest
        self._announced: Any = None  # Flower's response; the SuperLink gives it once
        self._missing: PullObjectRequest | None = None
        self._seen: set[str] = set()  # the objects that have arrived
        self._lock = threading.Lock()  # Flower pulls several at a time
        self._record_bytes = 0
        self._received = 0  # bytes of pieces
        self._piece_bytes: dict[str, int] = {}
        self._references: Counter[str] = Counter()  # by the piece's id
        self._array_bytes = 0  # with each piece as often as arrays refer to it

    def add(self, object_id: str, content: bytes) -> None:
        """Count an object; raise TooLarge if the answer is too large with it, one of `_UNREADABLE` if it is broken."""
        if object_id in self._seen:
            return
        kind, children, _ = objects.get_object_head_values_from_object_content(content)
        if kind == ArrayChunk.__qualname__:
            self._piece_bytes[object_id] = len(content)
            self._received += len(content)
            self._array_bytes += self._references[object_id] * len(content)
        else:
            self._record_bytes += len(content)
            if self._record_bytes > _LARGEST_RECORDS:
                most_bytes = f"{_LARGEST_RECORDS} bytes, the most that they may have here"
                raise TooLarge(f"its answer's records are larger than {most_bytes}")
            if kind == Array.__qualname__:
                for index in json.loads(objects.get_object_body(content, Array))["arraychunk_ids"]:
                    self._references[children[index]] += 1
                    self._array_bytes += self._piece_bytes.get(children[index], 0)
        if self._record_bytes + max(self._received, self._array_bytes) > self._largest:
            raise TooLarge(f"its answer is larger than {self._largest} bytes, the most that an answer may have here")
        self._seen.add(object_id)

    def pull(self, grid: Any, message_id: str) -> list[FlowerMessage]:
        """Return the answer, or nothing while it is missing or not whole; raise TooLarge if it is too large.

        Flower returns whole answers only. Its grid between machines gets each object by its client's PullObject; there
        they are counted, before the next are asked for. The simulation's grid has no such client.
        """
        client: Any = getattr(grid, "_runtime_client", None)
        if client is None:
            return list(grid.pull_messages([message_id]))
        pull_messages, pull_object = client.PullMessages, client.PullObject

        def announced(request: Any) -> Any:
            if self._announced is None:
                response = pull_messages(request)
                if not response.messages_list:
                    return response
                self._announced = response
            elif (asked := self._missing) is not None:  # what has been seen is not read again before all is there
                trees = self._announced.message_object_trees
                for name in dict.fromkeys(n.object_id for tree in trees for n in objects.iterate_object_tree(tree)):
                    if name not in self._seen:
                        counted(PullObjectRequest(node=asked.node, run_id=asked.run_id, object_id=name))
            return self._announced

        def counted(request: PullObjectRequest) -> Any:
            response = pull_object(request)
            if response.object_content:
                with self._lock:
                    self.add(request.object_id, response.object_content)
            elif response.object_found:
                self._missing = request
                raise NotWhole
            return response  # without content where the SuperLink has given up on the object

        client.PullMessages, client.PullObject = announced, counted
        try:
            return list(grid.pull_messages([message_id]))
        except NotWhole:
            return []
        finally:
            client.PullMessages, client.PullObject = pull_messages, pull_object


@dataclass(frozen=True)
class NodeAnswer:
    """One node's answer: its records, or one line that says why there are none.

    `after` is how many seconds it was waited for.
    """

    node: int
    content: RecordDict | None = None
    failure: str | None = None
    after: float = 0.0


class Messenger:
    """Sends messages to nodes and collects their answers, over Flower's `Grid` or what has its methods."""

    def __init__(self, grid: Any):
        self.grid = grid
        self._arriving: dict[str, ArrivingAnswer] = {}  # by message id

    def send(self, kind: str, contents: dict[int, RecordDict], round_number: int, seconds: float) -> dict[str, int]:
        """Send a message to each node; return the nodes by message id, without those that could not be sent to.

        `kind` is Flower's message type: query, train or evaluate. Flower groups messages by `round_number`, and the
        SuperLink keeps them and their answers for `seconds`.
        """
        task: Any = {"message_type": kind, "group_id": str(round_number), "ttl": seconds}
        messages = [FlowerMessage(content, dst_node_id=node, **task) for node, content in contents.items()]
        ids = list(self.grid.push_messages(messages))
        return {message_id: node for message_id, node in zip(ids, contents, strict=False) if message_id}

    def collect(
        self, waiting: dict[str, int], seconds: float, largest: int, patience: Callable[[], float] = lambda: math.inf
    ) -> Iterator[NodeAnswer]:
        """Yield answers of at most `largest` bytes as they arrive, until all are there or the time is over.

        Nodes that have answered are removed from `waiting`. With 0 seconds every answer is looked for once. The time is
        over too after as many seconds as `patience` returns, which is asked again after each look.
        """
        began, pauses = time.monotonic(), growing_pauses()
        while waiting:
            for message_id, node in list(waiting.items()):
                if (answer := self._pull(message_id, node, largest)) is not None:
                    del waiting[message_id], self._arriving[message_id]
                    yield replace(answer, after=time.monotonic() - began)
            if not waiting or time.monotonic() - began >= min(seconds, patience()):
                return
            time.sleep(next(pauses))

    def _pull(self, message_id: str, node: int, largest: int) -> NodeAnswer | None:
        """Return the answer to one message; None while it is missing or not whole."""
        arriving = self._arriving.setdefault(message_id, ArrivingAnswer(largest))
        try:  # one at a time: where one answer cannot be read, Flower returns none of those asked for
            replies = arriving.pull(self.grid, message_id)
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
    """Yield seconds to wait between two looks for answers, from 0.1 to 2: each look is a request to the SuperLink."""
    pause = 0.1
    while True:
        yield pause
        pause = min(1.3 * pause, 2.0)


def config_of(content: RecordDict, name: str) -> dict[str, Any]:
    """Return a config record as a plain mapping; empty where there is no such record."""
    record = content.get(name)
    return dict(record) if isinstance(record, ConfigRecord) else {}


def one_line(text: str) -> str:
    """Return a text from outside as one line of at most 500 characters."""
    return " ".join(text.split())[:500]
