from pathlib import Path

import pytest

from tests.cuda_on_cpu.emulation import Compiler, require_compiler


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    require_compiler()
    return Compiler(Path(tmp_path_factory.mktemp("cuda_on_cpu")))
