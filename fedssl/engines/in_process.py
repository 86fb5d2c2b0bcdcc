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
from .progress import Progress, Silent
from .rounds import first_files, run_rounds
from .workers import ClientStates, ClientTrainer, DataParallelTrainer, ParallelClients, check_devices


def run(recipe: Recipe, path: Path, progress: Progress | None = None, overwrite: bool = False) -> RunDirectory:
    """Run a recipe from its start into a new folder.

    The input is checked completely before the folder is made.

    Raises:
        UserError: see `load_recipe`, `build_federation` and `RunDirectory`.
    """
    refuse_existing(path, overwrite)
    federation = build_federation(recipe)
    check_devices(federation)
    with new_run(path, first_files(federation), overwrite):
        return _run(federation, RunDirectory.open(path), progress or Silent())


def resume(
    path: Path, progress: Progress | None = None, trust: bool = False, clients_parallel: int | None = None
) -> RunDirectory:
    """Continue a run from its last complete round; a finished run is left as it is.

    The result is bit-identical to that of a run that was never interrupted, on the same machine and thread count. From
    here on `clients_parallel` clients train at a time (default: as the recipe has it).

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
        if clients_parallel is not None:
            recipe = recipe.model_copy(update={"clients_parallel": clients_parallel})
        federation = build_federation(recipe)
        check_devices(federation)
        return _run(federation, directory, progress or Silent())


class LocalClients:
    """Clients one after another, each trained by `trainer`; by default in this process."""

    def __init__(
        self,
        federation: Federation,
        directory: RunDirectory,
        progress: Progress,
        trainer: ClientTrainer | None = None,
    ):
        self._federation, self._progress = federation, progress
        self._states = ClientStates(directory, federation.recipe.client_states)
        self._trainer = trainer or ClientTrainer(federation)

    def answers(self, number: int, sent: dict[int, Message]) -> tuple[dict[int, Message], dict[int, str]]:
        replies = {}
        for position, k in enumerate(sent):
            self._progress.client(number, k, position, len(sent))
            replies[k], state = self._trainer.train(k, self._states.load(k), sent[k], number)
            self._states.store(k, number, state)
        return replies, {}

    def discard(self, index: int) -> None:
        self._states.discard(index)

    def kept(self, reply: Message) -> Message:
        return reply

    def images(self) -> dict[int, int]:
        return {k: len(rows) for k, rows in enumerate(self._federation.client_rows)}

    def epsilons(self) -> dict[int, float]:
        return {}

    def evaluations(self, number: int) -> Iterator[tuple[int, dict[str, float], Tensor]]:
        for k in range(len(self._federation.client_rows)):
            yield k, *self._trainer.evaluate(k, self._states.load(k), number)


def _run(federation: Federation, directory: RunDirectory, progress: Progress) -> RunDirectory:
    recipe = federation.recipe
    if recipe.training.processes > 1:
        with DataParallelTrainer(federation) as trainer:
            return run_rounds(federation, directory, progress, LocalClients(federation, directory, progress, trainer))
    if recipe.clients_parallel == 1:
        return run_rounds(federation, directory, progress, LocalClients(federation, directory, progress))
    with ParallelClients(federation, directory, progress) as clients:
        return run_rounds(federation, directory, progress, clients)
