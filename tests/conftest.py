"""What holds for all tests: signals, the self-test of GPUs, garbage, and which files are started first.

A shell starts background processes with Ctrl-C ignored, and processes hand that down: the tests want it heard.

On a GPU the tests are for the kernels, and no self-test replaces these by their references.
"""

import gc
import os
import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["FEDKERNELS_SELF_TEST"] = "0"
os.umask(0o022)  # settings and keys that a group can write are refused

# The files that take longest, the longest first. They are started first: with two workers, a long file that is started
# last leaves the other worker without work.
LONGEST = (
    "fedssl/deploy/test_start_scripts.py",
    "fedkernels/test_properties.py",
    "fedkernels/test_contexts.py",
    "cuda_on_cpu/test_self_test.py",
    "fedssl/engines/flower/test_server.py",
    "fedssl/engines/test_workers.py",
    "fedssl/cli/test_commands.py",
    "benchmarks/test_lw_fedssl_resources.py",
    "fedssl/models/test_trained_part.py",
    "packaging/test_setup.py",
    "cuda_on_cpu/test_contrastive.py",
    "fedssl/test_shipped_recipes.py",
    "fedssl/tables/test_runner.py",
    "fedssl/export/test_encoder_folder.py",
    "fedssl/engines/test_in_process.py",
    "fedssl/test_no_label_leak.py",
    "cuda_on_cpu/test_unbalanced_ot.py",
    "fedssl/test_pages.py",
    "fedkernels/compat/test_originals.py",
    "fedssl/engines/flower/test_secure_aggregation.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = os.path.relpath(item.path, TESTS)
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)  # stable: the others keep their order


@pytest.fixture
def no_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks collect garbage before each timing, which takes 0.2 s in a process that has run many tests."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def pytest_collection_finish() -> None:
    """Garbage collections leave out what exists now, all modules and thousands of tests: they would take 0.2 s each."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries tell at the end of a process what they find still in use
