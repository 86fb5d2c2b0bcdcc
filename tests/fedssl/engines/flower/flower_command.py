"""`fedssl superlink` and `fedssl supernode` as tests start them: flower_command.py FAULTS ARGUMENTS...

They wait less, and a site breaks rounds where files in the folder FAULTS say so: seed-0-client-1-round-2 holds the name
of a fault, one of these or of `HOSTILE`. The file is removed when that round's training is over and the fault
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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore import heartbeat
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedssl.cli import main
from fedssl.deploy import nodes
from fedssl.engines.flower import client as client_app
from fedssl.engines.flower.wire import from_records, to_records
from fedssl.messages import Message
from fedssl.method import Method

#: seconds after which Flower takes a silent site to be disconnected; a minute otherwise
GONE_SECONDS = 20
#: how long after the deadline a late answer is sent
LATE_SECONDS = 5.0
#: the largest file of a full disk: less than a state, more than what a SuperNode logs until then
FULL_DISK_BYTES = 2**15


# What a hostile site makes of its answer: each changes the records of an answer on their way out


def many_records(records: RecordDict) -> None:
    """Tiny records, each an object of its own in the SuperLink's database."""
    for i in range(2_000):
        records[f"record {i}"] = ConfigRecord({"i": i})


def equal_pieces(records: RecordDict) -> None:
    """300 MiB of zeros: Flower sends them as one piece of 5 MiB, to which the array refers 60 times."""
    data = bytes(60 * 5 * 2**20)
    records["tensors"] = ArrayRecord({"uint8": Array("uint8", (len(data),), "torch.raw", data)})


def _changed(change: Callable[[Message], None]) -> Callable[[RecordDict], None]:
    def apply(records: RecordDict) -> None:
        message = from_records(records)
        change(message)
        for name, record in to_records(message).items():
            records[name] = record

    return apply


def weights_of(value: float) -> Callable[[Message], None]:
    """Weights of a value: 9e5 is just below what the guard allows in any case, and would spoil the mean."""

    def change(message: Message) -> None:
        for tensor in message.tensors.values():
            if tensor.is_floating_point():
                tensor.fill_(value)

    return change


def many_samples(message: Message) -> None:
    """A trillion images, beside which the others' do not count in the mean."""
    message.numbers["samples"] = 1e12


HOSTILE: dict[str, Callable[[RecordDict], None]] = {
    "records": many_records,
    "pieces": equal_pieces,
    "weights": _changed(weights_of(9e5)),
    "1e30": _changed(weights_of(1e30)),
    "samples": _changed(many_samples),
}


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
