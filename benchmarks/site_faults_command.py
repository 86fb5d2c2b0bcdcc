"""The command of a site of benchmarks/site_faults.py: that of the tests, with the faults that only the table has.

nan      weights of NaN
1e30     weights of 1e30
900      weights of 900
zeros    weights of 0
flip     weights of the opposite sign, ten times as large
buffers  running variances and counters of 900,000
late     the answer is sent after the round's deadline
twice    the SuperNode announces its answer twice
disk     the site's disk is full: no file may become larger than a few KiB
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedssl.messages import Message
from tests.fedssl.engines.flower.deployment import MARK
from tests.fedssl.engines.flower.flower_command import AFTER_TRAINING, run, weights_of

#: how long after the deadline a late answer is sent
LATE_SECONDS = 5.0
#: the largest file of a full disk: less than a state, more than what a SuperNode logs until then
FULL_DISK_BYTES = 2**15
#: a file that the process with the round leaves for the SuperNode, which sends its answer
TWICE = Path(sys.argv[1]) / f"twice-{Path(os.environ[MARK]).name}"


def cut_a_tensor(message: Message) -> None:
    name = next(iter(message.tensors))
    message.tensors[name] = message.tensors[name][1:]


def send_late(message: Message) -> None:
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # what ends work at the deadline
    time.sleep(left + LATE_SECONDS)


def flip(message: Message) -> None:
    for name, tensor in message.tensors.items():
        if tensor.is_floating_point() and not name.endswith("running_var"):
            tensor.mul_(-10.0)


def huge_buffers(message: Message) -> None:
    for name, tensor in message.tensors.items():
        if name.endswith(("running_var", "num_batches_tracked")):
            tensor.fill_(900_000)


def announce_twice() -> None:
    real = FleetHttpClient.PushMessages

    def push_messages(connection: Any, request: Any) -> Any:
        response = real(connection, request)
        if TWICE.exists():
            TWICE.unlink()
            try:
                second = real(connection, request)
                print(f"the second answer: {len(second.objects_to_push)} objects are asked for", flush=True)
            except httpx.HTTPStatusError as error:
                print(f"the second answer: HTTP {error.response.status_code} {error.response.text}", flush=True)
        return response

    FleetHttpClient.PushMessages = push_messages  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    AFTER_TRAINING |= {
        "shape": cut_a_tensor,
        "nan": weights_of(float("nan")),
        "1e30": weights_of(1e30),
        "900": weights_of(900.0),
        "zeros": weights_of(0.0),
        "flip": flip,
        "buffers": huge_buffers,
        "late": send_late,
        "twice": lambda message: TWICE.touch(),
        "disk": lambda message: resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES)),
    }
    announce_twice()
    run()
