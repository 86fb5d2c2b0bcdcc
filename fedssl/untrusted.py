"""Read and show files, YAML, names and code that somebody else may have written, without harm."""

import errno
import os
import re
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from yaml.error import MarkedYAMLError
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode
from yaml.representer import SafeRepresenter

from .errors import UserError, explained


@contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file, or a link to one, for reading.

    A named pipe or a device is refused at once, because reading it could wait for ever.

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


def read_regular_file(path: Path, most_bytes: int | None = None, own: bool = False) -> bytes:
    """Return the content of a regular file of at most `most_bytes` (default: any size); see `open_regular_file`.

    With `own` it must be one that other users cannot write, such as a key or a site's settings.

    Raises:
        OSError: the file cannot be opened, is not a regular file, is too large, or can be written by others.
    """
    with open_regular_file(path) as file:
        status = os.fstat(file.fileno())
        if own:
            refuse_shared(path, status)
        size = status.st_size
        if most_bytes is not None and size > most_bytes:
            problem = f"expected at most {most_bytes:,} bytes, the file has {size:,}"
            raise OSError(errno.EFBIG, problem, str(path))
        return file.read()


def refuse_shared(path: Path, status: os.stat_result) -> None:
    """Raise OSError for a file or folder that its group or all users may write, as `status` says.

    Its group may where that is the owner's own: with such groups many systems make new files writable for the group.
    """
    others = 0o002 if _is_group_of_one(status.st_uid, status.st_gid) else 0o022
    if status.st_mode & others:
        mode = stat.S_IMODE(status.st_mode)
        problem = f"other users can change it (mode {mode:04o}); see who did, and call chmod go-w {quoted(path)}"
        raise OSError(errno.EPERM, problem, str(path))


def _is_group_of_one(user: int, group: int) -> bool:
    import grp
    import pwd

    try:
        owner, members = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    own = (members.gr_gid, members.gr_name) == (owner.pw_gid, owner.pw_name)
    return own and user != 0 and {*members.gr_mem} <= {owner.pw_name}


def expand_home(path: str | Path) -> Path:
    """Return a path with `~` or `~user` replaced by that home folder.

    Raises:
        UserError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{str(path)!r} begins with an unknown user's home folder; write the path in full") from None


def absolute_path(folder: Path, path: str | Path) -> Path:
    """Return a path relative to a folder as an absolute one without links; `~` is the home folder.

    Raises:
        UserError: there is no such user, or the links in the path form a circle.
    """
    with explained(f"{str(path)!r} cannot be resolved to a file"):
        return (folder / expand_home(path)).resolve()


#: a name of a recipe, row or scenario: one line of 1 to 200 characters without control characters, which could move a
#: cursor, end a line of a file or hide text. C1 controls, line separators and marks that reverse text count as such.
NAME_PATTERN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]{1,200}$"
#: a description: the same characters, line breaks and tabs, of any length
TEXT_PATTERN = r"^[^\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]*$"
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str | Path, keep: str = "") -> str:
    r"""Return a text with control characters and undecodable bytes escaped: a newline as `\n`, ESC as `\x1b`.

    Characters in `keep` are not escaped, such as `"\n"` where several lines are printed.
    """

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        return character if character in keep else character.encode("unicode_escape").decode("ascii")

    return _CONTROLS.sub(escape, str(text))


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return the first names, separated by commas, and how many more there are."""
    shown = ", ".join(map(printable, names[:most])) if names else "(none)"
    return f"{shown}, and {len(names) - most} more" if len(names) > most else shown


def quoted(path: Path) -> str:
    """Return a path as one word of a command line."""
    return shlex.quote(str(path))


def plot_text(text: str) -> str:
    """Return a text that matplotlib draws literally: dollar signs begin no formula. Line breaks stay."""
    return printable(text, keep="\n").replace("$", r"\$")


#: bytes of the largest YAML file; shipped ones have a few thousand
MOST_BYTES = 2**20
_MOST_VALUES = 100_000  # with every alias written out
_TAG = "tag:yaml.org,2002:"
_NUMBERS = tuple(_TAG + kind for kind in ("int", "float", "bool", "timestamp"))


