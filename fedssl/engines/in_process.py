"""The default engine: all clients one after another in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from ..client import Client
from ..federation import Federation, build_federation
from ..messages import Message
from ..models.model import Model
from ..reading import load_stored_recipe
from ..recipe import Recipe
from ..run_directory import RunDirectory
from ..run_folder.creation import new_run, refuse_existing
from ..run_folder.lock import alone_in
from .client_states import ClientStates
from .progress import Progress, Silent
from .rounds import evaluate_after, first_files, run_rounds


def run(recipe: Recipe, path: Path, progress: Progress | None = None, overwrite: bool = False) -> RunDirectory:
    """Run a recipe from its start into a new folder.

    The input is checked completely before the folder is made.

    Raises:
        UserError: see `load_recipe`, `build_federation` and `RunDirectory`.
    """
    refuse_existing(path, overwrite)
    federation = build_federation(recipe)
    with new_run(path, first_files(federation), overwrite):
        return _run(federation, RunDirectory.open(path), progress or Silent())


def resume(path: Path, progress: Progress | None = None, trust: bool = False) -> RunDirectory:
    """Continue a run from its last complete round; a finished run is left as it is.

    The result is bit-identical to that of a run that was never interrupted, on the same machine and thread count.

    Raises:
        UserError: see `RunDirectory.require_unchanged` and, for `trust`, `load_stored_recipe`.
    """
    RunDirectory.open(path)  # refuses what is no run's folder
    with alone_in(path):
        directory = RunDirectory.open(path)
        directory.require_unchanged()
        directory.roll_back()
        if directory.checkpoint.finished:
            return directory
        recipe = load_stored_recipe(directory, trust, resuming=True)
        return _run(build_federation(recipe), directory, progress or Silent())


class LocalClients:
    """Clients of this process, one after another."""

    def __init__(self, federation: Federation, directory: RunDirectory, progress: Progress):
        self._federation, self._progress = federation, progress
        self._states = ClientStates(directory, federation.recipe.client_states)
        self._models: dict[str, Model] = {}  # the last client's of each architecture, which the next one reuses

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        method = self._federation.method
        replies = {}
        for position, k in enumerate(sent):
            self._progress.client(number, k, position, len(sent))
            client = self._client(k)
            replies[k] = method.client_round(client, sent[k], number)
            self._states.store(k, number, self._federation.client_state(client, number))
        return replies, {}

    def discard(self, index: int) -> None:
        self._states.discard(index)

    def images(self) -> dict[int, int]:
        return {k: len(rows) for k, rows in enumerate(self._federation.client_rows)}

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        for k in range(len(self._federation.client_rows)):
            yield k, *evaluate_after(self._federation, self._client(k).model, number)

    def _client(self, index: int) -> Client:
        architecture = self._federation.recipe.architecture_of(index)
        client = self._federation.client(index, self._states.load(index), self._models.get(architecture))
        self._models[architecture] = client.model
        return client


def _run(federation: Federation, directory: RunDirectory, progress: Progress) -> RunDirectory:
    return run_rounds(federation, directory, progress, LocalClients(federation, directory, progress))
