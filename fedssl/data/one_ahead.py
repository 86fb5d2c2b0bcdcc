"""The items of an iterator, the next one made in another thread while the caller still works on the current one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

Item = TypeVar("Item")


class OneAhead(Iterator[Item], Generic[Item]):
    """Gives the items in order. An error of the iterator is raised where its item would be given.

    Args:
        items: none of them is None. They are made one at a time, but not all in the same thread.
    """

    def __init__(self, items: Iterable[Item]):
        self._items = iter(items)
        self._upcoming: Future[Item | None] | None = None

    def start(self, executor: Executor | None) -> None:
        """Begin with the next item, unless `executor` is None or this has begun already."""
        if executor is not None and self._upcoming is None:
            self._upcoming = executor.submit(next, self._items, None)

    def __next__(self) -> Item:
        upcoming, self._upcoming = self._upcoming, None
        item = next(self._items, None) if upcoming is None else upcoming.result()
        if item is None:
            raise StopIteration
        return item
