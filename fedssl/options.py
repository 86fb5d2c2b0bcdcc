"""The base of every typed model that a recipe is checked against, and messages about wrong keys and values."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from .errors import UserError, explained
from .untrusted import MOST_BYTES, NAME_PATTERN, TEXT_PATTERN, expand_home, parse_yaml, read_regular_file, scalar_text

_LONGEST_INPUT = 200  # characters of a wrong value that a message repeats
#: of labels of data, and of what `model.train` says
LABEL_PATTERN, TRAINED_PATTERN = "^[A-Za-z0-9]+$", r"^(all|(last|lora):[1-9]\d{0,3})$"
#: texts of a message about a pattern
_PATTERNS = {
    LABEL_PATTERN: "expected letters and digits alone",
    TRAINED_PATTERN: "expected all, last:N or lora:R, with N and R from 1, such as last:1",
    NAME_PATTERN: "expected 1 to 200 characters on one line, without control characters",
    TEXT_PATTERN: "expected text without control characters",
}
#: texts of a message about a value of another type, whose own name classes of Python
_TYPES = dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "expected a mapping such as {key: value}")
_TYPES["list_type"] = "expected a list such as [value]"


class Options(BaseModel):
    """Base of option models: frozen, an unknown key is an error, `true` is not a number, and 2024 may be a text."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _read_by_type(cls, values: Any) -> Any:
        """Read the texts, and refuse `rounds: true`, which pydantic takes as 1; its strict mode also refuses `1e-3`."""
        if not isinstance(values, dict):
            return values
        wrong: list[InitErrorDetails] = []
        fields = cls.model_fields
        values = {k: _read(fields[k].annotation, v, (k,), wrong) if k in fields else v for k, v in values.items()}
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return values

    @field_validator("*")
    @classmethod
    def _moderate(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse numbers with which torch, which counts in 64 bits and computes in float32, could do nothing."""
        most_of_integers = 2**63 - 1 if info.field_name == "seed" else 2**31 - 1
        for kind, most in ((int, most_of_integers), (float, 1e38)):
            if isinstance(value, kind) and abs(value) > most:
                raise PydanticCustomError("moderate", f"input should be at most {most!r} in magnitude")
        return value


_Model = TypeVar("_Model", bound=Options)


def validated(model: type[_Model], values: Any, source: str) -> _Model:
    """Return values as options; raise a UserError, which begins with `source`, if a key or value is invalid."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{source}: {'; '.join(explain_errors(error, model))}") from error


def read_options(path: str | Path, model: type[_Model], kind: str, hint: str) -> _Model:
    """Read a YAML file that decides what happens here; `kind` names it in messages, and `hint` says what helps.

    Raises:
        UserError: the file cannot be read, can be written by other users, is not YAML, or has a wrong key or value.
    """
    path = expand_home(path)
    with explained(f"{kind} {path} cannot be read", f"; {hint}"):
        text = read_regular_file(path, MOST_BYTES, own=True).decode()
    values = parse_yaml(text, f"{kind} {path}")
    if not isinstance(values, dict):
        keys = ", ".join(model.model_fields)
        raise UserError(f"{kind} {path} must hold the keys {keys}, got {type(values).__name__}; {hint}")
    return validated(model, values, str(path))


def is_text(types: Sequence[Any]) -> bool:
    """Return whether values of one of these types are texts or null, and nothing else."""
    others = [one for one in types if one not in (str, Path, type(None)) and get_origin(one) is not Literal]
    return bool({str, Path} & {*types}) and not others


def types_at(model: type[Options], keys: Sequence[str]) -> list[Any]:
    """Return the types that a value may have at a path of keys; none where the options do not say.

    In the path of an error the name of one of several option models stands before its own keys.
    """
    types: list[Any] = [model]
    for key in keys:
        options = _option_models(types)
        inner = [one.model_fields[key].annotation for one in options if key in one.model_fields]
        inner += [get_args(one)[-1] for one in types if get_origin(one) in (dict, list)]
        several = options if len(options) > 1 else []
        named = [one for one in several if key in get_args(one.model_fields["name"].annotation)]
        types = named or [member for annotation in inner for member in _members(annotation)]
    return types


def _option_models(types: Sequence[Any]) -> list[type[Options]]:
    return [one for one in types if isinstance(one, type) and issubclass(one, Options)]


def _read(annotation: Any, value: Any, at: tuple[str | int, ...], wrong: list[InitErrorDetails]) -> Any:
    """Return a value with its numbers as texts where the type wants texts; add to `wrong` where it wants numbers."""
    members = _members(annotation)
    if isinstance(value, (bool, int, float)):
        if int in members or float in members:
            if isinstance(value, bool) and bool not in members and Any not in members:
                fault = PydanticCustomError("boolean", "input should be a number or a text, not true or false")
                wrong.append(InitErrorDetails(type=fault, loc=at, input=value))
        elif (str in members or Path in members) and bool not in members:
            return scalar_text(value)
        return value
    for member in members:
        if isinstance(value, list) and get_origin(member) in (list, tuple):
            return [_read(get_args(member)[0], one, (*at, i), wrong) for i, one in enumerate(value)]
        if isinstance(value, dict) and get_origin(member) is dict:
            return {key: _read(get_args(member)[1], one, (*at, key), wrong) for key, one in value.items()}
    return value


def _members(annotation: Any) -> list[Any]:
    """Return the types of which a value may be one."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for one in get_args(annotation) for member in _members(one)]
    return [annotation]


def explain_errors(error: ValidationError, model: type[Options], prefix: str = "") -> list[str]:
    """Return one clause for each problem that pydantic found: the key's path, what is allowed, what it got.

    Args:
        error: raised while `model` was validated.
        model: the options that say which keys are allowed.
        prefix: the path of the validated mapping in the user's file; empty for the whole file.
    """
    clauses = []
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        path = ".".join(([prefix] if prefix else []) + location)
        if item["type"] == "extra_forbidden":
            found = _option_models(types_at(model, location[:-1]))
            fields = found[0].model_fields.items() if len(found) == 1 else ()
            allowed = [name for name, field in fields if not field.exclude]
            hint = nearest(location[-1], allowed)
            clauses.append(f"{path}: unknown key; {hint}allowed here are {', '.join(allowed)}")
        elif item["type"] == "missing":
            clauses.append(f"{path}: missing")
        elif item["type"] == "value_error" and isinstance(item["input"], dict):  # of which it names what is wrong
            clauses.append(f"{path}: {item['ctx']['error']}".removeprefix(": "))
        else:
            message = _TYPES.get(item["type"], item["msg"][0].lower() + item["msg"][1:])
            if item["type"] == "string_pattern_mismatch":
                message = _PATTERNS.get(item["ctx"]["pattern"], message)
            clauses.append(f"{path}: {message}, got {shortened(item['input'])}")
    return clauses


def nearest(text: str, names: Sequence[str]) -> str:
    """Return `did you mean NAME? ` if one of the names is much like a text, else nothing."""
    return "".join(f"did you mean {name}? " for name in difflib.get_close_matches(text, names, n=1))


def shortened(value: Any) -> str:
    """Return a wrong value as a message repeats it: null, true and false as YAML has them."""
    text = scalar_text(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_INPUT else f"{text[:_LONGEST_INPUT]}..."
