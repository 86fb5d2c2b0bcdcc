"""Options of ``pytest benchmarks``."""

from __future__ import annotations

import pytest
import torch

from benchmarks.__main__ import OPERATORS
from benchmarks.measure import Settings, load_cases


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("operators' benchmarks")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    group.addoption("--threads", type=int, default=2, metavar="N", help="torch's threads (default: 2)")
    group.addoption("--quick", action="store_true", help="tiny sizes, to see that everything runs")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One benchmark for each operator and size that `python -m benchmarks` times as well."""
    option = metafunc.config.getoption
    settings = Settings(option("--device"), quick=option("--quick"), threads=option("--threads"))
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch finds no CUDA device")
    if "case" in metafunc.fixturenames:
        cases = [(operator, case) for operator in OPERATORS for case in load_cases(operator, settings) if case.timed]
        names = [f"{operator}: {case.size}" for operator, case in cases]
        metafunc.parametrize(("operator", "case"), cases, ids=names)
        metafunc.parametrize("settings", [settings], ids=[settings.device])
