"""The datasets that torchvision reads and can download: CIFAR-10, CIFAR-100 and Fashion-MNIST."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from .error_text import first_line
from .pixels import channels_first
from .splits import LabelledImages, Splits

DEFAULT_ROOT = Path("~/.cache/fedssl")


def load_torchvision_set(name: str, root: Path, download: bool) -> Splits:
    """Read `cifar10`, `cifar100` or `fashion_mnist` from `root`.

    Raises:
        UserError: the files are missing or corrupt, or the download failed.
    """
    from torchvision import datasets

    kinds = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100, "fashion_mnist": datasets.FashionMNIST}
    try:
        train, test = (kinds[name](root, train=is_train, download=download) for is_train in (True, False))
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        if download:
            raise UserError(
                f"{name} could not be downloaded to {root} ({first_line(error)}); "
                "check the network and the disk, or set data.path to a folder that holds it"
            ) from error
        raise UserError(
            f"{name} is not complete under {root}; "
            "set data.download=true to fetch it, or data.path to the folder that holds it"
        ) from error
    return Splits(_to_images(train, name), _to_images(test, name), tuple(train.classes))


def _to_images(split: Any, name: str) -> LabelledImages:
    return LabelledImages(channels_first(np.asarray(split.data), name), torch.as_tensor(split.targets).long())
