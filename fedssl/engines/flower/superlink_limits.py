"""Limits that Flower's SuperLink lacks, put into its process before it starts.

Without them one site can stop the SuperLink for everyone. Flower enters each object of an announced answer into its
database, all in one transaction: for 20,000 of them that takes longer than every other request waits for the database
(5 s). These then fail, the sites' SuperNodes end, and so does the process that starts runs.
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from flwr.app.error import Error
from flwr.app.message import make_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore import sql_mixin
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.superlink import extensions
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.middleware import Middleware

from .messenger import REFUSED_BY_SUPERLINK
from .request_limits import RequestLimits

#: of an answer: records, arrays and the arrays' pieces of 5 MiB; also a bound of the database's work
MOST_OBJECTS = 1000
#: milliseconds that a request waits for the database while another one writes
_DATABASE_WAIT = 120_000

_push_messages = fleet_handlers.push_messages


def limit_superlink() -> None:
    """Change Flower's modules in this process, which then runs `flower-superlink`."""
    extensions.get_middleware = lambda: (Middleware(RequestLimits),)
    fleet_handlers.push_messages = push_messages
    pragmas = dict(sql_mixin.SQLITE_PRAGMAS) | {"busy_timeout": str(_DATABASE_WAIT)}
    sql_mixin.SQLITE_PRAGMAS = tuple(pragmas.items())  # type: ignore[assignment]


def push_messages(request: PushMessagesRequest, state: Any) -> PushMessagesResponse:
    """Flower's handler for a site that announces an answer, with limits.

    An answer of too many objects is replaced by an error with the reason, so that the run does not wait for it.

    Raises:
        HTTPException: the answer is another site's, or not the one whose objects are announced.
    """
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        raise HTTPException(400, "expected one message and its objects")
    [message], [tree] = request.messages_list, request.message_object_trees
    if message.metadata.src_node_id != request.node.node_id:
        raise HTTPException(403, "a site may answer in its own name only")
    if message.metadata.message_id != tree.object_id:
        raise HTTPException(400, "the objects are not those of the message")
    objects = _count(tree)
    if objects <= MOST_OBJECTS:
        return _push_messages(request, state)
    reason = f"its answer has {objects} pieces, more than {MOST_OBJECTS}, the most that the SuperLink takes"
    refusal = make_message(message_from_proto(message).metadata, error=Error(REFUSED_BY_SUPERLINK, reason))
    refusal.metadata.__dict__["_message_id"] = refusal.object_id
    answer = PushMessagesRequest(
        node=request.node,
        messages_list=[message_to_proto(refusal)],
        message_object_trees=[get_object_tree(refusal)],
    )
    response = _push_messages(answer, state)
    state.store_object(message.metadata.run_id, response.session_id, refusal.object_id, refusal.deflate())
    return PushMessagesResponse(results={message.metadata.message_id: 0}, session_id=response.session_id)


def _count(tree: ObjectTree) -> int:
    objects, left = 0, [tree]
    while left:
        node = left.pop()
        objects += 1
        left.extend(node.children)
    return objects
