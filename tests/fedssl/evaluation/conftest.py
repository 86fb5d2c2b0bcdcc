import pytest
import torch

from tests.fedssl.evaluation.bright_quarters import TinyEncoder


@pytest.fixture
def encoder() -> TinyEncoder:
    torch.manual_seed(0)
    return TinyEncoder()
