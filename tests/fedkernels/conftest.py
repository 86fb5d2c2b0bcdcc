"""The tests of an operator that is compiled run over the compiled operator and over its reference."""

import pytest

from fedkernels import _native

COMPILED = {f"test_{name}" for name in _native.COMPILED}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in COMPILED:
        metafunc.parametrize("implementation", ["native", "reference"], indirect=True)


@pytest.fixture(autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = getattr(request, "param", None)
    if wanted == "reference":
        monkeypatch.setattr(_native, "module", None)
    elif wanted == "native" and _native.module is None:
        pytest.skip(f"fedkernels._C is {_native.build_info()['native']}")


@pytest.fixture
def native() -> None:
    """For tests of the compiled module itself."""
    if _native.module is None:
        pytest.skip(f"fedkernels._C is {_native.build_info()['native']}")
