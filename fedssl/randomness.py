"""Random numbers that depend on their purpose, not on what was drawn before.

Every stream is seeded from the run's seed and a path of names such as ("client", 3, "round", 7, "augmentation"). So a
resumed run needs no stored generator state, and no part's or client's draws depend on which others exist.

On a CPU two runs with the same draws and number of threads are bit-identical. On CUDA some of torch's operations sum in
an order that changes from call to call: two runs on one model of GPU are bit-identical with `deterministic_on` alone.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from .errors import UserError


def seed_for(seed: int, *path: str | int) -> int:
    """Return a 63-bit seed from the run's seed and a path of names, the same on every machine."""
    text = "/".join([str(seed), *map(str, path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator_for(seed: int, *path: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator on a device. CPUs draw the same everywhere, a model of GPU something of its own."""
    return torch.Generator(device).manual_seed(seed_for(seed, *path))


def seeded(seed: int, *path: str | int) -> AbstractContextManager[None]:
    """Run the body with torch's global generators seeded by `seed_for`, and restore them afterwards."""
    return generators_set_to(seed_for(seed, *path))


@contextmanager
def generators_set_to(number: int) -> Iterator[None]:
    """Run the body with torch's global generators of the CPU and of CUDA set to a number, and restore them."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed would note, with a traceback, the seed of every kind of device that is absent, too.
        torch.default_generator.manual_seed(number)
        if devices:
            torch.cuda.manual_seed_all(number)
        yield


@contextmanager
def deterministic_on(device: torch.device, enabled: bool) -> Iterator[None]:
    """Let torch take deterministic algorithms alone in the body, if `enabled` and on CUDA, and put its setting back.

    Raises:
        UserError: an operation has no deterministic algorithm on CUDA.
    """
    if not enabled or device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise UserError(f"training.deterministic is true, but {error}; leave the option out") from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
