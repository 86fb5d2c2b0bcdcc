"""Go on after answers of a server that is not well: a full disk, a proxy without its server, a page of somebody else.

Flower's clients wait and try again where the server is not reached and after the answers 502, 503 and 504. After any
other error a thread ends, or the process: a SuperNode whose heartbeats have ended works on and stays offline for good.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import httpx
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE, PROTOBUF_STREAM_MEDIA_TYPE

#: seconds for which a request that gets such answers is repeated; then Flower handles the last one
PATIENCE = 900.0
_HEARTBEAT = "heartbeat"  # the end of their paths; they are repeated for ever

_send = ProtobufClient._send


def survive_bad_answers() -> None:
    """Change Flower's modules in this process, and in those that are forked from it."""
    client: Any = ProtobufClient
    client._send = send


def send(client: ProtobufClient, context: Any, **options: Any) -> httpx.Response:
    """Send a request as Flower does; for a bad answer, raise what a broken connection raises, so that it tries again.

    Not bad are refusals of the request itself (4xx); only heartbeats are repeated after these, too, but for 401: it
    says that the server does not accept this process.
    """
    path = context.request.url.path
    try:
        response = _send(client, context, **options)
    except (httpx.TooManyRedirects, httpx.DecodingError) as error:
        _require_patience(client, path, str(error))
        raise
    status, media = response.status_code, response.headers.get("content-type", "").partition(";")[0].strip()
    is_flowers = media in (PROTOBUF_MEDIA_TYPE, PROTOBUF_STREAM_MEDIA_TYPE)
    is_refusal = 400 <= status < 500 and status != 429
    if not (is_flowers and status == 200) and (status != 401 if path.endswith(_HEARTBEAT) else not is_refusal):
        _require_patience(client, path, f"status {status}, {media or 'no content type'}")
    elif status == 200:
        _bad_since(client).pop(path, None)
    return response


def end_with_threads() -> None:
    """End this process when a thread fails, so that it is started again: Flower's processes need all their threads."""

    def end(failure: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(failure)
        text = f"{os.path.basename(sys.argv[0])} ends, because a part of it failed: {failure.exc_value}"
        print(f"fedssl: {text}", file=sys.stderr, flush=True)
        os._exit(1)

    threading.excepthook = end


def _require_patience(client: ProtobufClient, path: str, reason: str) -> None:
    """Raise a TransportError, unless this request has got bad answers alone for longer than `PATIENCE`."""
    began = _bad_since(client).setdefault(path, time.monotonic())
    if path.endswith(_HEARTBEAT) or time.monotonic() - began < PATIENCE:
        raise httpx.RemoteProtocolError(f"the server's answer cannot be used: {reason}")


def _bad_since(client: ProtobufClient) -> dict[str, float]:
    times: dict[str, float] = client.__dict__.setdefault("_bad_since", {})
    return times
