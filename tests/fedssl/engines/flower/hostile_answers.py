"""What a hostile site makes of its answer: functions that change the records of an answer on their way out, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedssl.engines.flower.wire import from_records, to_records
from fedssl.messages import Message


def many_records(records: RecordDict) -> None:
    """Tiny records, each an object of its own in the SuperLink's database."""
    for i in range(2_000):
        records[f"record {i}"] = ConfigRecord({"i": i})


def equal_pieces(records: RecordDict) -> None:
    """300 MiB of zeros: Flower sends them as one piece of 5 MiB, to which the array refers 60 times."""
    data = bytes(60 * 5 * 2**20)
    records["tensors"] = ArrayRecord({"uint8": Array("uint8", (len(data),), "torch.raw", data)})


def many_measures(records: RecordDict) -> None:
    """An evaluation of 5,000 measures."""
    measures = {f"evaluation/fine_tune_{i}": 1.0 for i in range(5_000)}
    records["numbers"] = MetricRecord(dict(records["numbers"]) | measures)


def _changed(change: Callable[[Message], None]) -> Callable[[RecordDict], None]:
    def apply(records: RecordDict) -> None:
        message = from_records(records)
        change(message)
        for name, record in to_records(message).items():
            records[name] = record

    return apply


def few_rows(message: Message) -> None:
    """Representations of five images, where all clients must send those of all public images."""
    for name, tensor in message.tensors.items():
        if name.startswith("representation."):
            message.tensors[name] = torch.ones(5, tensor.shape[1])


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
    "measures": many_measures,
    "rows": _changed(few_rows),
    "weights": _changed(weights_of(9e5)),
    "1e30": _changed(weights_of(1e30)),
    "samples": _changed(many_samples),
}
