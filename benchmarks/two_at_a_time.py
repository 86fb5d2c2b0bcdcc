"""Two of the same loop at a time, each in a process of its own with half of the threads.

That is what `clients_parallel: 2` does with two clients on two cores. A small network gains little by a second thread,
so a machine trains more images a second this way; whether lightly's loop does too stands beside it.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from benchmarks.simulation_peers import LocalTraining, Loop, make_loop

COPIES = 2


def two_at_a_time(name: str, training: LocalTraining, overrides: list[str]) -> Loop:
    """Two of `make_loop(name, training, overrides)`; a run of it trains both once on all images.

    The processes end with `close`, or with this process.
    """
    threads = max(1, torch.get_num_threads() // COPIES)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for _ in range(COPIES):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, name, training, overrides, threads))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)

    @contextmanager
    def both_live() -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            raise RuntimeError(f"two of {name}'s loop at a time: a process has ended") from None

    def run() -> None:
        with both_live():
            for pipe in pipes:
                pipe.send("run")
            for pipe in pipes:
                pipe.recv()

    def close() -> None:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()

    try:
        with both_live():
            parameters, *_ = [pipe.recv() for pipe in pipes]
    except RuntimeError:
        close()
        raise
    return Loop(run, parameters, close)


def _serve(pipe: Connection, name: str, training: LocalTraining, overrides: list[str], threads: int) -> None:
    """One process: makes its loop, then runs it as often as it is told to, until the other end closes."""
    torch.set_num_threads(threads)
    loop = make_loop(name, training, overrides, loader_workers=1)
    pipe.send(loop.parameters)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        loop.run()
        pipe.send("done")
