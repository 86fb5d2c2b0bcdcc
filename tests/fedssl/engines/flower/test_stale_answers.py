"""An answer to another round, or of another client, counts nowhere: its client is left out of the round, and named."""

from __future__ import annotations

import pytest
from flwr.app import Message as FlowerMessage

from tests.fedssl.conftest import ALIGNED, AVERAGED, FEDU2
from tests.fedssl.engines.every_tensor import assert_same
from tests.fedssl.engines.flower.loop_grid import SECURE, LoopGrid, run_on, start
from tests.fedssl.engines.short_runs import SMALL, metric

CLIENT, OTHER = 1, 0
Key = tuple[int, int]  # client and round


def swap_answers(grid: LoopGrid, kind: str, place: Key, taken: Key) -> list[dict]:
    """Let the server get, in place of one client's answers in one round, those that `taken` gave.

    Returns the records that came in their place, filled while the run goes on. Messages of other kinds pass.
    """
    given: dict[tuple, list[dict]] = {}
    replaced: list[dict] = []
    pull = grid.pull_messages

    def key(reply: FlowerMessage) -> tuple:
        answer = reply.content["answer"] if reply.metadata.message_type == kind else {}
        return answer.get("client"), answer.get("round")

    def note(node: int, reply: FlowerMessage) -> None:
        given.setdefault(key(reply), []).append(dict(reply.content))

    def pull_messages(names):
        replies = pull(names)
        for reply in replies:
            if key(reply) == place:
                replaced.append(given[taken][len(replaced)])
                reply.content.clear()
                reply.content.update(replaced[-1])
        return replies

    grid.tamper, grid.pull_messages = note, pull_messages
    return replaced


def without_answers(grid: LoopGrid, place: Key) -> None:
    """Let one client's answer in one round never come."""
    pull, answer = grid.pull_messages, {"client": place[0], "round": place[1]}

    def pull_messages(names):
        return [r for r in pull(names) if r.metadata.message_type == "query" or dict(r.content["answer"]) != answer]

    grid.pull_messages = pull_messages


@pytest.mark.parametrize(
    ("method", "place", "taken"),
    [
        (AVERAGED, (CLIENT, 2), (CLIENT, 1)),  # late, from the round before
        (FEDU2, (CLIENT, 2), (OTHER, 2)),  # another client's, twice in the mean
        (ALIGNED, (CLIENT, 0), (OTHER, 0)),  # in the opening round
    ],
    ids=["late", "another's", "opening"],
)
def test_the_round_goes_on_as_if_no_answer_had_come(method, place, taken, quick, tmp_path):
    client, number = place
    recipe = quick(**method | SMALL)
    directory, grid = start(recipe, tmp_path / "swapped")
    replaced = swap_answers(grid, "train", place, taken)
    [warning] = run_on(recipe, directory, grid)
    assert len(replaced) == 1
    assert warning.startswith(f"round {number}: client {client} is left out: ")
    assert metric(tmp_path / "swapped", "missing", number) == {str(client): 1.0}
    silent, grid = start(recipe, tmp_path / "silent")
    without_answers(grid, place)
    run_on(recipe, silent, grid)
    assert_same(directory.server_state(), silent.server_state())
    assert [directory.client_round(k) for k in range(3)] == [silent.client_round(k) for k in range(3)]


def test_its_client_trains_on_from_the_round_before(quick, tmp_path):
    """What it trained in that round is undone, for the server does not have it."""
    recipe = quick(**AVERAGED | SMALL, rounds=3)
    directory, grid = start(recipe, tmp_path / "run")
    swap_answers(grid, "train", (CLIENT, 2), (CLIENT, 1))
    started: dict[Key, int] = {}
    app = grid.app

    def note(message, context):
        if message.metadata.message_type == "train":
            task = message.content["task"]
            started[task["client"], task["round"]] = task["start"]
        return app(message, context)

    grid.app = note
    run_on(recipe, directory, grid)
    assert started[CLIENT, 3] == 1
    assert started[OTHER, 3] == 2
    assert [directory.client_round(k) for k in range(3)] == [3, 3, 3]


def test_an_evaluation_of_another_client_or_of_too_many_measures_does_not_count(quick, tmp_path):
    """Without weights that travel every client's own model is measured: before the first round, and in its answer."""
    recipe = quick(**SMALL, rounds=1)
    directory, grid = start(recipe, tmp_path / "run")
    swap_answers(grid, "evaluate", (CLIENT, 0), (OTHER, 0))
    note = grid.tamper

    def tamper(node: int, reply: FlowerMessage) -> None:
        note(node, reply)
        if (node, reply.metadata.message_type) == (11 + CLIENT, "train"):
            reply.content["numbers"].update({f"evaluation/fine_tune_{i}": 1.0 for i in range(5_000)})

    grid.tamper = tamper
    warnings = run_on(recipe, directory, grid)
    assert [warning.partition(": its ")[0] for warning in warnings] == [
        f"round {number}: client {CLIENT} is not evaluated" for number in (0, 1)
    ]
    assert "more than 100" in warnings[1]
    for number in (0, 1):
        assert metric(tmp_path / "run", "knn", number).keys() == {"0", "2", "mean"}
    assert directory.client_round(CLIENT) == 1  # its training counts


def test_under_secure_aggregation_it_is_in_no_sum(private, tmp_path):
    made = private(secure=SECURE, **AVERAGED | SMALL, partition={"name": "iid", "clients": 4})
    directory, grid = start(made, tmp_path / "run")
    replaced = swap_answers(grid, "train", (CLIENT, 2), (OTHER, 2))
    warnings = run_on(made, directory, grid)
    assert replaced
    # it is left out before masks are agreed on, so the others' sum stands
    assert [warning.partition(": client")[0] for warning in warnings] == ["round 2"]
    assert metric(tmp_path / "run", "missing", 2) == {str(CLIENT): 1.0}
    assert [directory.client_round(k) for k in range(4)] == [2, 1, 2, 2]
