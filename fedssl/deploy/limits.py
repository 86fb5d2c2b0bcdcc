"""Limits of the requests and answers that the SuperLink accepts.

The SuperLink serves three interfaces on one port. Sites use `/v1/fleet/` and show their keys there. The other two ask
for no key: `/v1/control/` starts runs and registers keys, `/v1/runtime/` belongs to a run's own process. Flower reads a
request's whole body into memory before it checks a key, and has no limit for it. So a middleware around its application
refuses requests before their bodies are read, and a site's answer may have a limited number of pieces.

Who shows no registered key may also not keep the SuperLink busy with bodies that do not end. Addresses do not tell who
somebody is, as a site and a stranger may share one. So a request that takes long is asked for its key, and where there
are many without one, the oldest are ended. Headers that do not end, and connections without a request, never reach the
SuperLink: it listens on its own machine alone, and the reverse proxy in front of it ends them.
"""

from __future__ import annotations

import asyncio
import binascii
import datetime
import resource
from base64 import b64decode
from ipaddress import ip_address
from typing import Any

from fastapi import HTTPException
from flwr.app.error import Error
from flwr.app.message import make_message
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.superlink import extensions
from flwr.superlink.servicer.fleet import fleet_handlers
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..engines.flower.messenger import REFUSED_BY_SUPERLINK

#: bytes of a site's request; Flower sends arrays in pieces of 5 MiB
LARGEST_BODY = 2**23
#: bytes of a request without a registered key, such as that of a node that introduces itself
LARGEST_BODY_WITHOUT_KEY = 2**16
#: seconds for the body of a request without a registered key
LONGEST_WITHOUT_KEY = 10.0
#: seconds for the body of a site's request
LONGEST_BODY = 180.0
#: requests whose key has not been looked at and whose body has not arrived
MOST_WITHOUT_KEY = 64
_OPEN_FILES = 2**14
#: objects of an answer: records, arrays and the arrays' pieces of 5 MiB; also limits the database's work
MOST_OBJECTS = 1000

_push_messages = fleet_handlers.push_messages


def limit_superlink() -> None:
    """Change Flower's modules in this process, which then runs `flower-superlink`."""
    extensions.get_middleware = lambda: (Middleware(RequestLimits),)
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # a connection is one
    if files < _OPEN_FILES:
        wanted = _OPEN_FILES if most_files == resource.RLIM_INFINITY else min(_OPEN_FILES, most_files)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most_files))
    fleet_handlers.push_messages = push_messages


class RequestLimits:
    """A middleware that refuses requests from other machines except for `/v1/fleet/` (403).

    It reads a body before the application does, and refuses large (413) and slow ones (408), earlier without a key.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        #: the waits for bodies of requests whose key has not been looked at; the oldest request first
        self._without_key: dict[object, asyncio.Timeout] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_for_sites = "path" in scope and scope["path"].startswith("/v1/fleet/")
        if scope["type"] == "lifespan" or (_is_from_this_machine(scope) and not is_for_sites):
            await self._app(scope, receive, send)
        elif scope["type"] != "http" or not is_for_sites:
            await _refuse(403, "only the SuperLink's own machine may use this interface", scope, receive, send)
        else:
            await self._call_limited(scope, receive, send)

    async def _call_limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, most, is_known = Headers(scope=scope), LARGEST_BODY_WITHOUT_KEY, False
        announced = headers.get("content-length", "")
        size = int(announced) if announced.isdecimal() else 0
        received, messages, more = 0, [], True
        end = asyncio.get_running_loop().time() + LONGEST_WITHOUT_KEY
        request = object()
        while more:
            size, message = max(size, received), None
            if size <= most:
                message = await self._receive_until(end, None if is_known else request, receive)
            if message is not None:
                messages.append(message)
                received += len(message.get("body", b""))
                more = bool(message.get("more_body", False))
                continue
            self._without_key.pop(request, None)
            if not is_known and await run_in_threadpool(_has_registered_key, scope, headers):
                is_known, most, end = True, LARGEST_BODY, end + LONGEST_BODY
                continue
            reason = f"the request is larger than {most} bytes" if size > most else "the request's body takes too long"
            await _refuse(413 if size > most else 408, reason, scope, receive, send)
            return
        self._without_key.pop(request, None)

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    async def _receive_until(self, end: float, request: object | None, receive: Receive) -> Message | None:
        """Return the next message of a request, None after the time `end`.

        `request` is None for a site's. Of the others the oldest ends earlier if there are too many of them.
        """
        try:
            async with asyncio.timeout_at(end) as wait:
                if request is not None:
                    self._without_key[request] = wait  # and keeps its place
                    if len(self._without_key) > MOST_WITHOUT_KEY:
                        self._without_key.pop(next(iter(self._without_key))).reschedule(0.0)
                return await receive()
        except TimeoutError:
            return None


def _is_from_this_machine(scope: Scope) -> bool:
    # behind a proxy on this machine the client is the one that the proxy names in X-Forwarded-For
    client, server = scope.get("client"), scope.get("server")
    if client is None:
        return False
    try:
        return ip_address(client[0]).is_loopback or (server is not None and client[0] == server[0])
    except ValueError:
        return False


def _has_registered_key(scope: Scope, headers: Headers) -> bool:
    """Return whether a request is signed with the key of a site that the SuperLink knows, as Flower checks it later."""
    try:
        public_key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        timestamp = headers[TIMESTAMP_HEADER]
        age = (now() - datetime.datetime.fromisoformat(timestamp)).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return False
        if not verify_signature(bytes_to_public_key(public_key), timestamp.encode("ascii"), signature):
            return False
    except (KeyError, ValueError, TypeError, binascii.Error):
        return False
    return scope["app"].state.linkstate_factory.state().get_node_id_by_public_key(public_key) is not None


async def _refuse(status: int, reason: str, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer and close the connection, so that the rest of the request is not read."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await JSONResponse({"detail": reason}, status, {"connection": "close"})(scope, receive, send)


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
