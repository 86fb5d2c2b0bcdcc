"""Tests of what a call refuses."""

from collections.abc import Callable
from typing import Any

import pytest


def refusals(*cases: tuple[Callable[[], object], type[Exception], str]) -> Any:
    """A test that each call raises the error, with a message that matches."""

    @pytest.mark.parametrize(("call", "error", "message"), cases)
    def test(call: Callable[[], object], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            call()

    return test
