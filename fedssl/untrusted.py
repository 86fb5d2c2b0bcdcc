"""Files, YAML, names and code that somebody else may have written, read and shown without harm."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from yaml.constructor import ConstructorError
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from .errors import UserError


@contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read it. A named pipe or a device is refused at once; reading it could wait for ever.

    Args:
        path: the file, or a link to it.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "expected a regular file, got a folder, a pipe or a device", str(path))
        with open(handle, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def read_regular_file(path: Path, most_bytes: int | None = None) -> bytes:
    """The content of a regular file; see `open_regular_file`.

    Args:
        path: the file, or a link to it.
        most_bytes: the largest size that is read; by default any.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or is too large.
    """
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            problem = f"expected at most {most_bytes:,} bytes, the file has {size:,}"
            raise OSError(errno.EFBIG, problem, str(path))
        return file.read()


def expand_home(path: str | Path) -> Path:
    """A path with `~` or `~user` replaced by that home folder.

    Raises:
        UserError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{str(path)!r} begins with an unknown user's home folder; write the path in full") from None


def absolute_path(folder: Path, path: str | Path) -> Path:
    """A path as seen from a folder, absolute and without links; `~` is the home folder.

    Raises:
        UserError: there is no such user, or the links in the path form a circle.
    """
    try:
        return (folder / expand_home(path)).resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{str(path)!r} cannot be resolved to a file: {error}") from error


#: names of recipes, rows and scenarios: one line of 1 to 200 characters; a control character could move a cursor, end
#: a line of a file or hide text. The C1 controls, line separators and marks that reverse the direction of text count.
NAME_PATTERN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]{1,200}$"


#: descriptions: the same characters, and line breaks and tabs
TEXT_PATTERN = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]*$"


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, keep: str = "") -> str:
    r"""The text with control characters and undecodable bytes as escapes: a newline as `\n`, ESC as `\x1b`.

    Args:
        text: any text.
        keep: characters that stay as they are, such as `"\n"` where several lines are printed.
    """

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        return character if character in keep else character.encode("unicode_escape").decode("ascii")

    return _CONTROLS.sub(escape, text)


def plot_text(text: str) -> str:
    """A text as matplotlib draws it literally: a dollar sign begins no formula. Line breaks stay."""
    return printable(text, keep="\n").replace("$", r"\$")


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


#: recipe keys that hold parts: the folder in which each is looked up, and whether the key holds a list of parts
PART_KEYS: dict[str, tuple[str, bool]] = {
    "objective": ("objectives", False),
    "augmentation": ("augmentations", False),
    "regularizers": ("regularizers", True),
    "schedule": ("schedules", False),
    "aggregators": ("aggregators", True),
    "local_update": ("local_updates", False),
}


def own_parts(values: dict[str, Any]) -> list[str]:
    """The parts of a recipe's mapping that do not ship with fedssl: names of Python files and of modules.

    To read the recipe as a `Recipe` is to run their code.
    """
    given = [values.get(key) for key in PART_KEYS]
    parts = [part for one in given for part in (one if isinstance(one, list) else [one])]
    names = [part.get("name") if isinstance(part, dict) else part for part in parts]
    return list(dict.fromkeys(name for name in names if isinstance(name, str) and ("." in name or ":" in name)))


def own_part_file(name: str) -> Path | None:
    """The file with the code of a part of one's own, found without running any code; None where there is none.

    Args:
        name: an absolute path of a .py file, a dotted module, or `module:Class`; `__main__` is the running script.
    """
    if name.endswith(".py"):
        return Path(name)
    folders, spec = None, None
    packages = name.partition(":")[0].split(".")
    if packages == ["__main__"]:
        script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
        return script if script.is_file() else None
    for i in range(len(packages)):
        spec = PathFinder.find_spec(".".join(packages[: i + 1]), folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.origin else None
