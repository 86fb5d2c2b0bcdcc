"""Nested values by dotted keys, as in the command line's overrides: `training.batch_size`, `regularizers.0.weight`."""

from __future__ import annotations

from typing import Any


def flatten_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings and lists into one mapping with dotted keys.

    Args:
        values: mappings and lists of any depth, as YAML gives them. An empty mapping or list counts as a value.
        prefix: the key of `values` itself; every key begins with it.

    Returns:
        `{"a.b.0": 1}` for `{"a": {"b": [1]}}`.
    """
    if not isinstance(values, (dict, list)) or not values:
        return {prefix: values}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= flatten_keys(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
