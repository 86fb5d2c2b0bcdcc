"""`fedssl superlink` and `fedssl supernode` as tests start them: flower_command.py FAULTS ARGUMENTS...

They wait less, and a site breaks rounds where files in the folder FAULTS say so: seed-0-client-1-round-2 holds the name
of a fault, one of `nan`, `shape` and `hang` or of hostile_answers.py. The file is removed when that round's training is
over and the fault begins, so the round goes well when it is done again.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

from flwr.supercore import heartbeat
from flwr.supernode import fleet_http_connection, start_client_internal

from fedssl.cli import main
from fedssl.engines.flower import client as client_app
from fedssl.engines.flower import nodes
from fedssl.method import Method
from tests.fedssl.engines.flower.hostile_answers import HOSTILE

#: seconds after which Flower takes a silent site to be disconnected; a minute otherwise
GONE_SECONDS = 30


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
        return reply

    def to_answer(reply, site, number):
        records = real_answer(reply, site, number)
        if hostile and (change := hostile.pop()):
            change(records)
        return records

    Method.client_round = client_round
    client_app._to_answer = to_answer


if __name__ == "__main__":
    break_rounds(Path(sys.argv.pop(1)))
    nodes._LATE_MODULES = ("torch._dynamo",)  # no recipe here needs timm, which takes five seconds to import
    # a SuperNode without work looks for some every three seconds
    start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 1)))
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = GONE_SECONDS // 2
    main()
