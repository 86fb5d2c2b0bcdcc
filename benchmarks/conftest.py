"""Options of ``pytest benchmarks``, and its cases: those that `python -m benchmarks` times."""

import pytest
import torch

from benchmarks.__main__ import OPERATORS
from benchmarks.measure import Settings, load_cases


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks of the operators")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: cpu)")
    group.addoption("--threads", type=int, default=2, metavar="N", help="torch's threads (default: 2)")
    group.addoption("--quick", action="store_true", help="tiny sizes, to see that everything runs")


def _settings(config: pytest.Config) -> Settings:
    settings = Settings(
        config.getoption("--device"), quick=config.getoption("--quick"), threads=config.getoption("--threads")
    )
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch finds no CUDA device")
    return settings


@pytest.fixture
def settings(pytestconfig: pytest.Config) -> Settings:
    return _settings(pytestconfig)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        settings = _settings(metafunc.config)
        cases = [(operator, case) for operator in OPERATORS for case in load_cases(operator, settings) if case.timed]
        metafunc.parametrize(("operator", "case"), cases, ids=[f"{operator}: {case.size}" for operator, case in cases])
