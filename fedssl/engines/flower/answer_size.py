"""How large an answer may be: counted piece by piece while Flower pulls it, before it is put together.

An answer arrives as objects: the pieces of its arrays, and the records that refer to them. Flower has no limit of its
own. It sends equal pieces once, so an answer may be far larger than what arrives: 1.6 GB of zeros are one piece of
5 MiB to which an array refers 300 times.
"""

from __future__ import annotations

import json
from collections import Counter

from flwr.app import Array
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_head_values_from_object_content

#: objects of any answer; and one more for each MiB, where Flower sends pieces of 5 MiB
_FEW_OBJECTS = 1000
#: bytes of an answer's records without the pieces of arrays; as Python's numbers they take thirty times as much
_LARGEST_RECORDS = 2**22


class TooLarge(Exception):
    """An answer is larger than it may be; the text is the reason for the log."""


class AnswerSize:
    """The size of one answer, of which the objects arrive in any order."""

    def __init__(self, largest: int):
        """Count an answer that may have `largest` bytes."""
        self._largest, self._most_objects = largest, _FEW_OBJECTS + largest // 2**20
        self._objects = 0
        self._received = 0  # bytes of pieces
        self._record_bytes = 0
        self._piece_bytes: dict[str, int] = {}
        self._references: Counter[str] = Counter()  # by the piece's id
        self._array_bytes = 0  # with each piece as often as arrays refer to it

    def add(self, object_id: str, content: bytes) -> None:
        """Count an object that has arrived.

        Raises:
            TooLarge: the answer is too large with it.
            ValueError, TypeError, LookupError: it is no object of Flower's.
        """
        self._objects += 1
        if self._objects > self._most_objects:
            raise TooLarge(
                f"its answer has more than {self._most_objects} pieces, the most that an answer may have here"
            )
        if object_id in self._piece_bytes:
            return
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == ArrayChunk.__qualname__:
            self._piece_bytes[object_id] = len(content)
            self._received += len(content)
            self._array_bytes += self._references[object_id] * len(content)
        else:
            self._record_bytes += len(content)
            if self._record_bytes > _LARGEST_RECORDS:
                raise TooLarge(
                    f"its answer's records are larger than {_LARGEST_RECORDS} bytes, the most that they may have here"
                )
            if kind == Array.__qualname__:
                for index in json.loads(get_object_body(content, Array))["arraychunk_ids"]:
                    self._references[children[index]] += 1
                    self._array_bytes += self._piece_bytes.get(children[index], 0)
        if self._record_bytes + max(self._received, self._array_bytes) > self._largest:
            raise TooLarge(f"its answer is larger than {self._largest} bytes, the most that an answer may have here")
