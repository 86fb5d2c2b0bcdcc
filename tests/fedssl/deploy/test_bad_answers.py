"""A site goes on after any answer of its server, and a process that cannot go on ends with a message."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat

import httpx
import pytest
from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.supercore import heartbeat
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supercore.retry import http_retry
from flwr.supernode import fleet_http_connection

from fedssl.deploy import bad_answers
from tests.fedssl.engines.flower.deployment import poll, with_package

FLOWERS, HTML = "application/protobuf", "text/html"
GOOD = {
    "activate-node": ActivateNodeResponse(node_id=7),
    "send-node-heartbeat": SendNodeHeartbeatResponse(success=True),
    "pull-messages": PullMessagesResponse(),
}
#: status, content type and content of bad answers; each request gets all of them, and good ones from then on
BAD = [(code, FLOWERS, b"") for code in (500, 502, 503, 507, 429)]
BAD += [(200, HTML, b"<p>Log in"), (200, "", b""), (204, FLOWERS, b""), (302, FLOWERS, b"")]


@contextlib.contextmanager
def raising(connection):
    """Flower's connection logs what is raised in it, and goes on; a test fails by it."""
    failures = []
    with connection as callbacks:
        try:
            yield callbacks
        except BaseException as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


@pytest.fixture
def connected(monkeypatch):
    """Connect a site to a server that gives bad answers: its callbacks, and the number of requests of each kind."""
    for module in (heartbeat, http_retry):
        monkeypatch.setattr(module, "exponential", lambda max_delay: repeat(0.01))
    monkeypatch.setattr(heartbeat, "HEARTBEAT_DEFAULT_INTERVAL", heartbeat.HEARTBEAT_CALL_TIMEOUT + 0.01)
    monkeypatch.setattr(ProtobufClient, "_send", ProtobufClient._send)
    bad_answers.survive_bad_answers()
    started = []

    def connect(bad, **bad_of):
        counts = Counter()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                kind = self.path.rpartition("/")[2]
                answers = bad_of.get(kind.replace("-", "_"), bad)
                good = (200, FLOWERS, GOOD[kind].SerializeToString() if kind in GOOD else b"")
                status, media, content = answers[counts[kind]] if counts[kind] < len(answers) else good
                counts[kind] += 1
                self.send_response(status)
                self.send_header("content-type", media)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return raising(fleet_http_connection.http_request_response(f"127.0.0.1:{server.server_port}", True)), counts

    yield connect
    for server in started:
        server.shutdown()


def test_a_site_goes_on_after_any_answer(connected):
    """Its heartbeats too, also where a proxy refuses them for a while."""
    connection, counts = connected(BAD, send_node_heartbeat=[*BAD, (403, HTML, b""), (404, HTML, b"")])
    with connection as (node, receive, *_):
        assert node == 7
        assert receive() is None
        poll(lambda: counts["send-node-heartbeat"] > len(BAD) + 4, "heartbeats go on", seconds=60)
    assert counts["activate-node"] == counts["pull-messages"] == len(BAD) + 1


def test_after_some_time_flower_handles_a_bad_answer_and_a_refusal_at_once(connected, monkeypatch):
    """A refused answer of one message keeps no site busy; what says that a site is not accepted ends it."""
    refused = [(400, HTML, b"")]
    connection, counts = connected([], pull_messages=[*BAD[:1] * 3, *refused], send_node_heartbeat=BAD * 1000)
    with connection as (_, receive, *_):
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            receive()
        assert counts["pull-messages"] == 4
        monkeypatch.setattr(bad_answers, "PATIENCE", 0.0)
        before = counts["send-node-heartbeat"]
        poll(lambda: counts["send-node-heartbeat"] > before + len(BAD), "heartbeats have all the time", seconds=60)
    connection, counts = connected([], pull_messages=BAD[:1])
    with connection as (_, receive, *_), pytest.raises(httpx.HTTPStatusError, match="500"):
        receive()
    ended = []
    monkeypatch.setattr(fleet_http_connection.os, "kill", lambda *arguments: ended.append(arguments))
    monkeypatch.setattr(threading, "excepthook", lambda failure: None)
    with connected([], send_node_heartbeat=[(401, HTML, b"")])[0]:
        poll(lambda: len(ended) == 1, "the site is told that it is not accepted", seconds=60)


#: Flower's commands in whose place stand ones that fail: a thread, and what serves the site's connection
PROGRAM = """
import os, sys, threading, time
from fedssl.deploy import flower_commands as commands

def thread():
    threading.Thread(target=lambda: 1 / 0).start()
    time.sleep(600)

commands._entry_point = lambda name: {"thread": thread, "returns": lambda: None}[sys.argv[1]]
sys.exit(commands.run(["flower-supernode", sys.argv[1]], dict(os.environ), []))
"""


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("thread", "fedssl: flower-supernode ends, because a part of it failed: division by zero"),
        ("returns", "fedssl: the site ends after the error above; it may be started again"),
    ],
)
def test_a_process_that_cannot_go_on_ends_with_a_message(case, told):
    """And with a code other than 0, after which systemd starts it again."""
    command = [sys.executable, "-c", PROGRAM, case]
    done = subprocess.run(command, env=with_package(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert told in done.stderr
