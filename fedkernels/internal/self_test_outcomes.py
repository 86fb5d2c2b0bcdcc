"""Outcomes of the self-test, kept in the user's cache: one file for each card, driver, build and operator.

A file is written under a temporary name and renamed, and two processes that test at once write the same. A file that is
missing, broken or of other contents counts as no outcome, and where nothing can be written each process tests again.
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

# Beside the compiled module, what decides an outcome: the Python between the kernels, and the test.
_SOURCES = ("linear_cka_cuda.py", "self_test_cases.py")


class Card(NamedTuple):
    """A GPU as far as an outcome depends on it."""

    name: str  # as in "NVIDIA H200"
    capability: str  # as in "9.0"
    driver: str  # the version of the driver, and the newest CUDA that it supports


class Outcome(NamedTuple):
    """Of one operator's test on one card."""

    operator: str
    passed: bool
    reason: str = ""  # why it did not pass


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
    """A digest of the compiled module, and of what else decides an outcome; "" if it cannot be read."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.version.cuda}".encode())
    module = sys.modules.get("fedkernels._C")
    try:
        for path in (Path(getattr(module, "__file__", None) or ""), *(Path(__file__).with_name(s) for s in _SOURCES)):
            digest.update(path.read_bytes())
    except OSError:
        return ""
    return digest.hexdigest()


def load(card: Card, operator: str) -> Outcome | None:
    """The outcome that was kept, or None."""
    try:
        kept = json.loads(_file(card, operator).read_text(encoding="utf-8"))
        outcome = Outcome(operator, kept.pop("passed"), kept.pop("reason"))
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, KeyError):
        return None
    valid = isinstance(outcome.passed, bool) and isinstance(outcome.reason, str) and kept == _identity(card, operator)
    return outcome if valid else None


def save(card: Card, outcome: Outcome) -> None:
    """Keeps an outcome if the cache can be written."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _file(card, outcome.operator)
        path.parent.mkdir(parents=True, exist_ok=True)
        contents = {**_identity(card, outcome.operator), "passed": outcome.passed, "reason": outcome.reason}
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


def _identity(card: Card, operator: str) -> dict[str, str]:
    return {"operator": operator, **card._asdict(), "build": build()}


def _file(card: Card, operator: str) -> Path:
    if not build():
        raise OSError("the compiled module cannot be read")
    # A relative path in XDG_CACHE_HOME is invalid by the XDG base directory specification.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    of_card = hashlib.sha256(json.dumps([*card, build()]).encode()).hexdigest()[:32]
    return cache / "fedkernels" / "self_test" / of_card / f"{operator}.json"
