"""`fedssl superlink` and `fedssl supernode` as tests start them: flower_command.py FAULTS ARGUMENTS...

They wait less, and a site breaks rounds where files in the folder FAULTS say so: seed-0-client-1-round-2 holds the name
of a fault, one of these or of hostile_answers.py. The file is removed when that round's training is over and the fault
begins, so the round goes well when it is done again.

    nan, shape    a tensor of NaN, a tensor of a wrong shape
    hang          no answer, and the site stays busy
    late          the answer is sent after the round's deadline
    twice         the SuperNode announces its answer twice
    disk          the site's disk is full: no file may become larger than a few KiB
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
from flwr.supercore import heartbeat
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedssl.cli import main
from fedssl.deploy import nodes
from fedssl.engines.flower import client as client_app
from fedssl.method import Method
from tests.fedssl.engines.flower.hostile_answers import HOSTILE

#: seconds after which Flower takes a silent site to be disconnected; a minute otherwise
GONE_SECONDS = 20
#: how long after the deadline a late answer is sent
LATE_SECONDS = 5.0
#: the largest file of a full disk: less than a state, more than what a SuperNode logs until then
FULL_DISK_BYTES = 2**15


def _own_name() -> str:
    """Whose process this is, such as site1 (deployment.py)."""
    return Path(os.environ["FEDSSL_TEST_PROCESS"]).name


def break_rounds(faults: Path) -> None:
    real, real_answer = Method.client_round, client_app._to_answer
    hostile = []  # what the process's one answer is changed by

    def client_round(method, client, received, number):
        reply = real(method, client, received, number)
        file = faults / f"seed-{method.seed}-client-{client.index}-round-{number}"
        fault = file.read_text() if file.exists() else ""
        file.unlink(missing_ok=True)
        hostile.append(HOSTILE.get(fault))
        name = next(iter(reply.tensors))
        if fault == "nan":
            reply.tensors[name][:] = float("nan")
        elif fault == "shape":
            reply.tensors[name] = reply.tensors[name][1:]
        elif fault == "hang":
            time.sleep(24 * 3600)
        elif fault == "late":
            left, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # what ends work at the deadline
            time.sleep(left + LATE_SECONDS)
        elif fault == "twice":
            (faults / f"twice-{_own_name()}").touch()
        elif fault == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES))
        return reply

    def to_answer(*arguments):
        records = real_answer(*arguments)
        if hostile and (change := hostile.pop()):
            change(records)
        return records

    real_push = FleetHttpClient.PushMessages

    def push_messages(connection, request):
        response = real_push(connection, request)
        file = faults / f"twice-{_own_name()}"
        if file.exists():
            file.unlink()
            try:
                second = real_push(connection, request)
                print(f"the second answer: {len(second.objects_to_push)} objects are asked for", flush=True)
            except httpx.HTTPStatusError as error:
                print(f"the second answer: HTTP {error.response.status_code} {error.response.text}", flush=True)
        return response

    FleetHttpClient.PushMessages = push_messages
    Method.client_round = client_round
    client_app._to_answer = to_answer


if __name__ == "__main__":
    break_rounds(Path(sys.argv.pop(1)))
    nodes._LATE_MODULES = ("torch._dynamo",)  # no recipe here needs timm, which takes five seconds to import
    # a SuperNode without work looks for some every three seconds
    start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 1)))
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = GONE_SECONDS // 2
    main()
