"""The data sources by name, and the options of a run's data; nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from ..options import Options


@dataclass(frozen=True)
class DataSource:
    """One value of `data.name`.

    Attributes:
        loader: a module of this folder and its function that reads `DataOptions` into `Splits`.
        images, classes, shape: number of training images, number of classes, and [C, H, W], where they are known
            without reading; else 0, 0 and None.
        torchvision: the class in torchvision.datasets, for a set that torchvision reads and may download.
        path: what `data.path` must name; None where it is not needed.
        image_files: whether `data.path` is a folder of image files, which are brought to one size as they are read.
    """

    loader: str
    images: int = 0
    classes: int = 0
    shape: tuple[int, int, int] | None = None
    torchvision: str | None = None
    path: str | None = None
    image_files: bool = False


#: the values of `data.name`; another set of torchvision whose class has an argument `train` takes one more entry
SOURCES = {
    "digits": DataSource("datasets:load_digits", 1437, 10, (1, 8, 8)),
    "cifar10": DataSource("datasets:load_torchvision_set", 50_000, 10, (3, 32, 32), "CIFAR10"),
    "cifar100": DataSource("datasets:load_torchvision_set", 50_000, 100, (3, 32, 32), "CIFAR100"),
    "fashion_mnist": DataSource("datasets:load_torchvision_set", 60_000, 10, (1, 28, 28), "FashionMNIST"),
    "npz": DataSource("npz:load_npz", path="an .npz file"),
    "images": DataSource("images:load_images", path="a folder of images", image_files=True),
    "folder": DataSource("images:load_images", path="a folder with train/ and test/", image_files=True),
    "none": DataSource("datasets:no_images"),
}

MOST_CHANNELS = 32

if TYPE_CHECKING:
    DataName = str
else:
    DataName = Literal[tuple(SOURCES)]


class DataOptions(Options):
    """The dataset, how much of it is used, and where the public images come from."""

    name: DataName = Field(
        "digits",
        description="the dataset: a built-in or torchvision one, or your own: npz (a file of arrays), images (any "
        "folder of images, with or without labels), or folder (train/CLASS/ and test/CLASS/); or none, for a server "
        "without data, whose sites bring theirs",
    )
    path: Path | None = Field(
        None,
        description="the .npz file, the folder of images, or the root of a torchvision set (default ~/.cache/fedssl)",
    )
    more_paths: list[Path] = Field(
        default_factory=list,
        description="more folders of images, read beside path; for images without a table, train/ and test/. "
        "partition='{name: column, column: folder, clients: N}' makes each folder a client",
    )
    download: bool = Field(False, description="whether torchvision may download a missing set")
    public_path: Path | None = Field(
        None,
        description="unlabelled public images: a folder, or an .npz file (key x, x_train, train_images, or its only "
        "array)",
    )
    public_holdout: int = Field(0, ge=0, description="number of training images that become unlabelled public images")
    train_limit: int | None = Field(
        None, ge=1, description="most training images after the holdout, balanced by class and drawn by the seed"
    )
    test_limit: int | None = Field(None, ge=1, description="most test images, balanced by class, the same for any seed")
    public_limit: int | None = Field(None, ge=1, description="most public images, drawn by the seed")
    validation_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="the share of the training images, the same for every seed, that is measured on in place of the "
        "test images, to choose options by (fedssl sweep)",
    )
    image_size: int | None = Field(
        None,
        ge=4,
        description="side in pixels to which images are resized after the longer side is cropped to a square "
        "(default: no resizing; for images and folder a preset takes the files' size or 32, 64, 96 or 128, and 32 "
        "holds without one)",
    )
    image_shape: tuple[Annotated[PositiveInt, Field(le=MOST_CHANNELS)], PositiveInt, PositiveInt] | None = Field(
        None, description="channels, height and width of the sites' images, for name=none"
    )
    class_names: list[str] = Field(
        default_factory=list,
        description="the classes of the sites' images in their order, for name=none where the objective trains on "
        "labels",
    )
    follow_links: bool = Field(
        False,
        description="for folders of images: read what links in the folder lead to outside it; otherwise such a link is "
        "refused, and links inside it are followed",
    )
    labels: Literal["folders"] | Path | None = Field(
        None,
        description="for images: where labels come from: folders (the name of an image's folder), a CSV file, or null "
        "for images without labels",
    )
    file_column: str = Field("file", description="column of the CSV file with the images' names, relative to path")
    label_column: str | None = Field(
        "label", description="column of the CSV file with the labels; null where it has none, only other columns"
    )
    test_fraction: float = Field(
        0.2,
        gt=0,
        lt=1,
        description="for images with labels and without train/ and test/: the share of each class that becomes the "
        "test set, the same for every seed",
    )
    memory_limit: float | None = Field(
        None,
        ge=0,
        description="GB of decoded image files that are held in memory; more are decoded once into a file under "
        "~/.cache/fedssl/decoded and read from there (default: a quarter of the available memory)",
    )
    channels: int | None = Field(
        None,
        ge=1,
        le=MOST_CHANNELS,
        description="channels of each image, 1 to 32, for npz, images and folder: 3 makes grey images colours and 1 "
        "colours grey; else the bands or the pages of a TIFF, or those of an array whose layout leaves them open "
        "(default: as stored, of a TIFF of several pages the first)",
    )
    window: (
        Literal["full", "per_image", "file", "percentiles"]
        | tuple[float, float]
        | Annotated[tuple[tuple[float, float], ...], Field(min_length=1)]
        | None
    ) = Field(
        None,
        description="which pixel values become 0 and 255 where pixels have more than 8 bits: [low, high], or one such "
        "pair for each channel, or percentiles (of each channel, 1 and 99 % of the training images' values; a run "
        "records the numbers), or full (the range of their type), or per_image (each image's own, which loses their "
        "brightness beside each other), or file (what a DICOM file names itself)",
    )
    broken: Literal["refuse", "skip"] = Field(
        "refuse", description="what to do where image files cannot be read: stop, or go on without them"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "DataOptions":
        if self.name == "none" and self.image_shape is None:
            raise ValueError("name=none needs image_shape=[channels, height, width] of the sites' images")
        if self.name == "none" and (self.path is not None or self.public_holdout > 0):
            raise ValueError("name=none has no images: leave path and public_holdout out")
        if self.name != "none" and (self.image_shape is not None or self.class_names):
            raise ValueError(f"image_shape and class_names are for name=none; name={self.name} has its own")
        source = SOURCES[self.name]
        if source.path is not None and self.path is None:
            raise ValueError(f"name={self.name} needs path={source.path}")
        if self.path is not None and source.path is None and source.torchvision is None:
            raise ValueError(
                f"path is given but name={self.name} is built in; set name to npz, images, folder or a torchvision set"
            )
        if self.more_paths and (self.name != "images" or isinstance(self.labels, Path)):
            raise ValueError(
                "more_paths is for name=images, whose labels come from folders or are missing; leave it out"
            )
        if self.public_path is not None and self.public_holdout > 0:
            raise ValueError("public_path and public_holdout are two sources of public images; give only one")
        if self.channels is not None and not (source.image_files or self.name == "npz"):
            raise ValueError(f"channels is for npz, images and folder, not for name={self.name}; leave it out")
        if self.labels is not None and self.name != "images":
            raise ValueError(f"labels is for name=images, not for name={self.name}; leave it out")
        if self.test_fraction != 0.2 and self.labels is None:
            raise ValueError("test_fraction is for name=images with labels; leave it out, or give labels")
        if not isinstance(self.labels, Path) and (self.file_column, self.label_column or "label") != ("file", "label"):
            raise ValueError("file_column and label_column name columns of a table: set labels to a CSV file")
        if isinstance(self.window, tuple):
            pairs = self.window if isinstance(self.window[0], tuple) else (self.window,)
            if not all(low < high for low, high in pairs):
                raise ValueError(f"window must be [low, high] with low < high, got {self.window}")
        return self
