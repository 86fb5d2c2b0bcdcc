"""``python -m benchmarks.simulation``: how fast a run trains, which phases its rounds consist of, and peers beside it.

Whole runs of shipped recipes on images of noise, 32 x 32 pixels in colour: one as it is, for seconds a round and images
a second, and one in which the functions of each phase are timed from outside (benchmarks/phases.py). Then local
training alone, in turn with lightly's loop and with kornia's views (benchmarks/simulation_peers.py).

With ``--device cuda`` the networks are ResNet-18, and the batches 128 to 512. There the device is synchronised around
each phase of the timed run, which costs time of its own; the run as it is has no synchronisation added.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import write
from benchmarks.__main__ import positive
from benchmarks.measure import ROOT, Settings
from benchmarks.phases import PHASES, EnoughRounds, PhaseClock, Round, RoundRecorder, places, timed_places
from benchmarks.simulation_peers import LOOPS, RECIPES, LocalTraining, Loop, make_loop, missing_package, noise
from benchmarks.simulation_tables import TWO_AT_A_TIME, tables
from benchmarks.timing import problem
from benchmarks.two_at_a_time import COPIES, two_at_a_time
from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.recipe.reading import load_recipe
from fedssl.recipe.recipe import Recipe

CLIENTS = 4
CLASSES = 10
TEST_IMAGES = 200
PUBLIC_IMAGES = 100
STAGES, ROUNDS_PER_STAGE = 4, 2  # of LW-FedSSL with small_vit: a stage for each of its blocks


@dataclass(frozen=True)
class Simulation:
    """A recipe whose rounds are measured.

    Attributes:
        recipe: the name of a shipped one.
        architectures: of the clients.
        batch_size: images a step.
        steps: of each client in a round.
    """

    recipe: str
    architectures: tuple[str, ...]
    batch_size: int
    steps: int

    @property
    def title(self) -> str:
        return f"{self.recipe}, {' and '.join(self.architectures)}, batch {self.batch_size}"


@dataclass(frozen=True)
class Sizes:
    """What is measured on a device."""

    simulations: tuple[Simulation, ...]
    trainings: tuple[LocalTraining, ...]


def sizes(device: str, quick: bool) -> Sizes:
    if quick:
        simulations = [
            Simulation("fedbyol", ("small_convnet",), 4, 2),
            Simulation("hetero_ssfl", ("small_convnet", "small_convnet_wide"), 4, 2),
            Simulation("fedu2", ("small_convnet",), 4, 2),
            Simulation("lw_fedssl", ("small_vit",), 4, 2),
        ]
        trainings = [LocalTraining(objective, "small_convnet", 4, 2, device) for objective in RECIPES]
    elif device == "cuda":
        simulations = [Simulation("fedbyol", ("resnet18",), batch, 10) for batch in (128, 256, 512)]
        simulations += [Simulation("fedu2", ("resnet18",), 256, 10)]
        simulations += [Simulation("hetero_ssfl", ("resnet18", "small_resnet18"), 256, 10)]
        simulations += [Simulation("lw_fedssl", ("small_vit",), 256, 10)]
        trainings = [LocalTraining("byol", "resnet18", batch, 10, device) for batch in (128, 256, 512)]
        trainings += [LocalTraining(objective, "resnet18", 256, 10, device) for objective in ("simsiam", "simclr")]
    else:
        simulations = [
            # a client of fedu2_table1_small takes 40 steps a round
            Simulation("fedbyol", ("small_convnet",), 50, 40),
            Simulation("fedbyol", ("small_resnet18",), 50, 20),
            Simulation("hetero_ssfl", ("small_convnet", "small_resnet18"), 50, 20),
            Simulation("fedu2", ("small_resnet18",), 50, 20),
            Simulation("lw_fedssl", ("small_vit",), 50, 20),
        ]
        trainings = [
            LocalTraining(objective, architecture, 50, 20, device)
            for architecture in ("small_convnet", "small_resnet18")
            for objective in RECIPES
        ]
        trainings += [
            LocalTraining("byol", architecture, 128, 10, device) for architecture in ("small_convnet", "small_resnet18")
        ]
    return Sizes(tuple(simulations), tuple(trainings))


# Rounds


def measure_simulation(simulation: Simulation, device: str, repeats: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Measure a simulation's rounds.

    Returns:
        "seconds": of each round of the run as it is, which does not evaluate; "images": of a round; "phases": mean
        seconds of each phase of the timed run, which evaluates after each round; "timed_seconds": of its rounds.

    Raises:
        LookupError: a phase cannot be timed, see benchmarks/phases.py.
        UserError: the overrides do not fit the recipe.
    """
    rounds = STAGES * ROUNDS_PER_STAGE if simulation.recipe == "lw_fedssl" else repeats + 2
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(simulation, device, rounds, Path(folder))
        plain = measure_rounds(
            load_recipe(simulation.recipe, [*settings, *overrides]), Path(folder) / "plain", phases=False
        )
        recipe = load_recipe(simulation.recipe, [*settings, "evaluation.every=1", *overrides])
        timed = measure_rounds(recipe, Path(folder) / "timed", phases=True)
    return {
        **asdict(simulation),
        "seconds": [one.seconds for one in plain],
        "images": plain[0].images,
        "phases": {phase: statistics.fmean(one.phases[phase] for one in timed) for phase in PHASES},
        "timed_seconds": [one.seconds for one in timed],
    }


