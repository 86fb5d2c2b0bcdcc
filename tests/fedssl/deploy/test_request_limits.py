"""What the SuperLink's port lets in, without a SuperLink: who, which paths, and how many bytes."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from datetime import timedelta
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from fedssl.deploy.limits import LARGEST_BODY, LARGEST_BODY_WITHOUT_KEY, RequestLimits

PIECE = 2**16
HERE, ELSEWHERE = "127.0.0.1", "203.0.113.7"
PRIVATE, PUBLIC = generate_key_pairs()
KNOWN = public_key_to_bytes(PUBLIC)


def signed(private=PRIVATE, key=KNOWN, age=0.0):
    """The headers with which a site shows its key."""
    timestamp = (now() - timedelta(seconds=age)).isoformat()
    signature = sign_message(private, timestamp.encode())
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(key).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
        TIMESTAMP_HEADER: timestamp,
    }


def post(path, size, client=ELSEWHERE, headers=None, announced=True, server="192.0.2.1"):
    """A request of `size` bytes: its status, the bytes that the application got, and those that were read."""
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

    asyncio.run(RequestLimits(app)(scope, receive, send))
    return sent[0]["status"], sum(got), read


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/push-object", "/docs", "/v1/fleet", "/"])
def test_all_but_the_sites_interface_is_for_the_own_machine_alone(path):
    assert post(path, 10) == (403, 0, 0)
    assert post(path, 10**7, HERE) == (200, 10**7, 10**7)
    assert post(path, 10, "192.0.2.1") == (200, 10, 10)  # the SuperLink's own address


@pytest.mark.parametrize("announced", [True, False])
def test_a_large_body_is_not_read(announced):
    """Announced or in pieces; without a key it may have little more than a node's name."""
    read = 0 if announced else LARGEST_BODY + PIECE
    path = "/v1/fleet/push-object"
    assert post(path, LARGEST_BODY, headers=signed(), announced=announced)[:2] == (200, LARGEST_BODY)
    assert post(path, 2**26, headers=signed(), announced=announced) == (413, 0, read)
    assert post(path, LARGEST_BODY_WITHOUT_KEY, announced=announced)[:2] == (200, LARGEST_BODY_WITHOUT_KEY)
    read = 0 if announced else LARGEST_BODY_WITHOUT_KEY + PIECE
    assert post(path, 2**26, announced=announced) == (413, 0, read)


OTHER_PRIVATE, OTHER_PUBLIC = generate_key_pairs()


@pytest.mark.parametrize(
    "headers",
    [
        signed(OTHER_PRIVATE, public_key_to_bytes(OTHER_PUBLIC)),
        signed(OTHER_PRIVATE),
        signed(age=3600),
        signed() | {TIMESTAMP_HEADER: "yesterday"},
        signed() | {FLEET_HTTP_SIGNATURE_HEADER: "?"},
        signed() | {FLEET_HTTP_PUBLIC_KEY_HEADER: "AAAA"},
    ],
    ids=["unknown key", "another's key", "old", "no time", "no signature", "no key"],
)
def test_only_a_registered_sites_signature_lets_a_large_body_in(headers):
    assert post("/v1/fleet/push-object", 2**20, headers=headers)[0] == 413
