"""Without a process group the distributed losses say what to do."""

import pytest
import torch

from fedkernels import distributed


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group, or use the loss of the same"):
        distributed.info_nce(torch.ones(2, 2), torch.ones(2, 2), 0.5)