def measure_rounds(recipe: Recipe, path: Path, phases: bool) -> list[Round]:
    """Measure all rounds but the first, which warms up, and the last, which would train a linear layer to evaluate."""
    timed = places(recipe) if phases else []
    clock = PhaseClock(torch.device(recipe.device)) if phases else None
    recorder = RoundRecorder(recipe.rounds - 1, timed, clock)
    with timed_places(timed, clock) if clock else nullcontext(), suppress(EnoughRounds):
        run(recipe, path, recorder)
    return recorder.rounds


def _settings(simulation: Simulation, device: str, rounds: int, folder: Path) -> list[str]:
    """What the recipe is measured with; its images are written into the folder."""
    count = CLIENTS * simulation.batch_size * simulation.steps
    public = PUBLIC_IMAGES if simulation.recipe == "hetero_ssfl" else 0
    images = noise(count + public + TEST_IMAGES).permute(0, 2, 3, 1).numpy()
    labels = np.arange(len(images)) % CLASSES
    path, split = folder / "noise.npz", count + public
    np.savez(path, x_train=images[:split], y_train=labels[:split], x_test=images[split:], y_test=labels[split:])
    settings = [
        f"data={{name: npz, path: '{path}', public_holdout: {public}}}",
        f"partition={{name: iid, clients: {CLIENTS}}}",
        f"architectures=[{', '.join(simulation.architectures)}]",
        f"rounds={rounds}",
        f"device={device}",
        "training.local_epochs=1",
        f"training.batch_size={simulation.batch_size}",
        "evaluation.linear.epochs=1",
    ]
    if simulation.recipe == "lw_fedssl":
        settings += ["schedule.layers_per_stage=1", f"schedule.rounds_per_stage={ROUNDS_PER_STAGE}"]
    return settings


# Local training beside peers


def _loops(training: LocalTraining) -> list[tuple[str, int]]:
    """Whose loops, and how many of one at a time: on the CPU, where there are two threads, two of it too."""
    pairs = [(name, COPIES) for name in ("fedssl", "lightly")]
    two = training.device == "cpu" and torch.get_num_threads() >= COPIES
    return [(name, 1) for name in LOOPS] + (pairs if two else [])


def measure_training(training: LocalTraining, repeats: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Time fedssl's and the peers' local training in turn.

    Returns:
        "rows": for each loop "images", how many a pass trains on, and "times", seconds of each pass, or "status", why
        there are none.

    Raises:
        ValueError: a peer trains another number of parameters, so the loops do not do the same.
    """
    loops: dict[str, Loop] = {}
    rows: dict[str, dict[str, Any]] = {}
    try:
        for name, copies in _loops(training):
            title = name if copies == 1 else f"{name}, {TWO_AT_A_TIME}"
            rows[title] = {"status": missing_package(name) or "ok", "images": copies * training.images, "times": []}
            if rows[title]["status"] == "ok":
                make = make_loop if copies == 1 else two_at_a_time
                loops[title] = make(name, training, list(overrides))
                if loops[title].parameters != loops["fedssl"].parameters:
                    raise ValueError(
                        f"{title} must train as many parameters as fedssl, {loops['fedssl'].parameters}, got "
                        f"{loops[title].parameters}"
                    )
                loops[title].run()  # warms up; lightly's workers start
        for _ in range(repeats):
            for title, loop in loops.items():
                gc.collect()
                start = time.perf_counter()
                loop.run()  # reads the losses, so a GPU is done
                rows[title]["times"].append(time.perf_counter() - start)
    finally:
        for loop in loops.values():
            loop.close()
    return {**asdict(training), "rows": rows}


# The command


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    settings = Settings(device=options.device, threads=options.threads, repeats=options.repeats)
    torch.set_num_threads(options.threads)
    chosen = sizes(options.device, options.quick)
    deadline = time.monotonic() + options.seconds
    results: dict[str, Any] = {"environment": write.environment(settings), "overrides": options.overrides}
    changed = (options.repeats, options.overrides)
    results["simulations"] = [
        _measured(one.title, partial(measure_simulation, one, options.device, *changed), deadline)
        for one in chosen.simulations
    ]
    results["trainings"] = [
        _measured(one.title, partial(measure_training, one, *changed), deadline) for one in chosen.trainings
    ]
    folder = options.output or (ROOT / "runs" / "benchmarks" if options.quick else write.default_folder(settings))
    folder.mkdir(parents=True, exist_ok=True)
    write.replace(folder / "simulation.json", json.dumps(results, indent=1) + "\n")
    write.replace(folder / "simulation.md", tables(results))
    print(tables(results))
    print(f"written to {folder}")
    return int(any(one["status"] != "ok" for kind in ("simulations", "trainings") for one in results[kind]))


def _measured(title: str, measure: Callable[[], dict[str, Any]], deadline: float) -> dict[str, Any]:
    """What `measure` returns with its title and status; without time or memory, or with a wrong setting, that alone."""
    print(title, flush=True)
    if time.monotonic() > deadline:
        return {"title": title, "status": "not measured: no time was left"}
    try:
        return {"title": title, "status": "ok", **measure()}
    except (RuntimeError, UserError) as error:
        return {"title": title, "status": problem(error)}
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The exit code is 1 where something could not be measured; a peer that is not installed does not count.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings of fedssl's recipes to change, such as training.batch_size=64; the peers keep theirs",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default: cpu)")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="threads of all loops (default: 2)")
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="rounds and passes that are measured (default: 3)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="S", help="begin nothing later than this (default: no limit)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write simulation.json and simulation.md (default: benchmarks/results/cpu/PROCESSOR or gpu/CARD; "
        "runs/benchmarks for tiny sizes)",
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; leave out --device cuda to measure on the CPU")
    return options


if __name__ == "__main__":
    sys.exit(main())
