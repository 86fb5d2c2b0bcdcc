"""Mini-batches in a seeded random order, on the network's device, and read ahead of their use."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .stored_images import Images, StoredImages

#: of the GPU memory that is free before training, how much a client's images may take; the network needs the rest
RESIDENT_SHARE = 0.25

#: batches that are read while the network trains on another one
READ_AHEAD = 2

Item = TypeVar("Item")


def epoch_batches(samples: int, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """Return row numbers of one epoch's full batches, int64 [batch_size] each; no batch if there are fewer samples.

    The rest of the order is left out: a smaller batch would give BatchNorm and contrastive losses other statistics.
    """
    batches = samples // batch_size
    return list(torch.randperm(samples, generator=generator)[: batches * batch_size].view(batches, batch_size))


def round_batches(
    samples: int, batch_size: int, epochs: int, steps: int | None, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield row numbers of a round's full batches, int64 [batch_size] each; no batch if there are fewer samples.

    With `steps`, there are that many batches whatever `epochs` is; a new order begins wherever one is used up.
    """
    if steps is None:
        for _ in range(epochs):
            yield from epoch_batches(samples, batch_size, generator)
    elif samples >= batch_size:
        yield from itertools.islice(endless_batches(samples, batch_size, generator), steps)


def batches_of_epoch(samples: int, batch_size: int) -> int:
    """Return the number of batches of a pass over the samples in `round_batches` and `endless_batches`; at least 1."""
    return max(1, samples // batch_size)


def endless_batches(samples: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield row numbers of full batches without end, a new order for each pass; all rows where there are fewer."""
    size = min(batch_size, samples)
    while True:
        yield from epoch_batches(samples, size, generator)


def device_batches(images: Images, batches: Iterable[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each batch's row numbers, int64 [m] as they are, and images, uint8 [m, C, H, W] on `device`, in order.

    Nothing waits for the device. On the CPU a batch is read when it is asked for. On a GPU all images are copied there
    first if they fit into `RESIDENT_SHARE` of its free memory. Otherwise a thread reads `READ_AHEAD` batches ahead into
    page-locked memory, so that reading and copying go on while the network trains. Images in a file are always read
    this way; a UserError is raised if it cannot be read.
    """
    if device.type != "cuda":
        for rows in batches:
            yield rows, images[rows].to(device)
    elif not isinstance(images, StoredImages) and images.nbytes <= RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
        resident = images[:].to(device)
        for rows in batches:
            yield rows, resident[rows.to(device, non_blocking=True)]
    else:
        for rows, batch in read_ahead(lambda rows: images[rows].pin_memory(), batches):
            yield rows, batch.to(device, non_blocking=True)


def read_ahead(
    read: Callable[[Tensor], Tensor], batches: Iterable[Tensor], ahead: int = READ_AHEAD
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each batch's row numbers and what `read` returns for them; a thread reads up to `ahead` batches ahead.

    An error of `read` is raised in place of its batch. The thread has ended when the iterator is closed.
    """
    with ThreadPoolExecutor(1, "read-ahead") as thread:
        submitted = ((rows, thread.submit(read, rows)) for rows in batches)
        pending = deque(itertools.islice(submitted, ahead + 1))
        while pending:
            rows, images = pending.popleft()
            yield rows, images.result()
            pending.extend(itertools.islice(submitted, 1))


class Prefetch(Iterator[Item], Generic[Item]):
    """The items in order, the next one maybe made in another thread; none is None. An error is raised at its item."""

    def __init__(self, items: Iterable[Item]):
        self._items = iter(items)
        self._upcoming: Future[Item | None] | None = None

    def start(self, executor: Executor | None) -> None:
        """Begin to make the next item, unless `executor` is None or it has begun already."""
        if executor is not None and self._upcoming is None:
            self._upcoming = executor.submit(next, self._items, None)

    def __next__(self) -> Item:
        upcoming, self._upcoming = self._upcoming, None
        item = next(self._items, None) if upcoming is None else upcoming.result()
        if item is None:
            raise StopIteration
        return item
