"""What the SuperLink's port lets in, and what it takes of an answer, without a SuperLink."""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from datetime import timedelta
from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from flwr.app import ConfigRecord, Metadata, RecordDict
from flwr.app.message import Message, make_message
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from flwr.superlink import extensions
from flwr.superlink.servicer.fleet import fleet_handlers

from fedssl.deploy import limits
from fedssl.deploy.limits import (
    LARGEST_BODY,
    LARGEST_BODY_WITHOUT_KEY,
    MOST_OBJECTS,
    RequestLimits,
    limit_superlink,
    push_messages,
)
from fedssl.engines.flower.messenger import REFUSED_BY_SUPERLINK

PIECE = 2**16
HERE, ELSEWHERE = "127.0.0.1", "203.0.113.7"
PRIVATE, PUBLIC = generate_key_pairs()
OTHER_PRIVATE, OTHER_PUBLIC = generate_key_pairs()
KNOWN = public_key_to_bytes(PUBLIC)
OTHERS = 2  # objects of an answer besides its records' content: the message itself and its records

# Requests


def signed(private=PRIVATE, key=KNOWN, age=0.0):
    """The headers with which a site shows its key."""
    timestamp = (now() - timedelta(seconds=age)).isoformat()
    signature = sign_message(private, timestamp.encode())
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(key).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
        TIMESTAMP_HEADER: timestamp,
    }


def post(*arguments, **keys):
    """A request, see `posted`, to a server that has no other."""
    return asyncio.run(posted(RequestLimits(None), *arguments, **keys))


async def posted(limits, path, size, client=ELSEWHERE, headers=None, announced=True, server="192.0.2.1", pause=0.0):
    """A request of `size` bytes, whose last piece comes after `pause` seconds.

    Its status, the bytes that the application got, and those that were read.
    """
    state = SimpleNamespace(get_node_id_by_public_key=lambda key: 5 if key == KNOWN else None)
    factory = SimpleNamespace(state=lambda: state)
    given = dict(headers or {}) | ({"content-length": str(size)} if announced else {})
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": (client, 1),
        "server": (server, 8000),
        "app": SimpleNamespace(state=SimpleNamespace(linkstate_factory=factory)),
    }
    got, read, sent = [], 0, []

    async def receive():
        nonlocal read
        piece = min(PIECE, size - read)
        read += piece
        if pause and read == size:
            await asyncio.sleep(pause)
        return {"type": "http.request", "body": bytes(piece), "more_body": read < size}

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        more = True
        while more:
            message = await receive()
            got.append(len(message["body"]))
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    limits._app = app
    await limits(scope, receive, send)
    return sent[0]["status"], sum(got), read


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/push-object", "/docs", "/v1/fleet", "/"])
def test_all_but_the_sites_interface_is_for_the_own_machine_alone(path):
    assert post(path, 10) == (403, 0, 0)
    assert post(path, 10**7, HERE) == (200, 10**7, 10**7)
    assert post(path, 10, "192.0.2.1") == (200, 10, 10)  # the SuperLink's own address


@pytest.mark.parametrize(("headers", "most"), [(signed, LARGEST_BODY), (dict, LARGEST_BODY_WITHOUT_KEY)])
@pytest.mark.parametrize("announced", [True, False])
def test_a_large_body_is_not_read(announced, headers, most):
    """Announced or in pieces; without a key it may have little more than a node's name."""
    path, headers = "/v1/fleet/push-object", headers()
    assert post(path, most, headers=headers, announced=announced)[:2] == (200, most)
    assert post(path, 2**26, headers=headers, announced=announced) == (413, 0, 0 if announced else most + PIECE)


# Made when a test runs: a signature holds for seconds.
STRANGERS = {
    "unknown key": lambda: signed(OTHER_PRIVATE, public_key_to_bytes(OTHER_PUBLIC)),
    "another's key": lambda: signed(OTHER_PRIVATE),
    "old": lambda: signed(age=3600),
    "no time": lambda: signed() | {TIMESTAMP_HEADER: "yesterday"},
    "no signature": lambda: signed() | {FLEET_HTTP_SIGNATURE_HEADER: "?"},
    "no key": lambda: signed() | {FLEET_HTTP_PUBLIC_KEY_HEADER: "AAAA"},
}


@pytest.mark.parametrize("who", STRANGERS)
def test_only_a_registered_sites_signature_lets_a_large_body_in(who):
    assert post("/v1/fleet/push-object", 2**20, headers=STRANGERS[who]())[0] == 413


# Time

SLOW = {"path": "/v1/fleet/push-object", "size": PIECE}


@pytest.mark.parametrize(
    ("headers", "longest", "status"), [(signed, 60, 200), (signed, 0.01, 408), (dict, 60, 408), (None, 60, 408)]
)
def test_a_slow_body_is_waited_for_where_a_registered_key_is_shown(headers, longest, status, monkeypatch):
    monkeypatch.setattr(limits, "LONGEST_WITHOUT_KEY", 0.05)
    monkeypatch.setattr(limits, "LONGEST_BODY", longest)
    headers = headers() if headers else STRANGERS["unknown key"]()
    assert post(**SLOW, headers=headers, pause=0.5)[0] == status


def test_of_many_slow_requests_without_a_key_the_oldest_end_and_the_sites_go_on(monkeypatch):
    """All from one address."""
    monkeypatch.setattr(limits, "MOST_WITHOUT_KEY", 3)

    async def all_at_once():
        server = RequestLimits(None)
        site = posted(server, **SLOW, headers=signed(), pause=1.0)
        strangers = [posted(server, **SLOW, pause=1.0) for _ in range(6)]
        return [status for status, *_ in await asyncio.gather(site, *strangers)]

    assert asyncio.run(all_at_once()) == [200, 408, 408, 408, 200, 200, 200]


# Answers


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

    monkeypatch.setattr(limits, "_push_messages", handler)
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


def test_the_limits_are_where_flower_looks_for_them(monkeypatch):
    """Flower's modules as they are named here: another version may have others."""
    monkeypatch.setattr(extensions, "get_middleware", extensions.get_middleware)
    monkeypatch.setattr(fleet_handlers, "push_messages", fleet_handlers.push_messages)
    limit_superlink()
    from flwr.superlink import main

    assert main._get_middleware()[0].cls is RequestLimits
    assert fleet_handlers.push_messages is push_messages
