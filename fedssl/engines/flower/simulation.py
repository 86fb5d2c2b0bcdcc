"""Simulate the Flower engine on Ray, on this machine: the same server and clients as in a deployment.

Ray runs any code that it is sent. So it listens on loopback alone, asks for a token that this process makes, and keeps
its files and sockets in a folder that is for this user alone.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from ...errors import UserError, install_command
from ...federation import Federation, build_federation
from ...recipe.recipe import Recipe
from ...run_folder.creation import new_run, process_folder, refuse_existing
from ...run_folder.directory import RunDirectory
from ..continuing import continue_run
from ..observers import Observer
from ..rounds import first_files, run_rounds
from .client import make_client_app
from .messenger import Messenger, Stopped
from .privacy import private_federation
from .registration import ConnectedClients
from .server import FlowerClients

#: Ray reads these once, when it is imported. The first, made for other systems, confines it to loopback here too.
_CONFINED = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


def run(recipe: Recipe, path: Path, observer: Observer | None = None, overwrite: bool = False) -> RunDirectory:
    """Run a recipe from its start into a new folder, its clients on Ray; see `in_process.run`."""
    _require_simulation(recipe)
    refuse_existing(path, overwrite)
    federation = private_federation(build_federation(recipe))
    with new_run(path, first_files(federation), overwrite):
        return _simulate(federation, RunDirectory.open(path), observer or Observer())


def resume(
    path: Path,
    observer: Observer | None = None,
    trust: bool = False,
    overrides: Sequence[str] = (),
    from_round: int | None = None,
) -> RunDirectory:
    """Continue a run from its last complete round; see `continue_run`."""
    return continue_run(path, observer, trust, overrides, from_round, _prepared, _simulate)


def _prepared(recipe: Recipe) -> Federation:
    _require_simulation(recipe)
    return private_federation(build_federation(recipe))


def _require_simulation(recipe: Recipe) -> None:
    if recipe.engine == "flower":
        raise UserError(
            "engine flower runs across machines and cannot be started with fedssl run: write its app with "
            "fedssl app RECIPE FOLDER and start it with flwr run FOLDER (docs/deploy.md), or use "
            "engine=flower-simulation on this machine"
        )
    if "ray" in sys.modules and not _CONFINED.items() <= os.environ.items():
        raise UserError(
            "engine flower-simulation confines Ray to this machine and user when it imports it, but this process has "
            "imported ray already: start the run in a new process (fedssl run does)"
        )
    if find_spec("ray") is None:
        raise UserError(f"engine flower-simulation needs Ray: {install_command('flower')}")
    os.environ.update(_CONFINED)


def _simulate(federation: Federation, directory: RunDirectory, observer: Observer) -> RunDirectory:
    outcome: list[BaseException | None] = []  # of the server app: one entry, None where it went well
    stop = threading.Event()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            connected = ConnectedClients(Messenger(grid, stop), federation, observer, "simulation")
            connected.require_enough()
            clients = FlowerClients(connected, federation, directory, observer)
            run_rounds(federation, directory, observer, clients)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    client_app = make_client_app((directory.path / "recipe.yaml").absolute(), simulated=True)
    options = federation.recipe.flower
    ray: dict[str, Any] = {"address": "local"}  # else Ray joins a cluster that RAY_ADDRESS or a file in /tmp names
    ray |= {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
    if options.cpus is not None:
        ray["num_cpus"] = options.cpus
    if options.object_store_megabytes is not None:
        ray["object_store_memory"] = options.object_store_megabytes * 2**20
    resources = {"num_cpus": options.client_cpus, "num_gpus": options.client_gpus}
    backend: Any = {"init_args": ray, "client_resources": resources}
    with process_folder() as folder, _quiet_until(stop):
        ray["_temp_dir"] = f"{folder}/ray"  # into which Ray lets everybody write
        run_simulation(server_app, client_app, len(federation.client_rows), backend_config=backend)
    if not outcome:
        raise RuntimeError("the simulation ended before its server app")
    if isinstance(outcome[0], Stopped):
        raise KeyboardInterrupt
    if outcome[0] is not None:
        raise outcome[0]
    return directory


@contextmanager
def _quiet_until(stop: threading.Event) -> Iterator[None]:
    """Let Flower log errors alone, and set `stop` on Ctrl-C: raised in Flower's own wait, an interrupt would hang."""
    logger, interruptible = logging.getLogger("flwr"), threading.current_thread() is threading.main_thread()
    level = logger.level
    logger.setLevel(logging.ERROR)
    if interruptible:
        handler = signal.signal(signal.SIGINT, lambda number, frame: stop.set())
    try:
        yield
    finally:
        logger.setLevel(level)
        if interruptible:
            signal.signal(signal.SIGINT, handler)
