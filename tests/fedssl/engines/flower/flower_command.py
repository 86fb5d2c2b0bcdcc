"""`fedssl superlink` and `fedssl supernode` as tests start them: flower_command.py FAULTS ARGUMENTS...

They wait less, and a site breaks rounds where files in the folder FAULTS say so: seed-0-client-1-round-2 holds the name
of a fault, one of `AFTER_TRAINING` or `HOSTILE`. The file is removed when that round's training is over and the fault
begins, so the round goes well when it is done again.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore import heartbeat
from flwr.supernode import fleet_http_connection, start_client_internal

from fedssl.cli import main
from fedssl.deploy import nodes
from fedssl.engines.flower import client as client_app
from fedssl.messages import Message
from fedssl.method import Method

#: seconds after which Flower takes a silent site to be disconnected; a minute otherwise
GONE_SECONDS = 20


def weights_of(value: float) -> Callable[[Message], None]:
    """Weights of a value: with 9e5 they are below what the guard refuses anywhere, and would spoil the mean."""

    def change(message: Message) -> None:
        for name, tensor in message.tensors.items():
            if tensor.is_floating_point():
                message.tensors[name] = torch.full_like(tensor, value)

    return change


#: what a fault does to the message that a client has trained
AFTER_TRAINING: dict[str, Callable[[Message], object]] = {
    "hang": lambda message: time.sleep(24 * 3600),  # and the site stays busy
    "weights": weights_of(9e5),
}


def many_records(records: RecordDict) -> None:
    """Tiny records, each an object of its own in the SuperLink's database."""
    for i in range(2_000):
        records[f"record {i}"] = ConfigRecord({"i": i})


def equal_pieces(records: RecordDict) -> None:
    """300 MiB of zeros: Flower sends them as one piece of 5 MiB, to which the array refers 60 times."""
    data = bytes(60 * 5 * 2**20)
    records["tensors"] = ArrayRecord({"uint8": Array("uint8", (len(data),), "torch.raw", data)})


#: what a hostile site makes of the records of its answer
HOSTILE: dict[str, Callable[[RecordDict], None]] = {"records": many_records, "pieces": equal_pieces}


def break_rounds(faults: Path) -> None:
    real, real_answer = Method.client_round, client_app._to_records
    planted = []  # the fault of the process's one answer

    def client_round(method, client, received, number):
        reply = real(method, client, received, number)
        file = faults / f"seed-{method.seed}-client-{client.index}-round-{number}"
        if file.exists():
            planted.append(file.read_text())
            file.unlink()
            AFTER_TRAINING.get(planted[-1], bool)(reply)
        return reply

    def to_answer(*arguments):
        records = real_answer(*arguments)
        if planted:
            HOSTILE.get(planted.pop(), bool)(records)
        return records

    Method.client_round = client_round
    client_app._to_records = to_answer


def run() -> None:
    break_rounds(Path(sys.argv.pop(1)))
    # no recipe here needs timm, which takes five seconds to import
    nodes._APP_MODULES = tuple(name for name in nodes._APP_MODULES if name != "timm")
    # a SuperNode without work looks for some every three seconds
    start_client_internal.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 1)))
    heartbeat.HEARTBEAT_DEFAULT_INTERVAL = fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL = GONE_SECONDS // 2
    main()


if __name__ == "__main__":
    run()
