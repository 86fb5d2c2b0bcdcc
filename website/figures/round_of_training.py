"""One round: who runs what, in which order, and what crosses the line between server and client."""

from __future__ import annotations

from website.figures.svg import arrow, box, drawing, text
from website.figures.svg import figure as figure_element

#: what a client does in a round: what it is called in the code, in words, and the kind of part that decides it
CLIENT_STEPS = (
    ("receive", "takes what arrived", "local update"),
    ("prepare", "freezes or adds layers", "schedule"),
    ("views", "two random views of a batch", "augmentation"),
    ("step", "a loss, and terms beside it", "objective, regularizers"),
    ("collect", "chooses what it sends", "aggregator"),
)
_TOP, _HEIGHT = 118, 40


def _pieces() -> list[str]:
    bottom = _TOP + len(CLIENT_STEPS) * _HEIGHT
    pieces = [
        box(10, 8, 320, 52, "accent"),
        text(170, 30, "Server: broadcast", "strong"),
        text(170, 48, "what each client receives (aggregator)", "small"),
        arrow(170, 60, 170, 92),
        text(180, 80, "a message", "small", "start"),
        box(10, 94, 320, bottom - 94 - 6),
    ]
    for index, (name, words, part) in enumerate(CLIENT_STEPS):
        y = _TOP + index * _HEIGHT
        pieces += [
            text(24, y, name, "strong", "start"),
            text(316, y, words, "", "end"),
            text(316, y + 15, part, "small part", "end"),
        ]
    # views and step are repeated for every batch
    first, last = _TOP + 2 * _HEIGHT - 8, _TOP + 3 * _HEIGHT + 4
    pieces += [
        f'<path d="M 22 {first} H 17 V {last} H 22" class="line"/>',
        text(24, first + 27, "each batch", "small", "start"),
        arrow(170, bottom - 6, 170, bottom + 42),
        text(180, bottom + 22, "a message; images stay", "small", "start"),
        box(10, bottom + 44, 320, 72, "accent"),
        text(170, bottom + 64, "Server: aggregate", "strong"),
        text(170, bottom + 83, "the guard refuses what is broken; the", "small"),
        text(170, bottom + 99, "rest becomes the next state (aggregator)", "small"),
    ]
    return pieces


def figure() -> str:
    steps = "; ".join(f"{name}: {words} ({part})" for name, words, part in CLIENT_STEPS)
    svg = drawing(
        "One round from top to bottom. The server broadcasts a message to each client. A client does five things: "
        f"{steps}. Its message goes back, its images stay. The server refuses what is broken and aggregates the rest.",
        _TOP + len(CLIENT_STEPS) * _HEIGHT + 124,
        *_pieces(),
    )
    return figure_element(
        svg,
        "One round. The kind of part that decides each step stands below it.",
        "website/figures/round_of_training.py",
    )
