"""Tables in Markdown and as plain text."""

from __future__ import annotations

from fedssl.tables.files import markdown_table, plain_table


def test_markdown_escapes_bars_and_folds_white_space():
    assert markdown_table(["row", "of\nwhat", "n"], [["a | b", "c", "1"]], text_columns=2) == (
        "| row | of what | n |\n|---|---|---:|\n| a \\| b | c | 1 |"
    )


def test_plain_text_aligns_the_first_column_left_and_the_others_right():
    assert plain_table(["", "kNN %", "x"], [["ours", "9.1", ""], ["a", "10.2", "-"]]).splitlines() == [
        "      kNN %  x",
        "--------------",
        "ours    9.1",
        "a      10.2  -",
    ]
    assert plain_table(["only"], []) == "only\n----"
