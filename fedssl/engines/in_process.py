"""The default engine: the clients one after another, or several at a time in worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from ..federation import Federation, build_federation
from ..messages import Message
from ..recipe.reading import load_stored_recipe
from ..recipe.recipe import Recipe
from ..run.creation import alone_in, new_run, refuse_existing
from ..run.directory import RunDirectory
from .observers import Observer
from .rounds import first_files, run_rounds
from .workers import ClientsHere, ClientTrainer, DataParallelTrainer, ParallelClients, check_devices


def run(recipe: Recipe, path: Path, observer: Observer | None = None, overwrite: bool = False) -> RunDirectory:
    """Run a recipe from its start and return the run's new folder, which is made once the input is checked completely.

    Raises:
        UserError: see `load_recipe`, `build_federation` and `RunDirectory`.
    """
    refuse_existing(path, overwrite)
    federation = build_federation(recipe)
    check_devices(federation)
    with new_run(path, first_files(federation), overwrite):
        return _run(federation, RunDirectory.open(path), observer or Observer())


def resume(
    path: Path, observer: Observer | None = None, trust: bool = False, clients_parallel: int | None = None
) -> RunDirectory:
    """Continue a run from its last complete round and return its folder; a finished run is left as it is.

    The result is bit-identical to that of a run that was never interrupted, on the same machine and thread count. From
    here on `clients_parallel` clients train at a time (default: as the recipe has it).

    Raises:
        UserError: see `RunDirectory.require_unchanged` and, for `trust`, `load_stored_recipe`.
    """
    RunDirectory.open(path)  # a folder that holds no run is refused before it is locked
    with alone_in(path):
        directory = RunDirectory.open(path)
        directory.require_unchanged()
        directory.roll_back()
        if directory.checkpoint.finished:
            return directory
        recipe = load_stored_recipe(directory, trust, resuming=True)
        if clients_parallel is not None:
            recipe = recipe.model_copy(update={"clients_parallel": clients_parallel})
        federation = build_federation(recipe)
        check_devices(federation)
        return _run(federation, directory, observer or Observer())


def _run(federation: Federation, directory: RunDirectory, observer: Observer) -> RunDirectory:
    if federation.recipe.training.processes > 1:
        with DataParallelTrainer(federation) as trainer:
            return run_rounds(federation, directory, observer, LocalClients(federation, directory, observer, trainer))
    if federation.recipe.clients_parallel == 1:
        return run_rounds(federation, directory, observer, LocalClients(federation, directory, observer))
    with ParallelClients(federation, directory, observer) as clients:
        return run_rounds(federation, directory, observer, clients)


class LocalClients(ClientsHere):
    """Clients one after another, each trained by `trainer`; by default in this process."""

    def __init__(
        self, federation: Federation, directory: RunDirectory, observer: Observer, trainer: ClientTrainer | None = None
    ):
        super().__init__(federation, directory, observer)
        self._trainer = trainer or ClientTrainer(federation)

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        replies = {}
        for position, k in enumerate(sent):
            self._observer.client_began(number, k, position, len(sent))
            replies[k], state = self._trainer.train(k, self._states.load(k), sent[k], number)
            self._states.store(k, number, state)
        return replies, {}

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        for k in range(len(self._federation.client_rows)):
            yield k, *self._trainer.evaluate(k, self._states.load(k), number)
