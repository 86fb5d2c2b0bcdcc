"""Which layers train, travel and stand frozen in each stage of LW-FedSSL and Prog-FedSSL, as the schedules plan it."""

from __future__ import annotations

from fedssl.schedules.base import Plan, Schedule
from fedssl.schedules.layer_wise import LayerWise
from fedssl.schedules.progressive import Progressive
from website.figures.svg import box, drawing, text
from website.figures.svg import figure as figure_element

LAYERS = 4
_LEFT, _SIDE, _STEP = 76, 48, 64


def plans(schedule: Schedule) -> list[Plan]:
    """The plan of each stage, with one round a stage."""
    return [schedule.plan(LAYERS, number, seed=0) for number in range(1, LAYERS + 1)]


def role(plan: Plan, layer: int) -> str:
    """What a layer does in a stage: `trains`, `frozen` or `absent`."""
    return "trains" if layer in plan.active else "frozen" if layer in plan.frozen else "absent"


def _panel(title: str, schedule: Schedule, top: float) -> list[str]:
    pieces = [text(8, top, title, "strong", "start")]
    for index, plan in enumerate(plans(schedule)):
        x = _LEFT + index * _STEP
        pieces.append(text(x + _SIDE / 2, top + 22, f"stage {plan.stage}", "small"))
        rows = [("heads", "trains")] + [(f"layer {n + 1}", role(plan, n)) for n in reversed(range(LAYERS))]
        for row, (name, does) in enumerate(rows):
            y = top + 32 + row * 27
            if index == 0:
                pieces.append(text(8, y + 16, name, "small", "start"))
            if does != "absent":
                pieces += [
                    box(x, y, _SIDE, 23, "accent" if does == "trains" else "frozen"),
                    text(x + _SIDE / 2, y + 16, does, "small"),
                ]
    return pieces


def figure() -> str:
    layer_wise, progressive = (kind(name="", rounds_per_stage=1) for kind in (LayerWise, Progressive))
    told = "; ".join(
        f"{title}, stage {plan.stage}: "
        + ", ".join(f"layer {n + 1} {role(plan, n)}" for n in range(LAYERS) if role(plan, n) != "absent")
        for title, schedule in (("LW-FedSSL", layer_wise), ("Prog-FedSSL", progressive))
        for plan in plans(schedule)
    )
    svg = drawing(
        f"Stages of an encoder of {LAYERS} layers. The heads train in every stage. {told}.",
        400,
        *_panel("LW-FedSSL", layer_wise, 20),
        *_panel("Prog-FedSSL", progressive, 222),
    )
    return figure_element(
        svg,
        "What trains also travels. A frozen layer is run, but needs no gradient, no optimiser state and no traffic.",
        "website/figures/stages.py",
    )
