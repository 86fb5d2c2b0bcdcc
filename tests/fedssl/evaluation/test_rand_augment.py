"""RandAugment of a batch against torchvision's, which takes one image at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.transforms import RandAugment

from fedssl.evaluation.rand_augment import rand_augment


def blurred(count, channels, height, width):
    """Images that use a part of the grey values, some of them one value alone, as equalising treats these apart."""
    coarse = 255 * torch.rand(count, channels, height // 8 + 1, width // 8 + 1)
    images = F.interpolate(coarse, (height, width), mode="bilinear").to(torch.uint8)
    images[::7] = images[::7, :, :1, :1]
    return images


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (3, 40, 24), (3, 8, 8)])
def test_a_batch_is_torchvisions_images_bit_for_bit(channels, height, width):
    torch.manual_seed(0)
    images, one = blurred(150, channels, height, width), RandAugment()
    given = images.clone()
    torch.manual_seed(1)
    expected, state = torch.stack([one(image) for image in images]), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(rand_augment(images), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images, given)
    assert (expected != images).flatten(1).any(1).sum() > 100


class Dispatched(TorchDispatchMode):
    """Counts the operations that are dispatched."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_more_images_take_no_more_operations_but_their_draws():
    """Each image draws two operations, each by two numbers at the most, which are drawn and read."""
    counts = []
    for images in (500, 1000):
        with Dispatched() as dispatched:
            torch.manual_seed(0)
            rand_augment(torch.zeros(images, 1, 8, 8, dtype=torch.uint8))
        counts.append(dispatched.count)
    assert counts[1] - counts[0] <= 500 * 2 * 2 * 2
