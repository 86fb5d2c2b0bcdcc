"""What the SuperLink takes of a site's answer, without a SuperLink."""

import time
from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from flwr.app import ConfigRecord, Metadata, RecordDict
from flwr.app.message import Message, make_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree

from fedssl.deploy import nodes
from fedssl.deploy.nodes import MOST_OBJECTS, push_messages
from fedssl.engines.flower.messenger import REFUSED_BY_SUPERLINK

OTHERS = 2  # objects of an answer besides its records' content: the message itself and its records


def announcement(records: int, node: int = 7) -> PushMessagesRequest:
    """What node 7 announces of an answer with so many records, and node 7's or another's name on it."""
    content = RecordDict({f"r{i}": ConfigRecord({"i": i}) for i in range(records)})
    answer = make_message(Metadata(1, "", node, 1, "asked", "", time.time(), 60.0, "train"), content=content)
    answer.metadata.__dict__["_message_id"] = answer.object_id
    tree = get_object_tree(answer)
    bare = make_message(answer.metadata, content=RecordDict())
    return PushMessagesRequest(
        node=Node(node_id=7), messages_list=[message_to_proto(bare)], message_object_trees=[tree]
    )


@pytest.fixture
def taken(monkeypatch) -> list[PushMessagesRequest]:
    """The announcements that reach Flower's own handler."""
    requests: list[PushMessagesRequest] = []

    def handler(request, state):
        requests.append(request)
        return PushMessagesResponse(objects_to_push=["some"], session_id="session")

    monkeypatch.setattr(nodes, "_push_messages", handler)
    return requests


def test_in_the_place_of_an_answer_of_too_many_objects_stands_an_error(taken):
    most = announcement(MOST_OBJECTS - OTHERS)
    assert list(push_messages(most, None).objects_to_push) == ["some"]
    assert taken.pop() == most
    stored = []
    state = SimpleNamespace(store_object=lambda *arguments: stored.append(arguments))
    request = announcement(MOST_OBJECTS - OTHERS + 1)
    answer = push_messages(request, state)
    assert not answer.objects_to_push
    assert list(answer.results) == [request.messages_list[0].metadata.message_id]
    [[run, session, name, content]] = stored
    refusal = Message.inflate(content)
    assert (refusal.error.code, run, session) == (REFUSED_BY_SUPERLINK, 1, "session")
    assert refusal.error.reason == "its answer has 1001 pieces, more than 1000, the most that the SuperLink takes"
    [passed] = taken
    assert passed.messages_list[0].metadata.reply_to_message_id == "asked"
    assert passed.messages_list[0].metadata.message_id == passed.message_object_trees[0].object_id == name


def test_an_answer_in_another_sites_name_or_with_other_objects_is_refused(taken):
    swapped = announcement(3)
    swapped.message_object_trees[0].CopyFrom(announcement(4).message_object_trees[0])
    for request, told in (
        (announcement(3, node=8), "a site may answer in its own name only"),
        (swapped, "the objects are not those of the message"),
        (PushMessagesRequest(node=Node(node_id=7)), "expected one message and its objects"),
    ):
        with pytest.raises(HTTPException, match=told):
            push_messages(request, None)
    assert not taken
