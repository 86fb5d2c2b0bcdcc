"""YAML that is read strictly: what PyYAML takes silently, takes for ever or ends on with a traceback is refused."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ..errors import UserError
from .printable import printable

#: bytes of the largest YAML file; shipped ones have a few thousand
MOST_BYTES = 2**20
_DEEPEST = 50  # mappings and lists inside each other
_MOST_VALUES = 100_000  # with every alias written out
_LARGEST_INTEGER = 2**63
_TAG = "tag:yaml.org,2002:"
_KINDS = ("str", "int", "float", "bool", "null", "timestamp", "map", "seq", "merge", "value")


def parse_yaml(text: str, source: str) -> Any:
    """The value that a YAML text holds.

    Aliases are allowed as long as the written-out text stays small.

    Args:
        text: the text of one document.
        source: what an error message calls the text.

    Raises:
        UserError: the text is not YAML; a key occurs twice or is not text; a value does not have the form that its tag
            or its looks promise, such as the date 2020-13-45; an integer does not fit into 64 bits; a text holds
            control characters; or the nesting or the repetition by aliases is out of bounds. The message names the
            line.
    """
    if len(text) > MOST_BYTES:
        raise UserError(f"{source} has {len(text):,} characters; expected YAML of at most {MOST_BYTES:,}")
    loader = None
    try:
        loader = _StrictLoader(text)
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not YAML: {printable(' '.join(str(error).split()))}") from error
    except _Refused as error:
        raise UserError(f"{source}, line {error.line}: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()


class _Refused(Exception):
    def __init__(self, node: Node, problem: str):
        super().__init__(problem)
        self.line = node.start_mark.line + 1


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds, and without its silent last-one-wins for keys."""

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[Node, tuple[int, int]] = {}  # values and depth of each node with its aliases written out

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        repeated = self.check_event(AliasEvent)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        assert node is not None
        if not repeated:
            self._check(node)
        elif node not in self._sizes:
            raise _Refused(self._next_node(), "an alias stands inside the value that it repeats")
        return node

    def compose_sequence_node(self, anchor: Any) -> SequenceNode:
        self._check_depth()
        return super().compose_sequence_node(anchor)

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        self._check_depth()
        return super().compose_mapping_node(anchor)

    def _check_depth(self) -> None:
        """Before the composer calls itself for what is inside, which would end in a RecursionError."""
        if self._depth > _DEEPEST:
            raise _Refused(self._next_node(), f"mappings and lists are nested more than {_DEEPEST} deep")

    def _next_node(self) -> Node:
        return ScalarNode("", "", self.peek_event().start_mark)

    def _check(self, node: Node) -> None:
        """Check a node that is complete; those inside it have been checked before."""
        inner: list[Node] = []
        if node.tag not in [_TAG + kind for kind in _KINDS]:
            raise _Refused(node, f"the tag {printable(node.tag)[:80]!r} is not supported; remove it")
        if isinstance(node, MappingNode):
            _refuse_bad_keys(node)
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, SequenceNode):
            inner = node.value
        elif isinstance(node, ScalarNode):
            _refuse_controls(node)
        values = 1 + sum(self._sizes[part][0] for part in inner)
        depth = 1 + max((self._sizes[part][1] for part in inner), default=0)
        if values > _MOST_VALUES:
            raise _Refused(node, f"aliases repeat this to more than {_MOST_VALUES:,} values; shorten it")
        if depth > _DEEPEST + 1:
            raise _Refused(node, f"mappings and lists are nested more than {_DEEPEST} deep")
        self._sizes[node] = values, depth

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ConstructorError, _Refused):
            raise
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            shown = printable(str(node.value))[:40] if isinstance(node, ScalarNode) else "this"
            kind = node.tag.rpartition(":")[2]
            raise _Refused(node, f"{shown!r} is not a valid {kind}; write it in quotes if it is a text") from error
        if isinstance(value, int) and abs(value) >= _LARGEST_INTEGER:
            raise _Refused(node, f"the integer {str(node.value)[:20]}... has more than 64 bits")
        return value


def _refuse_bad_keys(node: MappingNode) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, ScalarNode) or key.tag not in (_TAG + "str", _TAG + "merge", _TAG + "value"):
            shown = printable(str(key.value))[:40] if isinstance(key, ScalarNode) else "[...]"
            raise _Refused(key, f"the key {shown} is not text; write a text in quotes")
        if key.value in lines:
            problem = f"the key {key.value[:80]!r} stands there already on line {lines[key.value]}; remove one of them"
            raise _Refused(key, problem)
        lines[key.value] = key.start_mark.line + 1


def _refuse_controls(node: ScalarNode) -> None:
    if printable(node.value, keep="\n\t") != node.value:
        shown = printable(node.value)
        raise _Refused(node, f'the text "{shown[:80]}" holds control characters; remove them')
