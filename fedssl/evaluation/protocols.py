"""Protocols by name: a name chooses all values of an evaluation, and a recipe may replace single ones."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

from ..options import Options

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Protocol = TypeVar("Protocol", bound=DataclassInstance)


def with_given_values(protocol: Protocol, options: Options) -> Protocol:
    """A protocol (a frozen dataclass) in which each value that the options give replaces its own.

    An option that is None is not given. Options that the protocol has no field for are left to their reader.
    """
    names = {field.name for field in dataclasses.fields(protocol)} & set(type(options).model_fields)
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return dataclasses.replace(protocol, **given)
