"""Options that contradict each other are refused."""

import pytest
from pydantic import ValidationError

from fedssl.data.options import DataOptions


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "npz"}, "name=npz needs path"),
        ({"name": "folder"}, "name=folder needs path"),
        ({"path": "a.npz"}, "path is given but name=digits"),
        ({"public_path": "p.npz", "public_holdout": 5}, "two sources of public images"),
        ({"name": "mnist"}, "name"),
        ({"train_limit": 0}, "train_limit"),
        ({"public_holdout": -1}, "public_holdout"),
        ({"size": 3}, "size"),
    ],
)
def test_bad_options(options, says):
    with pytest.raises(ValidationError, match=says):
        DataOptions(**options)
