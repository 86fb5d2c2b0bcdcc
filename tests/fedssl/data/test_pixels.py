"""What networks take of uint8 images."""

import pytest
import torch

from fedssl.data.pixels import normalize


def test_normalize_uses_constants():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    torch.testing.assert_close(normalize(images).flatten(), torch.tensor([-2.0, -1.2, 2.0]))
    torch.testing.assert_close(normalize(images[0]), normalize(images)[0])


def test_images_that_are_no_bytes_are_refused():
    with pytest.raises(TypeError, match=r"uint8.*float32"):
        normalize(torch.rand(2, 3, 8, 8))
