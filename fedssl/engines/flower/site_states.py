"""A client's states on its site's disk."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import UserError
from ...messages import Message
from ...run_directory import client_file
from ...storage import read_message, write_message
from ...untrusted.files import expand_home
from .site import SiteOptions


class SiteStates:
    """A client's states by round: the one that the server's last commit counts on, and the newest."""

    def __init__(self, folder: Path, client: int, prune: bool):
        """Keep states in a folder; with `prune` those that are no longer needed are removed."""
        self._folder, self._client, self._prune = folder, client, prune

    @classmethod
    def of_run(cls, site: SiteOptions, run: str) -> SiteStates:
        """The states of one run, in a folder of its own below `site.state`.

        Args:
            site: the site's options.
            run: the name that the server gave the run.

        Raises:
            UserError: the name is none that a folder may have.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run):
            raise UserError(
                f"the server's name of the run is invalid: expected 1 to 64 letters, digits, - or _, got {run[:100]!r}"
            )
        folder = expand_home(site.state) / run
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, site.client, prune=True)

    def load(self, round_number: int | None) -> Message:
        """The state after a round; empty for None: the client has not taken part yet.

        Raises:
            UserError: the state is missing or damaged.
        """
        return Message() if round_number is None else read_message(self._path(round_number))

    def store(self, round_number: int, state: Message, kept: int | None) -> None:
        """Keep a state, and drop all but it and that of the round `kept`, which may have to be trained from again."""
        path = self._path(round_number)
        write_message(path, state)
        if self._prune:
            needed = {path} if kept is None else {path, self._path(kept)}
            for other in self._folder.glob(f"client-{self._client:04d}.round-*"):
                if other not in needed:
                    other.unlink(missing_ok=True)

    def _path(self, round_number: int) -> Path:
        return self._folder / client_file(self._client, round_number)
