"""What a hostile site makes of its answer: functions that change the records of an answer on their way out, by name."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

MANY = 20_000


def many_records(records: RecordDict) -> None:
    """Many tiny records, each an object of its own in the SuperLink's database."""
    for i in range(MANY):
        records[f"record {i}"] = ConfigRecord({"i": i})


def equal_pieces(records: RecordDict) -> None:
    """1.6 GB of zeros: Flower sends them as one piece of 5 MiB, to which the array refers 300 times."""
    data = bytes(300 * 5 * 2**20)
    records["tensors"] = ArrayRecord({"uint8": Array("uint8", (len(data),), "torch.raw", data)})


def many_measures(records: RecordDict) -> None:
    """An evaluation of 40,000 measures."""
    measures = {f"evaluation/fine_tune_{i}": 1.0 for i in range(40_000)}
    records["numbers"] = MetricRecord(dict(records["numbers"]) | measures)


HOSTILE: dict[str, Callable[[RecordDict], None]] = {
    "records": many_records,
    "pieces": equal_pieces,
    "measures": many_measures,
}
