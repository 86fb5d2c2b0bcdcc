"""Outcomes of the self-test, kept in the user's cache: one file for each card, driver and build.

A file is written under a temporary name and renamed. A file that is missing, broken or of other contents counts as no
outcome, and where nothing can be written each process tests again.
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

PASSED, FAILED, NOT_TESTED = "passed", "FAILED", "not tested"


class Card(NamedTuple):
    """A GPU as far as an outcome depends on it."""

    name: str  # as in "NVIDIA H200"
    capability: str  # as in "9.0"
    driver: str  # the version of the driver, and the newest CUDA that it supports


class Result(NamedTuple):
    """Of one operator on one kind of card."""

    card: str  # as in "NVIDIA H200"
    operator: str
    outcome: str  # "passed", "FAILED" or "not tested"
    reason: str = ""  # why it did not pass
    seconds: float = 0.0


def card_of(gpu: int) -> Card:
    """The card with this number. Initialises CUDA."""
    properties = torch.cuda.get_device_properties(gpu)
    return Card(properties.name, f"{properties.major}.{properties.minor}", _driver())


@functools.cache
def _driver() -> str:
    driver, newest_cuda = "", ctypes.c_int(0)
    with contextlib.suppress(OSError, ValueError, IndexError):  # where this file is missing, the number below remains
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(newest_cuda))
    return f"{driver} CUDA {newest_cuda.value}".strip()


@functools.cache
def build() -> str:
    """A digest of the compiled module and of the Python around it, the test's included; "" if it cannot be read."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.version.cuda}".encode())
    module = sys.modules.get("fedkernels._C")
    try:
        for path in (Path(getattr(module, "__file__", None) or ""), *sorted(Path(__file__).parent.glob("*.py"))):
            digest.update(path.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()


def load(card: Card) -> dict[str, Result]:
    """By operator the results that were kept, each passed or failed."""
    try:
        kept = json.loads(_file(card).read_text(encoding="utf-8"))
        reasons = kept.pop("reasons")
        valid = kept == _identity(card) and all(isinstance(reason, str) for reason in reasons.values())
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, KeyError):
        return {}
    if not valid:
        return {}
    return {name: Result(card.name, name, FAILED if why else PASSED, why) for name, why in reasons.items()}


def save(card: Card, results: dict[str, Result]) -> None:
    """Keeps results beside those that are there, if the cache can be written. What is not tested is not kept."""
    certain = {name: result for name, result in results.items() if result.outcome != NOT_TESTED}
    if not certain:
        return
    with contextlib.suppress(OSError, RuntimeError):
        path = _file(card)
        path.parent.mkdir(parents=True, exist_ok=True)
        reasons = {name: result.reason for name, result in {**load(card), **certain}.items()}
        contents = {**_identity(card), "reasons": reasons}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(contents, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


@contextlib.contextmanager
def one_at_a_time(card: Card, time_limit: float) -> Iterator[None]:
    """Lets other processes wait, until the time limit. Where no file can be locked, none waits."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError, ImportError):
            import fcntl  # not everywhere

            path = _file(card).with_suffix(".lock")
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("w"))
            deadline = time.monotonic() + time_limit
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.05)
        yield


def _identity(card: Card) -> dict[str, str]:
    return {**card._asdict(), "build": build()}


def _file(card: Card) -> Path:
    if not build():
        raise OSError("the compiled module cannot be read")
    # A relative path in XDG_CACHE_HOME is invalid by the XDG base directory specification.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    of_card = hashlib.sha256(json.dumps([*card, build()]).encode()).hexdigest()[:32]
    return cache / "fedkernels" / "self_test" / f"{of_card}.json"
