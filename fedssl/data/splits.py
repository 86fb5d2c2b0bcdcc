"""What each kind of data is read into: labelled training, test and validation images."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images uint8 [n, C, H, W] with C of 1 or 3, and their labels int64 [n] from 0."""

    images: Tensor
    labels: Tensor

    def rows(self, index: Tensor) -> "LabelledImages":
        """The images and labels with the given row numbers, int64 [m]."""
        return LabelledImages(self.images[index], self.labels[index])


@dataclass(frozen=True, eq=False)
class Splits:
    """One dataset's splits. `class_names` has a name for each label. Most datasets have no `validation` split."""

    train: LabelledImages
    test: LabelledImages
    class_names: tuple[str, ...]
    validation: LabelledImages | None = None
