"""A site of a federation across machines: one client with its own options, data, states and evaluations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...data.datasets import load_dataset
from ...data.digests import DATA_DIGESTS, data_digests, differences, digests_text, read_digests
from ...data.options import SOURCES, DataOptions
from ...data.summary import summarise
from ...errors import SendableError
from ...federation import Federation, build_federation
from ...messages import Message
from ...recipe.recipe import Recipe
from ...run_folder.directory import client_file
from ...run_folder.storage import digest_of, read_message, write_atomically, write_message
from ...untrusted import expand_home, read_regular_file
from .site_files import SiteOptions

_CHECKED_SIZE = 32  # pixels a side
_DIGEST = ".sha256"  # the ending of the file with a state's digest


def count_own_images(site: SiteOptions) -> int | None:
    """Read a site's own images, at whatever size, and return the number of training images; None without any."""
    if site.data is None:
        return None
    data = site.data
    if SOURCES[data.name].image_files and data.image_size is None:
        data = data.model_copy(update={"image_size": _CHECKED_SIZE})  # a run's follows from its recipe
    return len(load_dataset(data, 0).train_images)


def site_federation(recipe: Recipe, site: SiteOptions, client: int) -> Federation:
    """Return the federation as a site sees it: its own client is whole, of the others it has no images."""
    if site.data is None and recipe.partition.name == "sites":
        raise SendableError(
            "the site's data is missing: the recipe has partition.name=sites, so each site's file must name its own "
            "images under data"
        )
    architectures = [recipe.architecture_of(k) for k in range(recipe.partition.clients)]
    if site.architecture is not None:
        architectures[client] = site.architecture
    data = None if site.data is None else _in_form(site.data, recipe.data.image_shape)
    changed: dict[str, Any] = {"architectures": architectures, "data": data or recipe.data}
    changed["device"] = site.device or recipe.device
    if not recipe.local_update.personal:
        # the weights to start from come with the server's first message, but for frozen ones, which never travel; and
        # the server evaluates the global model
        if recipe.model.train == "all":
            changed["model"] = recipe.model.without_weights()
        changed["evaluation"] = recipe.evaluation.model_copy(update={"downstream": None})
    return build_federation(recipe.model_copy(update=changed), owner=None if site.data is None else client)


def _in_form(data: DataOptions, shape: tuple[int, int, int] | None) -> DataOptions:
    """Return a site's data with the size and the colours of a recipe without data, where its file says nothing else."""
    if shape is None:
        return data
    changed: dict[str, int] = {}
    if data.image_size is None and shape[1] == shape[2]:
        changed["image_size"] = shape[1]
    if data.channels is None and (SOURCES[data.name].image_files or data.name == "npz"):
        # only where it makes a difference: of a TIFF, `channels` also says what its pages are
        summary = summarise(data.model_dump())
        if summary is not None and {summary.channels, shape[0]} == {1, 3}:
            changed["channels"] = shape[0]
    return data.model_copy(update=changed)


class SiteStates:
    """A client's states in a folder, by round; with `prune`, states that are no longer needed are removed."""

    def __init__(self, folder: Path, client: int, prune: bool):
        self._folder, self._client, self._prune = folder, client, prune

    @classmethod
    def of_run(cls, site: SiteOptions, client: int, run: str) -> SiteStates:
        """Return the states of one run, in a folder below `site.state`; raise UserError if its name is invalid."""
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run):
            raise SendableError(
                f"the server's name of the run is invalid: expected 1 to 64 letters, digits, - or _, got {run[:100]!r}"
            )
        folder = expand_home(site.state) / run
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, client, prune=True)

    def require_same_data(self, federation: Federation, start: int | None) -> None:
        """Raise UserError if the site's data are not those of the client's earlier rounds; its first round notes them.

        `start` is the round whose state the client starts from. The message leaves the site, so it names no number.
        """
        if not self._prune:
            return  # a simulated client's data are the run's
        current = data_digests(federation.dataset, federation.client_rows, federation.downstream, [self._client])
        stored = None if start is None else read_digests(self._folder)
        if stored is None:
            write_atomically(self._folder / DATA_DIGESTS, digests_text(current).encode())
        elif changed := differences(stored, current):
            which = ", ".join(changed)
            raise SendableError(f"its data have changed since it began this run ({which}): put them back as they were")

    def load(self, round_number: int | None) -> Message:
        """Return the state after a round, empty for None; raise UserError if it is missing, damaged or was changed."""
        if round_number is None:
            return Message()
        path = self._path(round_number)
        with suppress(FileNotFoundError):  # states of a simulation have no digest
            expected = read_regular_file(path.with_suffix(_DIGEST), 64)
            if digest_of(path).encode() != expected:
                raise SendableError(
                    f"its state of round {round_number} was changed since it was written, or is damaged: put it back "
                    "from a copy, or start a new run"
                )
        return read_message(path)

    def store(self, round_number: int, state: Message, kept: Iterable[int]) -> None:
        """Store a state. Those of the rounds `kept` stay, as the client may have to train from them again."""
        path = self._path(round_number)
        if not self._prune:  # a simulation's states have their digests in the run's manifest
            write_message(path, state)
            return
        path.with_suffix(_DIGEST).unlink(missing_ok=True)  # of an earlier attempt at the round
        write_atomically(path.with_suffix(_DIGEST), write_message(path, state).encode())
        needed = {path.stem, *(self._path(number).stem for number in kept)}
        for other in self._folder.glob(f"client-{self._client:04d}.round-*"):
            if other.stem not in needed:
                other.unlink(missing_ok=True)

    def _path(self, round_number: int) -> Path:
        return self._folder / client_file(self._client, round_number)
