"""fedkernels.compat.torchjd_aggregators inside TorchJD; skipped where that is not installed."""

import subprocess
import sys

import pytest
import torch


def test_fedkernels_does_not_import_torchjd():
    code = "import sys, fedkernels; sys.exit('torchjd' in sys.modules or 'ot' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_weighting_and_the_aggregator_are_torchjds_and_exact():
    aggregation = pytest.importorskip("torchjd.aggregation")
    from fedkernels.compat.torchjd_aggregators import MinimumNorm, MinimumNormWeighting

    generator = torch.Generator().manual_seed(0)
    jacobian = torch.randn(10, 50, generator=generator, dtype=torch.float64) + 0.3
    gramian = jacobian @ jacobian.T
    weights = MinimumNormWeighting()(gramian)
    frank_wolfe = aggregation.MGDAWeighting(epsilon=1e-9, max_iters=20_000)(gramian)
    torch.testing.assert_close(weights, frank_wolfe, rtol=0, atol=1e-3)
    assert weights @ gramian @ weights <= frank_wolfe @ gramian @ frank_wolfe * (1 + 1e-12)
    torch.testing.assert_close(MinimumNorm()(jacobian), weights @ jacobian)
    assert isinstance(MinimumNorm(), aggregation.Aggregator)
    assert isinstance(MinimumNormWeighting(), aggregation.Weighting)
    assert MinimumNormWeighting(lower_bound=0.05)(gramian).min() >= 0.05 - 1e-12
    with pytest.raises(ValueError, match="lower_bound must be positive"):
        MinimumNorm(lower_bound=-0.1)
