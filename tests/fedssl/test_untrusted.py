"""Files, names and YAML from somebody else: nothing hangs, moves a cursor, begins a formula or takes long."""

import os
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import yaml
from matplotlib.figure import Figure

from fedssl.errors import UserError
from fedssl.untrusted import (
    MOST_BYTES,
    NAME_PATTERN,
    parse_yaml,
    plot_text,
    printable,
    read_regular_file,
    refuse_shared,
    scalar_text,
)

HOSTILE = ("\x1b[31m", "a\rb", "a\nb", "a\0b", "\x9b2J", "\u202egnp.exe", "a\u2028b", "\ud800")
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_a_regular_file_is_read_also_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_regular_file(tmp_path / "link", most_bytes=3) == b"abc"
    with pytest.raises(OSError, match="expected at most 2 bytes, the file has 3"):
        read_regular_file(tmp_path / "file", most_bytes=2)


@pytest.mark.parametrize(
    ("user", "group", "members", "mode", "refused"),
    [
        ("mara", "mara", [], 0o664, False),  # a system that gives each user a group makes such files
        ("mara", "mara", ["mara"], 0o664, False),
        ("mara", "mara", [], 0o666, True),
        ("mara", "mara", ["mara", "jon"], 0o660, True),
        ("mara", "users", [], 0o660, True),
        ("mara", "users", [], 0o640, False),
    ],
)
def test_a_file_of_the_owners_own_group_is_not_shared(user, group, members, mode, refused, tmp_path, monkeypatch):
    monkeypatch.setattr("pwd.getpwuid", lambda uid: SimpleNamespace(pw_name=user, pw_gid=1000))
    monkeypatch.setattr("grp.getgrgid", lambda gid: SimpleNamespace(gr_name=group, gr_gid=gid, gr_mem=members))
    status = os.stat_result((mode, 0, 0, 1, 1000, 1000, 0, 0, 0, 0))
    with pytest.raises(OSError, match="other users can change it") if refused else nullcontext():
        refuse_shared(tmp_path, status)


def test_a_pipe_a_device_and_a_folder_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(OSError, match="expected a regular file"):
            read_regular_file(path)


@pytest.mark.parametrize("text", HOSTILE)
def test_control_characters_are_escaped_and_no_name_holds_them(text):
    assert printable(text).isprintable()
    assert not re.match(NAME_PATTERN, text) or text == "\ud800"  # YAML and UTF-8 refuse half a character themselves
    printable(text).encode()


def test_harmless_text_stays_as_it_is():
    for text in ("Hetero-SSFL (λ = 0.1), 50 %", "naïve", "日本", "a/b", r"a\b"):
        assert printable(text) == text
        assert re.match(NAME_PATTERN, text)
    assert printable("a\nb", keep="\n") == "a\nb"
    assert not re.match(NAME_PATTERN, "")
    assert not re.match(NAME_PATTERN, "a" * 201)


@pytest.mark.parametrize("text", [r"$\frac{$", "$", "$$", "a$b$c", r"\$x\$", "$x$\n$y$"])
def test_a_chart_shows_dollar_signs_literally(text):
    drawn = Figure().text(0, 0, plot_text(text))
    drawn.figure.canvas.draw()
    shown, is_formula = drawn._preprocess_math(drawn.get_text())
    assert (shown, is_formula) == (text, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "the key 'a' stands there already; remove one of them .*line 3"),
        ("x: &x {a: 1}\ny: {<<: *x, <<: *x}", "the key '<<' stands there already"),
        ("a: !!timestamp 2020-13-45", "month must be in 1..12"),
        ("a:\n  b: !!int " + "9" * 5000, "for integer string conversion"),
        ("a: " + "[" * 2000 + "]" * 2000, "mappings and lists are nested too deeply"),
        (BOMB, "aliases repeat more than 100,000 values"),
        ("a: &x [*x]", "an alias stands inside the value that it repeats"),
        ("? [a]\n: 1", "a key is a text, not .* line 1"),
        ('a: "\\e[31m"', r"'\\x1b\[31m' holds control characters"),
        ('a: "\\uD800"', "holds control characters"),
        ('"a\\0": 1', "holds control characters"),
        ("a: \x1b", "is not YAML .unacceptable character #x001b"),
        ("a: !!python/object:os.system x", "could not determine a constructor for the tag .*os.system'"),
        ("a: [1", "is not YAML"),
        ("a: " + "x" * MOST_BYTES, "expected YAML of at most"),
    ],
)
def test_bad_yaml_is_one_line(text, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_yaml(text, "mine.yaml")
    shown = str(caught.value)
    assert shown.startswith("mine.yaml")
    assert shown.isprintable()
    assert len(shown) < 500


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: [1, 1.5, true, null, x]", {"a": [1, 1.5, True, None, "x"]}),
        ("a: 9223372036854775807", {"a": 2**63 - 1}),
        ("x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}", {"x": {"a": 1, "b": 2}, "y": {"a": 3, "b": 2}}),
        ("a: &a [1]\nb: [*a, *a]", {"a": [1], "b": [[1], [1]]}),
        ("a: |\n  two\n  lines\n", {"a": "two\nlines\n"}),
        ("1: 2\nyes: 3\n2020-01-01: 4\nnull: 5", {"1": 2, "yes": 3, "2020-01-01": 4, "null": 5}),
        ("a: 2020-13-45", {"a": "2020-13-45"}),
        ("a: [2020-01-01, on, No, True, ~/x, 12:30]", {"a": ["2020-01-01", "on", "No", "True", "~/x", "12:30"]}),
        ("a: [0x10, 010, 1_000, +1, 1.50, 1e5, .Inf]", {"a": ["0x10", "010", "1_000", "+1", "1.50", "1e5", ".Inf"]}),
    ],
)
def test_plain_yaml_is_read_as_ever_and_other_forms_of_numbers_are_texts(text, value):
    assert parse_yaml(text, "mine.yaml") == value


@pytest.mark.parametrize("value", [0, -7, 2**63 - 1, 0.5, -0.0, 1e-5, 1.5e300, 1 / 3, float("inf"), True, False])
def test_a_number_is_written_as_it_was_read(value):
    for text in (scalar_text(value), yaml.safe_dump([value], default_flow_style=True)[1:-2]):
        assert (parse_yaml(text, "x"), scalar_text(parse_yaml(text, "x"))) == (value, text)
