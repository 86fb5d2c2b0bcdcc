"""Where the clients' states live between their rounds."""

from __future__ import annotations

from ..engine_options import Place
from ..messages import Message
from ..run_directory import RunDirectory


class ClientStates:
    """The clients' states during a run: one at a time in memory (`disk`), or all that have taken part (`memory`).

    Either way a state is written into the run's folder as soon as its client is done, and counts from the round's
    commit on, so a run resumes alike. With `disk`, memory does not grow with the number of clients; `memory` spares
    reading the files.
    """

    def __init__(self, directory: RunDirectory, place: Place):
        self._directory = directory
        self._kept: dict[int, Message] | None = {} if place == "memory" else None

    def load(self, index: int) -> Message:
        """A client's last state; empty where it has not taken part yet. The caller may change it."""
        if self._kept is None:
            return self._directory.client_state(index)
        if index not in self._kept:  # of a run that was resumed
            self._kept[index] = self._directory.client_state(index)
        return self._kept[index].copy()

    def store(self, index: int, round_number: int, state: Message) -> None:
        """Keep a client's state after its part in a round."""
        self._directory.write_client(index, round_number, state)
        if self._kept is not None:
            self._kept[index] = state.copy()

    def discard(self, index: int) -> None:
        """Take back what `store` kept in this round, so that the client's state is again the committed one."""
        self._directory.discard_client(index)
        if self._kept is not None:
            self._kept.pop(index, None)
