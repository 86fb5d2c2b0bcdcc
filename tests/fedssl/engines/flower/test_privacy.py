"""Flower's differential privacy: what leaves a client, how far the mean moves, and what a run spends."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")

import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage

from fedssl.engines.flower.privacy import private_answer, private_federation
from fedssl.engines.flower.privacy_accountant import (
    PRIVACY_FILE,
    PrivacyAccountant,
    epsilon_after,
    noise_multiplier,
    rounds_within,
)
from fedssl.engines.flower.wire import flatten_weights, from_records, to_records, unflatten_weights
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.guard import REFUSED, reasons_in
from fedssl.messages import Message
from fedssl.recipe.recipe import FixedClipping, FlowerOptions, LocalDP
from fedssl.reports.report import build_report
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.engines.flower.loop_grid import EQUAL, HUGE
from tests.fedssl.engines.short_runs import stopped_before_commit


def answer(options: dict, received: Message, reply: Message) -> Message:
    """What leaves a client that has trained `reply` from `received`."""
    content = to_records(received)
    content["task"] = ConfigRecord({"client": 0, "round": 1})
    message = FlowerMessage(content, dst_node_id=1, message_type="train")

    context = Context(0, 1, {}, RecordDict(), {})
    return from_records(private_answer(FlowerOptions(**options), message, context, lambda: to_records(reply)))


LOCAL = {"name": "local_dp", "clipping_norm": 1.0, "epsilon": 0.5, "delta": 1e-5}
CENTRAL = {"name": "fixed_clipping", "clipping_norm": 0.5, "noise_multiplier": 4.0}
RECEIVED = {
    "online.w": torch.tensor([[1.0, 1.0]]),
    "online.temperature": torch.tensor(2.0),
    "online.h": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
    "online.bn.num_batches_tracked": torch.tensor(3),
}
#: the update's L2 norm is sqrt(3^2 + 4^2 + 12^2) = 13
TRAINED = RECEIVED | {
    "online.w": torch.tensor([[4.0, 5.0]]),
    "online.temperature": torch.tensor(14.0),
    "online.bn.num_batches_tracked": torch.tensor(10),
}


@pytest.mark.parametrize(("clipping_norm", "factor"), [(6.5, 0.5), (13.0, 1.0), (20.0, 1.0)])
def test_an_update_is_clipped_as_a_whole(clipping_norm, factor):
    options = {"differential_privacy": HUGE | {"clipping_norm": clipping_norm}}
    # more is received than comes back, as where a schedule sends layers that are final
    received = Message(RECEIVED | {"online.final": torch.ones(2)})
    clipped = answer(options, received, Message(TRAINED, {"samples": 7})).tensors
    assert {name: t.dtype for name, t in clipped.items()} == {name: t.dtype for name, t in TRAINED.items()}
    torch.testing.assert_close(clipped["online.w"], torch.tensor([[1 + 3 * factor, 1 + 4 * factor]]))
    torch.testing.assert_close(clipped["online.temperature"], torch.tensor(2 + 12 * factor))
    assert torch.equal(clipped["online.h"], RECEIVED["online.h"])
    assert clipped["online.bn.num_batches_tracked"] == 3  # as it was sent, not as it was trained


def local_noise(count: int, **changes) -> torch.Tensor:
    """What leaves a client whose weights were and are zero."""
    message = Message({"online.w": torch.zeros(count)}, {"samples": 1})
    return answer({"differential_privacy": LOCAL | changes}, message, message).tensors["online.w"]


@pytest.mark.parametrize(("epsilon", "deviation"), [(3.2, 3.0280), (0.8, 12.112)])
def test_local_noise_has_the_documented_deviation_also_where_nothing_was_learnt(epsilon, deviation):
    noise = local_noise(40000, epsilon=epsilon)
    # 2 * sqrt(2 ln(125000)) / epsilon; the deviation of 40000 draws is known to 0.35 per cent
    assert float(noise.std()) == pytest.approx(deviation, rel=0.03)
    assert abs(float(noise.mean())) < 6 * deviation / 200


def test_noise_does_not_follow_from_a_state_that_others_know():
    drawn = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002 - a node's processes are forks of one
        drawn.append(local_noise(100))
        follows = np.random.random()  # noqa: NPY002
    assert not torch.equal(*drawn)
    np.random.seed(0)  # noqa: NPY002
    assert follows == np.random.random()  # noqa: NPY002


def test_what_tells_of_the_images_does_not_leave():
    metrics = {"loss": 0.3, "divergence": 2.0, "memory": 5.0, "flops": 6.0}
    trained = Message(TRAINED, {"samples": 7}, metrics=metrics)
    private = answer({"differential_privacy": HUGE}, Message(RECEIVED), trained)
    assert private.numbers == {"samples": 1}
    assert private.metrics == {"memory": 5.0, "flops": 6.0}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"online.temperature": torch.tensor(float("nan"))}, "not finite"),
        ({"representation.0": torch.ones(3)}, r"representation\.0 was not received from the server"),
    ],
)
def test_an_update_that_cannot_be_clipped_stays_where_it_is(changes, told):
    with pytest.raises(UserError, match=told):
        answer({"differential_privacy": HUGE}, Message(RECEIVED), Message(TRAINED | changes, {"samples": 7}))


# Runs


def test_the_servers_noise_is_scaled_by_the_clients_in_the_mean(tiny):
    privacy = {"name": "fixed_clipping", "clipping_norm": 0.5, "noise_multiplier": 1.2}
    recipe = tiny(**EQUAL, engine="flower", flower={"differential_privacy": privacy})
    plain = build_federation(recipe).method
    state = plain.initial_state()
    reply = Message(dict(state.tensors), {"samples": 1})
    broken = Message(dict(state.tensors), {"samples": float("nan")})
    noisy = private_federation(build_federation(recipe)).method.aggregate(state, {0: reply, 1: reply, 2: broken}, 1)
    floats = [name for name, t in state.tensors.items() if t.is_floating_point()]
    weights = [name for name in floats if not name.endswith("running_var")]
    noise = torch.cat([(noisy.tensors[name] - state.tensors[name]).flatten() for name in weights])
    assert float(noise.std()) == pytest.approx(1.2 * 0.5 / 2, rel=0.06)
    for name, tensor in state.tensors.items():
        assert noisy.tensors[name].dtype == tensor.dtype
        if name not in floats:
            assert torch.equal(noisy.tensors[name], tensor)
        if name.endswith("running_var"):
            assert float(noisy.tensors[name].min()) >= 0
    assert noisy.config == {"refused/2": "samples is nan, expected a positive number"}


FIXED = {"name": "fixed_clipping", "clipping_norm": 1.0, "noise_multiplier": 0.0}


@pytest.mark.parametrize(
    ("privacy", "length", "samples", "reason"),
    [
        (FIXED, 1.0, 1, None),
        (FIXED, 1.01, 1, "changed by a length of 1.01, but fixed_clipping allows 1 (clipping_norm 1)"),
        (FIXED, 3560.0, 1, "far above the server's and the round's median"),
        (FIXED, 0.5, 1e9, "it counts by 1e+09 images, but with differential privacy each client counts as one"),
        (LOCAL, 0.99, 1, None),  # of what clipping and noise can be
        (LOCAL, 1.01, 1, "but local_dp allows"),
    ],
)
def test_an_update_that_is_not_clipped_is_refused(privacy, length, samples, reason, tiny):
    recipe = tiny(**EQUAL, engine="flower", flower={"differential_privacy": privacy})
    method = private_federation(build_federation(recipe)).method
    state = method.initial_state()
    vector = flatten_weights(state.tensors)
    if privacy is LOCAL:
        length *= 1 + LocalDP(**LOCAL).noise_deviation * (len(vector) ** 0.5 + 8)

    def reply(length, samples):
        moved = vector + length / len(vector) ** 0.5
        return Message(unflatten_weights(moved, state.tensors), {"samples": samples})

    usual = reply(length / 4 if privacy is LOCAL else 0.25, 1)
    replies = {0: usual, 1: usual, 2: reply(length, samples)}
    refused = reasons_in(method.aggregate(state, replies, 1), REFUSED)
    assert list(refused) == ([] if reason is None else [2])
    assert reason is None or reason in refused[2]


# The privacy that a run spends: against dp-accounting's accountant, over kills, and against a budget


@pytest.mark.parametrize(
    ("privacy", "rounds", "of_distance"),
    [
        # the last number is the noise's deviation divided by the distance of two clipped updates
        (FixedClipping(**CENTRAL), 1, 2.0),
        (FixedClipping(**CENTRAL | {"noise_multiplier": 10, "clipping_norm": 7, "delta": 1e-6}), 30, 5.0),
        (LocalDP(**LOCAL), 12, math.sqrt(2 * math.log(1.25e5)) / 0.5),
        (LocalDP(**LOCAL | {"clipping_norm": 3, "epsilon": 1}), 12, math.sqrt(2 * math.log(1.25e5))),
    ],
)
def test_epsilon_is_that_of_dp_accounting(privacy, rounds, of_distance):
    assert noise_multiplier(privacy) == pytest.approx(of_distance, rel=1e-12)
    accountant = PLDAccountant()
    for _ in range(rounds):
        accountant.compose(GaussianDpEvent(of_distance))
    assert epsilon_after(privacy, rounds) == pytest.approx(accountant.get_epsilon(privacy.delta), abs=1e-6)


def test_what_costs_nothing_what_cannot_be_bounded_and_rounds_within_a_budget():
    privacy = FixedClipping(**CENTRAL)
    assert epsilon_after(privacy, 0) == 0
    assert epsilon_after(FixedClipping(**CENTRAL | {"noise_multiplier": 0}), 1) == math.inf
    allowed = rounds_within(privacy, 6.0, 100)
    assert epsilon_after(privacy, allowed) <= 6.0 < epsilon_after(privacy, allowed + 1)
    assert rounds_within(privacy, 1e9, 7) == 7


@pytest.mark.parametrize("dp", [LOCAL, CENTRAL], ids=["local", "central"])
def test_a_resumed_run_continues_the_count(dp, begin):
    run = begin(dp=dp, **EQUAL, rounds=3)
    with stopped_before_commit(2):
        run.go()
    run.grid.silent = {12}  # client 1 answers no more
    run.go()
    options = run.recipe.flower.differential_privacy
    # what left a site counts although its round was lost; the mean of a lost round left nobody
    rounds = {"0": 4, "1": 4, "2": 4} if dp is LOCAL else {"0": 3, "1": 1, "2": 3}
    assert run.metric("epsilon", 3) == {
        **{k: pytest.approx(epsilon_after(options, count), abs=1e-9) for k, count in rounds.items()},
        "global": pytest.approx(epsilon_after(options, max(rounds.values())), abs=1e-9),
    }
    page = build_report([read_run(run.path)])
    assert "Differential privacy" in page
    assert f'<td class="number">{epsilon_after(options, max(rounds.values())):.4g}</td>' in page


def test_the_budget_stops_a_run_and_without_its_count_it_is_not_continued(begin):
    """Before the round that would pass the budget."""
    privacy = FixedClipping(**CENTRAL)
    budget = (epsilon_after(privacy, 2) + epsilon_after(privacy, 3)) / 2
    run = begin(dp=CENTRAL, **EQUAL, rounds=5, flower={"epsilon_budget": budget})
    left = budget - epsilon_after(privacy, 2)
    with pytest.raises(UserError, match=rf"round 3 is not begun.* so {left:.6g} is left, less than a round takes"):
        run.go()
    directory, flower = RunDirectory.open(run.path), run.recipe.flower
    assert directory.checkpoint.round == 2
    assert {reply.metadata.group_id for reply in run.grid.sent} <= {"0", "1", "2"}  # nobody was asked in round 3
    assert max(run.metric("epsilon", 2).values()) <= budget

    file = run.path / PRIVACY_FILE
    spent = json.loads(file.read_text())
    assert spent == {"round": 2, "asked": [0, 1, 2], "earlier": {"0": 1, "1": 1, "2": 1}}
    assert PrivacyAccountant(directory, flower).epsilons([0]) == {0: epsilon_after(privacy, 2)}
    for text, told in (
        (json.dumps(spent | {"round": 1}), "ends with round 1, but the run has 2 committed rounds"),
        ("{", "cannot be read as the count"),
        (None, f"{PRIVACY_FILE} is missing, but the run has 2 committed rounds"),
    ):
        file.unlink() if text is None else file.write_text(text)
        with pytest.raises(UserError, match=told):
            PrivacyAccountant(directory, flower)
    assert PrivacyAccountant(directory, FlowerOptions()).epsilons([0]) == {}
