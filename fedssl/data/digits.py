"""scikit-learn's handwritten digits, which need no file."""

import numpy as np
import torch

from .splits import LabelledImages, Splits


def load_digits() -> Splits:
    """1,797 gray digits of 8x8 pixels; a fixed, stratified fifth of them is the test set."""
    from sklearn.datasets import load_digits as load_bundle
    from sklearn.model_selection import train_test_split

    bundle = load_bundle()
    pixels = np.rint(bundle.images * (255 / 16)).astype(np.uint8)[:, None]
    classes = bundle.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(classes)), test_size=0.2, stratify=classes, random_state=0)
    # NumPy takes the rows: torch would give the one channel another stride, with which convolutions round differently.
    train_images, test_images = (
        LabelledImages(torch.from_numpy(pixels[rows]), torch.from_numpy(classes[rows]))
        for rows in (np.sort(train), np.sort(test))
    )
    return Splits(train_images, test_images, tuple(str(name) for name in bundle.target_names))
