"""Count the privacy that a run spends of each client over its rounds, and keep the count in the run's folder.

A round that uses a client's update is one Gaussian mechanism. Two runs are adjacent if they differ in one client's
whole update, which is replaced by any other of the same clipping norm; the same clients take part in both. k rounds
with the noise multiplier s are together one Gaussian mechanism with the noise multiplier s / sqrt(k) (Dong, Roth and Su
2022, Gaussian differential privacy, corollary 3.3), also where a round depends on the results of earlier ones.
dp-accounting computes its epsilon exactly (Balle and Wang 2018, Improving the Gaussian mechanism, theorem 8).

A round in which only some clients are sampled counts in full. To count less, the sample would have to be secret, but it
follows from the recipe's seed, which every site has, and metrics.csv names those who took part.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable
from functools import cache, partial

import numpy as np
from pydantic import Field

from ...errors import UserError, explained, install_command
from ...options import Options, validated
from ...recipe.recipe import FixedClipping, FlowerOptions, LocalDP
from ...run_folder.directory import RunDirectory
from ...run_folder.storage import write_atomically
from ...untrusted import read_regular_file

#: the file in a run's folder that holds the count
PRIVACY_FILE = "privacy_spent.json"


def noise_multiplier(privacy: LocalDP | FixedClipping) -> float:
    """Return the noise's standard deviation divided by the largest L2 distance of clipped updates, 2 * clipping_norm.

    With `local_dp` both are of one update. With `fixed_clipping` both are of the clients' sum: the mean divides noise
    and distance by the same number.
    """
    if isinstance(privacy, LocalDP):
        return privacy.noise_deviation / (2 * privacy.clipping_norm)
    return privacy.noise_multiplier / 2


@cache
def epsilon_after(privacy: LocalDP | FixedClipping, rounds: int) -> float:
    """Return the epsilon that a client has spent after some rounds, at `privacy.delta`; infinite without noise."""
    try:
        from dp_accounting import get_epsilon_gaussian
    except ModuleNotFoundError as error:
        problem = "differential privacy is counted by dp-accounting, which is not installed"
        raise UserError(f"{problem}: {install_command('privacy')}") from error
    if rounds == 0:
        return 0.0
    with np.errstate(all="ignore"):  # it takes logarithms of probabilities that are zero
        return float(get_epsilon_gaussian(noise_multiplier(privacy) / math.sqrt(rounds), privacy.delta))


def rounds_within(privacy: LocalDP | FixedClipping, budget: float, most: int) -> int:
    """Return how many rounds, at most `most`, a client can take part in within the budget of epsilon."""
    return bisect_right(range(1, most + 1), budget, key=partial(epsilon_after, privacy))


class SpentRounds(Options):
    """The stored count: the clients asked in the newest round, and each client's rounds before it."""

    round: int = Field(0, ge=0, description="the newest round that has begun")
    asked: list[int] = Field([], description="the clients whose updates that round uses")
    earlier: dict[int, int] = Field({}, description="in how many earlier rounds a client's update was used")

    def of(self, client: int) -> int:
        """Return a client's rounds, the newest one included."""
        return self.earlier.get(client, 0) + (client in self.asked)


class PrivacyAccountant:
    """Counts the rounds of each client before the round's messages are sent, so that a kill loses nothing.

    With `local_dp` a client's update counts as soon as it is asked for: the server may have it although the round was
    never committed, for instance after a kill. The repeated round counts again. With `fixed_clipping` the server is
    trusted, and only a committed mean can leave it: updates that are in no committed mean do not count. Without
    differential privacy nothing is counted.
    """

    def __init__(self, directory: RunDirectory, options: FlowerOptions):
        """Continue the count in a run's folder; raise UserError if it is missing there or cannot be read."""
        self._path, self._budget = directory.path / PRIVACY_FILE, options.epsilon_budget
        self._privacy, self._spent = options.differential_privacy, SpentRounds()
        if self._privacy is None:
            return
        epsilon_after(self._privacy, 1)  # raises before the first round if dp-accounting is missing
        committed, problem = directory.checkpoint.round, "is missing"
        if self._path.exists():
            claim = f"{self._path} cannot be read as the count of the privacy that was spent"
            with explained(claim):
                self._spent = validated(SpentRounds, json.loads(read_regular_file(self._path)), claim)
            problem = f"ends with round {self._spent.round}"
        if self._spent.round < committed:
            raise UserError(
                f"{self._path} {problem}, but the run has {committed} committed "
                f"{'round' if committed == 1 else 'rounds'}, so the privacy that it has spent is not known: put back "
                "the file as the run wrote it, or start a new run"
            )

    def begin(self, number: int, clients: Collection[int]) -> None:
        """Count a round for clients about to be asked; raise UserError, uncounted, if it exceeds a client's budget."""
        if self._privacy is None:
            return
        spent, budget = self._spent, self._budget
        if spent.round >= number and isinstance(self._privacy, FixedClipping):
            earlier = spent.earlier  # the round begins again, as its mean was not committed
        else:
            earlier = {k: spent.of(k) for k in sorted({*spent.earlier, *spent.asked})}
        after = SpentRounds(round=number, asked=sorted(clients), earlier=earlier)
        for k in after.asked:
            rounds = after.of(k)
            if budget is not None and (epsilon := epsilon_after(self._privacy, rounds)) > budget:
                before = epsilon_after(self._privacy, rounds - 1)
                raise UserError(
                    f"round {number} is not begun, because it would raise the privacy loss of client {k} to epsilon "
                    f"{epsilon:.6g} at delta {self._privacy.delta:g}, above flower.epsilon_budget {budget:g}; the "
                    f"client has spent {before:.6g} in {rounds - 1} rounds, so {max(budget - before, 0):.6g} is left, "
                    "less than a round takes. Earlier rounds are kept. fedssl privacy RECIPE tells how many rounds a "
                    "budget allows"
                )
        self._store(after)

    def keep_only(self, number: int, clients: Collection[int]) -> None:
        """Uncount, with `fixed_clipping`, the clients of the round whose answers are not in the mean."""
        if isinstance(self._privacy, FixedClipping) and self._spent.round == number:
            asked = [k for k in self._spent.asked if k in clients]
            self._store(self._spent.model_copy(update={"asked": asked}))

    def discard(self, client: int) -> None:
        """Uncount, with `fixed_clipping`, a client whose answer to the newest round was refused."""
        self.keep_only(self._spent.round, [k for k in self._spent.asked if k != client])

    def epsilons(self, clients: Iterable[int]) -> dict[int, float]:
        """Return the epsilon that each of these clients has spent so far; empty without differential privacy."""
        privacy = self._privacy
        return {} if privacy is None else {k: epsilon_after(privacy, self._spent.of(k)) for k in clients}

    def _store(self, spent: SpentRounds) -> None:
        write_atomically(self._path, (spent.model_dump_json(indent=1) + "\n").encode())
        self._spent = spent
