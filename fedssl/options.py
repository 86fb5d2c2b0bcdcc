"""The base of every typed model that a recipe is validated against."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class Options(BaseModel):
    """Frozen, strict about names: an unknown key is an error, never ignored. `true` is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, values: Any) -> Any:
        """Pydantic takes `rounds: true` as 1. Its strict mode would also refuse 1e-3, which is a text in YAML 1.1."""
        if not isinstance(values, dict):
            return values
        wrong = [
            InitErrorDetails(
                type=PydanticCustomError("boolean", "input should be a number or a text, not true or false"),
                loc=(key, *([i] if isinstance(values[key], list) else [])),
                input=value,
            )
            for key, field in cls.model_fields.items()
            if key in values and not {bool, Any} & _types_in(field.annotation)
            for i, value in enumerate(values[key] if isinstance(values[key], list) else [values[key]])
            if isinstance(value, bool)
        ]
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return values


def _types_in(annotation: Any) -> set[Any]:
    """The types of which a type is composed, such as list, int and None of `list[int] | None`."""
    inner = get_args(annotation)
    if inner:
        return set().union(*map(_types_in, inner))
    return {annotation} if isinstance(annotation, type) or annotation is Any else set()  # else a Literal's value
