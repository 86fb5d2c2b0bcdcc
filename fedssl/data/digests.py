"""Digests of what a run trains and is measured on, by which it knows its data again when it goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..errors import UserError
from ..run_folder.storage import write_atomically
from ..untrusted import read_regular_file
from .datasets import Dataset
from .stored_images import Images, rows_in_place

DATA_DIGESTS = "data_digests.json"
_BYTES_AT_A_TIME = 2**22

#: the number of images and a SHA-256 by what they are, such as `client 0` or `the test set`
Digests = dict[str, tuple[int, str]]


def data_digests(
    dataset: Dataset,
    client_rows: Sequence[Tensor],
    downstream: Mapping[str, Dataset] | None = None,
    clients: Iterable[int] | None = None,
) -> Digests:
    """Digest the decoded images, labels and class names, in their order, so that file names and times do not count.

    Args:
        dataset: the run's.
        client_rows: which training images each client holds, int64 row numbers.
        downstream: other data that the models are evaluated on, by label.
        clients: those whose training images are digested; all by default.
    """
    digests: Digests = {}

    def add(name: str, images: Images | None, *values: Tensor | None, classes: Sequence[str] = ()) -> None:
        if images is not None:
            digests[name] = len(images), _digest(images, values, classes)

    targets = dataset.train_targets
    for k in range(len(client_rows)) if clients is None else clients:
        rows = client_rows[k]
        values = dataset.train_labels[rows], None if targets is None else targets[rows]
        add(f"client {k}", rows_in_place(dataset.train_images, rows), *values, classes=dataset.class_names)
    add("the set of public images", dataset.public_images)
    for label, measured in {"": dataset, **(downstream or {})}.items():
        of = f" of evaluation.downstream.{label}" if label else ""
        classes = measured.class_names
        if label:
            values = measured.train_labels, measured.train_targets
            add(f"the training set{of}", measured.train_images, *values, classes=classes)
        add(f"the test set{of}", measured.test_images, measured.test_labels, measured.test_targets, classes=classes)
        add(f"the validation set{of}", measured.validation_images, measured.validation_labels, classes=classes)
    return digests


def _digest(images: Images, values: Iterable[Tensor | None], classes: Sequence[str]) -> str:
    digest = hashlib.sha256(json.dumps([list(images.shape), *classes]).encode())
    for block in images.split(max(1, _BYTES_AT_A_TIME // max(1, images.shape[1:].numel()))):
        digest.update(block.contiguous().numpy().data)
    for numbers in values:
        if numbers is not None:
            digest.update(numbers.contiguous().numpy().data)
    return digest.hexdigest()


def digests_text(digests: Digests) -> str:
    """Return the content of a file that `read_digests` reads."""
    return json.dumps(digests, indent=1) + "\n"


def write_digests(folder: Path, digests: Digests) -> None:
    write_atomically(folder / DATA_DIGESTS, digests_text(digests).encode())


def read_digests(folder: Path) -> Digests | None:
    """Return the digests in a folder; None if it holds none. Raise UserError if their file cannot be read."""
    path = folder / DATA_DIGESTS
    try:
        stored = json.loads(read_regular_file(path))
        return {str(name): (int(images), str(digest)) for name, (images, digest) in stored.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; put back the file as the run wrote it") from error


def differences(before: Digests, now: Digests) -> dict[str, str]:
    """Return how each part of the data differs from what it was before, by its name."""
    clauses = {}
    for name, (images, digest) in now.items():
        had, stored = before.get(name, (0, ""))
        if images != had:
            clauses[name] = f"{name} now has {images} images (had {had})"
        elif digest != stored:
            clauses[name] = f"{name} has other images or labels, or another order of them"
    return clauses
