"""csrc/cuda/two_views.cu against the reference, which draws the same numbers."""

import pytest
import torch

from fedkernels import ViewKey, ViewOptions, view_parameters
from fedkernels.reference.two_views import two_views

KEY = ViewKey(seed=2**62 + 7, client=3, round=2**32 - 1, epoch=5)
STRONG = ViewOptions(brightness=1.5, contrast=1.2, saturation=1.1, hue=0.5, blur_sigma=(0.05, 9.0), solarize=0.4)


def run(bindings, images, samples, options, **device):
    """In float32, and not channels last: test_operators.py has the others."""
    operator, key = torch.ops.fedkernels.two_views.default, (KEY.seed, KEY.client, KEY.round, KEY.epoch)
    return bindings.results(operator, images, samples, *key, options.numbers(), False, False, **device)


def batch_of(count, channels, height, width):
    images = torch.randint(0, 256, (count, channels, height, width), generator=torch.Generator().manual_seed(0))
    return images.to(torch.uint8), torch.arange(count) * 2**33 - 5


IN_DEVICE_MEMORY = {"multiprocessors": 1, "shared_limit": 16 << 10}


@pytest.mark.parametrize(
    ("shape", "device"),
    [
        *((shape, {}) for shape in ((12, 3, 32, 32), (6, 1, 28, 28), (8, 3, 5, 47), (4, 5, 9, 11), (20, 3, 2, 2))),
        # More views than blocks: a block takes several, one after the other, in the same place.
        *((shape, IN_DEVICE_MEMORY) for shape in ((5, 3, 40, 33), (5, 1, 40, 33), (3, 4, 60, 50))),
    ],
)
@pytest.mark.parametrize("options", [ViewOptions(), STRONG], ids=["byol", "strong"])
def test_equals_the_reference(bindings, shape, options, device):
    images, samples = batch_of(*shape)
    truth = two_views(images, view_parameters(samples, KEY, *images.shape[2:], options), options)
    for view, true in zip(run(bindings, images, samples, options, **device), truth, strict=True):
        assert view.dtype == torch.float32
        torch.testing.assert_close(view, true, rtol=0, atol=2e-5)
    assert run(bindings, images[:0], samples[:0], options)[0].shape == (0, *shape[1:])
