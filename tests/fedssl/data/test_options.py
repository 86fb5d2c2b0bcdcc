"""Options that contradict each other are refused."""

import pytest
from pydantic import ValidationError

from fedssl.data.options import DataOptions
from fedssl.data.partitions import PartitionOptions

IMAGES = {"name": "images", "path": "."}
BAD_DATA = [
    ({"name": "npz"}, "name=npz needs path"),
    ({"name": "folder"}, "name=folder needs path"),
    ({"name": "images"}, "name=images needs path=a folder of images"),
    ({"path": "a.npz"}, "path is given but name=digits"),
    ({"public_path": "p.npz", "public_holdout": 5}, "two sources of public images"),
    ({"labels": "folders"}, "labels is for name=images, not for name=digits"),
    ({"name": "mnist"}, "name"),
    ({"train_limit": 0}, "train_limit"),
    ({"public_holdout": -1}, "public_holdout"),
    ({"size": 3}, "size"),
    (IMAGES | {"test_fraction": 1}, "test_fraction"),
    (IMAGES | {"memory_limit": -1}, "memory_limit"),
    *(({"window": window}, "window") for window in [(3, 3), (9, 1), (1,), "wide", (0, float("nan"))]),
]
BAD_PARTITIONS = [
    ({"name": "iid", "classes_per_client": 2}, "classes_per_client is for name=disjoint_classes"),
    ({"name": "column"}, "name=column needs column=NAME"),
    ({"name": "iid", "column": "site"}, "column is for name=column"),
    ({"name": "by_size"}, "name"),
    ({"clients": 0}, "clients"),
    ({"alpha": 0.0}, "alpha"),
    ({"min_samples": 0}, "min_samples"),
    ({"classes_per_client": 0}, "classes_per_client"),
    ({"beta": 1}, "beta"),
]


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [*((DataOptions, *case) for case in BAD_DATA), *((PartitionOptions, *case) for case in BAD_PARTITIONS)],
)
def test_bad_options(kind, options, says):
    with pytest.raises(ValidationError, match=says):
        kind(**options)
