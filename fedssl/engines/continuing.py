"""Run and continue a recipe, the same under every engine: its folder and data, changed options, and the history."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from fedkernels import __version__

from ..data.digests import DATA_DIGESTS, digests_text, read_digests
from ..data.files import notify
from ..errors import UserError
from ..federation import Federation, require_same_data
from ..recipe.changes import Change, changed_recipe, consequences
from ..recipe.reading import load_stored_recipe
from ..recipe.recipe import Recipe
from ..run_folder.creation import alone_in, new_run, refuse_existing
from ..run_folder.directory import HISTORY, HISTORY_HEADER, RunDirectory
from ..run_folder.storage import csv_text, read_csv
from .observers import Observer
from .rounds import first_files


@dataclass(frozen=True)
class Engine:
    """How an engine runs and continues recipes.

    Attributes:
        prepare: checks whether the engine can run a recipe, and loads its data.
        run_rest: runs the rounds that are left of a run, and returns its folder.
    """

    prepare: Callable[[Recipe], Federation]
    run_rest: Callable[[Federation, RunDirectory, Observer], RunDirectory]

    def run(
        self,
        recipe: Recipe,
        path: Path,
        observer: Observer | None = None,
        overwrite: bool = False,
        before: Callable[[Federation], Federation] = lambda federation: federation,
    ) -> RunDirectory:
        """Run what `before` makes of a recipe and its data; return the new folder, made once the input is checked."""
        refuse_existing(path, overwrite)
        federation = before(self.prepare(recipe))
        with new_run(path, first_files(federation), overwrite):
            return self.run_rest(federation, RunDirectory.open(path), observer or Observer())

    def resume(
        self,
        path: Path,
        observer: Observer | None = None,
        trust: bool = False,
        overrides: Sequence[str] = (),
        from_round: int | None = None,
    ) -> RunDirectory:
        """Continue a run from its last complete round, see `fedssl.resume`, and return its folder.

        With `from_round` it first goes back to that round, and what came after it is removed. A run across machines
        only goes back: `flwr run` continues it.
        """
        observer = observer or Observer()
        with alone_in(path):
            directory = RunDirectory.open(path)
            directory.finish_replacing()
            directory.require_unchanged()
            last = directory.checkpoint.round
            back = None if from_round == last else from_round
            stored = load_stored_recipe(directory, trust, resuming=True)
            if back is not None and stored.flower.differential_privacy is not None:
                raise UserError(
                    f"{path} cannot go back to round {back}: with differential privacy the rounds after it have spent "
                    "the clients' privacy, which would no longer be counted; start a new run"
                )
            done = max(last if back is None else back, 0)
            recipe, changes = changed_recipe(path / "recipe.yaml", stored, overrides, done)
            if back is not None:
                changes.insert(0, Change("from_round", str(last), str(back)))
            if directory.checkpoint.finished and not changes:
                directory.roll_back()
                return directory
            if stored.engine == "flower":
                if back is None or overrides:
                    raise UserError(
                        f"{path} is a run across machines: flwr run on its app continues it, and what may change is "
                        "changed by writing the app anew (fedssl app with --output RUN); fedssl run --resume can only "
                        "go back in it, with --from-round alone"
                    )
                directory.replace_files({HISTORY: _history(directory, changes, done)}, back)
                directory.roll_back()
                notify(f"{path} is at round {back} again; flwr run on its app continues it from there")
                return directory
            if directory.checkpoint.finished and back is None and recipe.rounds == stored.rounds:
                raise UserError(
                    f"{path} is finished, so nothing would be done with another {changes[0].option}: give rounds=N "
                    f"with more than {stored.rounds} as well, or measure the run as it is (fedssl evaluate)"
                )
            federation = self.prepare(recipe)
            digests = federation.data_digests()
            added = {*(recipe.evaluation.downstream or {})} - {*(stored.evaluation.downstream or {})}
            new = {name for name in digests if "downstream" in name and name.rpartition(".")[2] in added}
            require_same_data(path, {name: digest for name, digest in digests.items() if name not in new})
            if changes:
                files = {"recipe.yaml": federation.recipe.to_yaml(), HISTORY: _history(directory, changes, done)}
                if new:
                    files[DATA_DIGESTS] = digests_text((read_digests(path) or {}) | digests)
                directory.replace_files(files, back)
                for sentence in consequences(stored, recipe, done):
                    notify(sentence)
            directory.roll_back()
            return self.run_rest(federation, directory, observer)


def _history(directory: RunDirectory, changes: Sequence[Change], done: int) -> str:
    """Return the text of history.csv with changes after `done` rounds added to it."""
    earlier = [tuple(row.values()) for row in read_csv(directory.path / HISTORY)]
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return csv_text([HISTORY_HEADER, *earlier, *((done, now, __version__, *change) for change in changes)])
