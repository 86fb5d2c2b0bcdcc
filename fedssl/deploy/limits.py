"""Limits of a site's answer at the SuperLink; the reverse proxy in front of it (nginx) limits all requests before.

Flower takes an answer in any site's name and of any number of pieces, each of which is work for its database.
"""

from typing import Any

from fastapi import HTTPException
from flwr.app.error import Error
from flwr.app.message import make_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.superlink.servicer.fleet import fleet_handlers

from ..engines.flower.messenger import REFUSED_BY_SUPERLINK

#: objects of an answer: records, arrays and the arrays' pieces of 5 MiB; also limits the database's work
MOST_OBJECTS = 1000

_push_messages = fleet_handlers.push_messages


def limit_answers() -> None:
    """Change Flower's modules in this process, which then runs `flower-superlink`."""
    fleet_handlers.push_messages = push_messages


def push_messages(request: PushMessagesRequest, state: Any) -> PushMessagesResponse:
    """Handle a site's announcement of an answer as Flower does, with limits.

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
    objects = [tree]
    for node in objects:  # the list grows by every node's children; recursion would be limited
        objects.extend(node.children)
    if len(objects) <= MOST_OBJECTS:
        return _push_messages(request, state)
    reason = f"its answer has {len(objects)} pieces, more than {MOST_OBJECTS}, the most that the SuperLink takes"
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
