"""The shipped term, without the check of the aggregator's name."""

from typing import ClassVar

from fedssl.regularizers.cka_alignment import CKAAlignment


class Align(CKAAlignment):
    needs_aggregator: ClassVar[str | None] = None