def scalar_text(value: bool | int | float | None) -> str:
    """Return a number, true, false or null as YAML writes it: `0.5`, `1.0e-05`, `true`."""
    return str(SafeRepresenter().represent_data(value).value)


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of a YAML text. Aliases are allowed as long as the text with all of them written out is small.

    A plain word is a number, true or false only in the form in which YAML itself writes that value, so that
    `scalar_text` gives back what was written. Others, such as 2020-01-01, 0x10, 1.50, 12:30, on and True, are texts, of
    which options read numbers and booleans. Keys are always texts. Error messages call the text `source`.

    Raises:
        UserError: the text is too long or no YAML, a key occurs twice or is not text, a text holds control characters,
            the nesting is too deep, or aliases repeat too much.
    """
    if len(text) > MOST_BYTES:
        raise UserError(f"{source} has {len(text):,} characters; expected YAML of at most {MOST_BYTES:,}")
    with explained(f"{source} is not YAML"):
        try:
            return yaml.load(text, _StrictLoader)
        except RecursionError as error:
            problem = "mappings and lists are nested too deeply, or an alias stands inside the value that it repeats"
            raise ValueError(problem) from error


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without its silent last-one-wins for keys, and with a bound on what aliases repeat."""

    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        is_text = kind is ScalarNode and tag in _NUMBERS and not _is_as_written(tag, value)
        return _TAG + "str" if is_text else tag

    def compose_document(self) -> Node | None:
        node = super().compose_document()
        if node is not None and _count_values(node, {}) > _MOST_VALUES:
            raise ValueError(f"its aliases repeat more than {_MOST_VALUES:,} values")
        return node

    def compose_scalar_node(self, anchor: Any) -> ScalarNode:
        node = super().compose_scalar_node(anchor)
        if printable(node.value, keep="\n\t") != node.value:
            raise MarkedYAMLError(problem=f"{node.value[:80]!r} holds control characters", problem_mark=node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise MarkedYAMLError(problem="a key is a text, not [...] or {...}", problem_mark=key.start_mark)
            if key.value in keys:
                problem = f"the key {key.value[:80]!r} stands there already; remove one of them"
                raise MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.tag != _TAG + "merge":
                key.tag = _TAG + "str"
            keys.add(key.value)
        return node


def _count_values(node: Node, counted: dict[Node, int]) -> int:
    """Return the number of values in a node with its aliases written out."""
    if node not in counted:
        parts = node.value if isinstance(node, CollectionNode) else []
        inner = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
        counted[node] = 1 + sum(_count_values(one, counted) for one in inner)
    return counted[node]


def _is_as_written(tag: str, text: str) -> bool:
    """Return whether YAML writes the value of a plain word as this text."""
    kind = tag.removeprefix(_TAG)
    if kind in ("bool", "timestamp"):
        return text in ("true", "false")
    try:
        value = int(text) if kind == "int" else float(text.replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:  # such as 0x10, 12:30, or thousands of digits
        return False
    return scalar_text(value) == text


#: recipe keys that hold parts, each with the folder in which a part is looked up and whether the key holds a list
PART_KEYS: dict[str, tuple[str, bool]] = {
    "objective": ("objectives", False),
    "augmentation": ("augmentations", False),
    "regularizers": ("regularizers", True),
    "schedule": ("schedules", False),
    "aggregators": ("aggregators", True),
    "local_update": ("local_updates", False),
}


def own_parts(values: dict[str, Any]) -> list[str]:
    """Return the names of the custom parts in a recipe's mapping: Python files, or modules outside fedssl.

    Reading the mapping as a `Recipe` runs their code.
    """
    part_lists = [value if isinstance(value, list) else [value] for value in map(values.get, PART_KEYS)]
    names = [part.get("name") if isinstance(part, dict) else part for parts in part_lists for part in parts]
    return list(dict.fromkeys(name for name in names if isinstance(name, str) and ("." in name or ":" in name)))


def own_part_file(name: str) -> Path | None:
    """Return the file with a custom part's code, found without running any code; None if there is none.

    `name` is an absolute path of a .py file, a dotted module, or `module:Class`; `__main__` is the running script.
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
