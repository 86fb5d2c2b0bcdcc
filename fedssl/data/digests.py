"""Digests of what a run trains and is measured on, by which it knows its data again when it goes on."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..errors import explained
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

    `client_rows` and `downstream` are those of a `Federation`; `clients` are those whose training images are digested,
    all by default.
    """
    digests: Digests = {}

    def add(name: str, data: Dataset, images: Images | None, *values: Tensor | None) -> None:
        if images is None:
            return
        digest = hashlib.sha256(json.dumps([list(images.shape), *data.class_names]).encode())
        blocks = images.split(max(1, _BYTES_AT_A_TIME // max(1, images.shape[1:].numel())))
        for numbers in itertools.chain(blocks, values):
            if numbers is not None:
                digest.update(numbers.contiguous().numpy().data)
        digests[name] = len(images), digest.hexdigest()

    for k in range(len(client_rows)) if clients is None else clients:
        rows, targets = client_rows[k], dataset.train_targets
        values = dataset.train_labels[rows], None if targets is None else targets[rows]
        add(f"client {k}", dataset, rows_in_place(dataset.train_images, rows), *values)
    add("the set of public images", dataset, dataset.public_images)
    for label, data in {"": dataset, **(downstream or {})}.items():
        of = f" of evaluation.downstream.{label}" if label else ""
        if label:
            add(f"the training set{of}", data, data.train_images, data.train_labels, data.train_targets)
        add(f"the test set{of}", data, data.test_images, data.test_labels, data.test_targets)
        add(f"the validation set{of}", data, data.validation_images, data.validation_labels)
    return digests


def digests_text(digests: Digests) -> str:
    """Return the content of a file that `read_digests` reads."""
    return json.dumps(digests, indent=1) + "\n"


def read_digests(folder: Path) -> Digests | None:
    """Return the digests in a folder; None if it holds none. Raise UserError if their file cannot be read."""
    file = folder / DATA_DIGESTS
    if not file.exists():
        return None
    with explained(f"{file} cannot be read", "; put back what the run wrote"):
        stored = json.loads(read_regular_file(file))
        return {name: (int(images), digest) for name, (images, digest) in stored.items()}


def differences(before: Digests, now: Digests) -> dict[str, str]:
    """Return how each part of the data differs from what it was before, by its name.

    The clients and the sets of `evaluation.downstream` that `now` lacks are not compared: not all are read each time.
    """
    clauses = {}
    missing = [name for name in before if name not in now and not re.match(r"client |.* of evaluation\.", name)]
    for name, (images, digest) in (now | dict.fromkeys(missing, (0, ""))).items():
        had, stored = before.get(name, (0, ""))
        if digest != stored:
            same_number = f"{name} no longer has the same images and labels in the same order"
            clauses[name] = same_number if images == had else f"{name} now has {images} images (had {had})"
    return clauses
