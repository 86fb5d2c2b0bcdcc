"""A client's images on the device where its network trains, a batch at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from .stored_images import Images, StoredImages

#: of the GPU memory that is free before training, how much a client's images may take; the network needs the rest
RESIDENT_SHARE = 0.25
#: batches that are read while the network trains on another one
READ_AHEAD = 2


def device_batches(images: Images, batches: Iterable[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers and images of each batch, in order; nothing waits for the device.

    On the CPU a batch is read when it is asked for. On a GPU all images are copied there first if they fit into
    `RESIDENT_SHARE` of its free memory. Otherwise a thread reads `READ_AHEAD` batches ahead into page-locked memory, so
    that reading and copying go on while the network trains. Images in a file are always read this way.

    Args:
        images: uint8 [n, C, H, W] in memory or in a file.
        batches: row numbers of each batch, int64 [m] on the CPU.
        device: where the network is.

    Yields:
        The row numbers as they are, and uint8 [m, C, H, W] on `device`.

    Raises:
        UserError: the file cannot be read.
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
    """Each batch's row numbers and what `read` gives for them, in order; a thread reads up to `ahead` batches ahead.

    An error of `read` is raised where its batch would be given. The thread has ended when the iterator is closed.
    """
    with ThreadPoolExecutor(1, "read-ahead") as thread:
        pending: deque[tuple[Tensor, Future[Tensor]]] = deque()
        try:
            for rows in batches:
                pending.append((rows, thread.submit(read, rows)))
                if len(pending) > ahead:
                    first, result = pending.popleft()
                    yield first, result.result()
            while pending:
                first, result = pending.popleft()
                yield first, result.result()
        finally:
            for _, result in pending:
                result.cancel()
