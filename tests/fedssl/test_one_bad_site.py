"""One bad site of five neither spoils nor stops a round of ten, and is named with the reason."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedssl.aggregators.weighted_mean import is_statistic
from fedssl.federation import Federation, build_federation
from fedssl.guard import CAPPED, REFUSED, reasons_in
from fedssl.messages import Message
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.rounds_in_memory import Rounds, train_rounds

BAD, ROUNDS = 4, 10
Attack = Callable[[Message, Message], Message]
FIVE = AVERAGED | {
    "rounds": ROUNDS,
    "data": {"name": "digits", "train_limit": 320, "test_limit": 200},
    "partition": {"name": "iid", "clients": 5},
    "training": {"local_epochs": 1, "batch_size": 32, "learning_rate": 0.1},
    "evaluation": {"neighbors": 5},
}


def changed(reply: Message, change: Callable[[torch.Tensor, str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The answer's floating-point tensors, changed, with the others as they are."""
    return {n: change(t, n).to(t.dtype) if t.is_floating_point() else t for n, t in reply.tensors.items()}


def weights_of_900(server: Message, reply: Message) -> Message:
    tensors = changed(reply, lambda t, n: 900.0 * torch.where(t < 0, -1.0 + ("running_var" in n) * 2, 1.0))
    return replace(reply, tensors=tensors, numbers={"samples": 2 * reply.numbers["samples"]})


def scaled_update(factor: float) -> Attack:
    def act(server: Message, reply: Message) -> Message:
        def scaled(t: torch.Tensor, n: str) -> torch.Tensor:
            moved = server.tensors[n] + factor * (t - server.tensors[n])
            return moved.clamp(min=0) if "running_var" in n else moved

        return replace(reply, tensors=changed(reply, scaled))

    return act


def one_entry(server: Message, reply: Message) -> Message:
    tensors = {name: tensor.clone() for name, tensor in reply.tensors.items()}
    tensors["online.encoder.blocks.4.weight"].view(-1)[0] = 900.0
    return replace(reply, tensors=tensors)


def huge(end: str, value: float) -> Attack:
    def act(server: Message, reply: Message) -> Message:
        filled = {n: torch.full_like(t, value) for n, t in reply.tensors.items() if n.endswith(end)}
        return replace(reply, tensors=reply.tensors | filled)

    return act


def a_billion(server: Message, reply: Message) -> Message:
    return replace(reply, numbers={"samples": 1e9})


def reversed_with_many_images(server: Message, reply: Message) -> Message:
    return replace(scaled_update(-4.0)(server, reply), numbers={"samples": 597.0})


def model_weights(state: Message) -> Tensor:
    return torch.cat([t.flatten().double() for name, t in state.tensors.items() if not is_statistic(name, t)])


#: by name the attack and what is said of it
BROKEN: dict[str, tuple[Attack, str]] = {
    "weights of 900": (weights_of_900, "holds, as root mean square, 900, far above"),
    "sign-flipped and scaled": (scaled_update(-20.0), "weights have changed"),
    "a little too far": (scaled_update(-6.0), "weights have changed"),
    "NaN": (lambda server, reply: replace(reply, tensors=changed(reply, lambda t, n: t * math.nan)), "holds NaN"),
    "zeros": (lambda server, reply: replace(reply, tensors=changed(reply, lambda t, n: t * 0)), "become smaller"),
    "one entry": (one_entry, "blocks.4.weight holds"),
    "huge buffers": (huge("running_var", 9e5), "running_var holds, as root mean square, 9e+05"),
    "huge counters": (huge("num_batches_tracked", 2**53), "num_batches_tracked has changed"),
    "a billion images": (a_billion, "samples is 1e+09, more than twice 64"),
}


def run(federation: Federation, attack: Attack | None = None, stated: int = 64) -> Rounds:
    """All five sites train in each round; the bad one counts only with an attack, and says to have `stated` images."""

    def join(server: Message, replies: dict[int, Message], number: int) -> Message:
        bad = {BAD: attack(server, replies[BAD])} if attack else {}
        return federation.method.aggregate(server, {k: replies[k] for k in range(4)} | bad, number, images(stated))

    return train_rounds(federation, ROUNDS, join=join)


def images(stated: int) -> dict[int, int]:
    return {k: stated if k == BAD else 64 for k in range(5)}


@pytest.fixture(scope="module")
def five(tiny) -> Federation:
    return build_federation(tiny(**FIVE))


@pytest.fixture(scope="module")
def without(five) -> Rounds:
    """The run of the four other sites: their answers follow from the server's state, whatever the bad one sends."""
    return run(five)


def attacked(without: Rounds, number: int, attack: Attack) -> tuple[Message, dict[int, Message]]:
    """What the server has before a round and what it receives in it."""
    before, replies = without.servers[number], without.replies[number]
    return before, replies | {BAD: attack(before, replies[BAD])}


def far_off(replies: dict[int, Message], name: str, tensor: Tensor) -> bool:
    """Whether an entry does not lie between those of the four others."""
    honest = torch.stack([replies[k].tensors[name].double() for k in range(4)])
    return not ((honest.amin(0) - 1e-6 <= tensor) & (tensor <= honest.amax(0) + 1e-6)).all()


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_site_is_named_and_the_run_is_that_of_the_others(name, five, without):
    attack, reason = BROKEN[name]
    for number in range(1, ROUNDS + 1):
        after = five.method.aggregate(*attacked(without, number, attack), number, images(64))
        assert list(reasons_in(after, REFUSED)) == [BAD]
        assert reason in reasons_in(after, REFUSED)[BAD]
        assert after.tensors.keys() == without.servers[number + 1].tensors.keys()
        assert all(torch.equal(tensor, after.tensors[n]) for n, tensor in without.servers[number + 1].tensors.items())


def test_a_site_that_states_a_billion_images_is_named_and_counts_by_no_more_than_it_may(five, without):
    for number in range(1, ROUNDS + 1):
        before, replies = attacked(without, number, a_billion)
        after = five.method.aggregate(before, replies, number, images(10**9))
        assert list(reasons_in(after, CAPPED)) == [BAD]
        assert "states 1e+09 images, 100 % of all" in reasons_in(after, CAPPED)[BAD]
        weights, total = {0: 64, 1: 64, 2: 64, 3: 64, BAD: 256 * 0.7 / 0.3}, 256 / 0.3
        for name, tensor in after.tensors.items():
            mean = sum(replies[k].tensors[name].double() * n / total for k, n in weights.items())
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=0.5 if "num_b" in name else 1e-6)


@pytest.mark.parametrize(
    ("attack", "stated", "gained", "left", "reason"),
    [
        (reversed_with_many_images, 597, 0.4, -0.1, "guard.largest_influence allows: it counts by"),
        (scaled_update(-4.9), 64, 0.2, 0.5, "weights have changed"),
    ],
)
def test_a_reversed_update_cannot_turn_the_model_round(attack, stated, gained, left, reason, five, without):
    """As 0.7 of all images it can hold the others up; without more images than they it counts by the usual length."""
    guard = five.method.guard.model_copy(update={"largest_influence": 0.5})
    bounded = replace(five, method=replace(five.method, guard=guard))

    def towards_the_others(federation: Federation) -> tuple[Rounds, float]:
        done = run(federation, attack, stated)
        first, last, honest = (model_weights(state) for state in (done.servers[1], done.server, without.server))
        return done, float((last - first) @ (honest - first) / (honest - first).square().sum())

    _, free = towards_the_others(five)
    done, share = towards_the_others(bounded)
    assert share > max(left, free + gained)
    for number in range(1, ROUNDS + 1):
        state = done.servers[number + 1]
        assert reason in (reasons_in(state, CAPPED) | reasons_in(state, REFUSED))[BAD]


def test_of_two_reasons_to_count_by_less_both_are_told(five, without):
    method = replace(five.method, guard=five.method.guard.model_copy(update={"largest_influence": 0.15}))
    told = reasons_in(method.aggregate(*attacked(without, 1, scaled_update(3)), 1, images(64)), CAPPED)[BAD]
    assert "weights have changed" in told
    assert "guard.largest_influence allows" in told


def far_statistics(end: str, change: Callable[[Tensor, Tensor], Tensor]) -> Attack:
    """Running statistics are changed, all else stays; `change` is told the means and the standard deviations."""

    def act(server: Message, reply: Message) -> Message:
        names = [name for name in reply.tensors if name.endswith(end)]
        variances = {name: reply.tensors[name.removesuffix(end) + ".running_var"] for name in names}
        far = {n: change(reply.tensors[n], variances[n].clamp_min(float(variances[n].mean())).sqrt()) for n in names}
        return replace(reply, tensors=reply.tensors | far)

    return act


#: by name the attack, and what is said of it in every round if anything
STATISTICS: dict[str, tuple[Attack, str | None]] = {
    "100 times the means": (far_statistics(".running_mean", lambda mean, deviation: 100 * mean), "deviations off"),
    "10 times the means": (far_statistics(".running_mean", lambda mean, deviation: 10 * mean), "deviations off"),
    "0.3 deviations": (far_statistics(".running_mean", lambda mean, deviation: mean + 0.3 * deviation), None),
    "a deviation": (far_statistics(".running_mean", lambda mean, deviation: mean + deviation), "deviations off"),
    "no variance": (far_statistics(".running_var", lambda variance, deviation: 0 * variance), "is on average 0 times"),
    "20 variances": (far_statistics(".running_var", lambda variance, deviation: 20 * variance), "times their median"),
}


@pytest.mark.parametrize("part", ["weighted_mean", "eua", "l_dawa"])
@pytest.mark.parametrize("name", STATISTICS)
def test_no_site_moves_a_running_statistic_beyond_the_others(name, part, five, without, tiny):
    """At sites the statistics are the median; elsewhere those that are far off do not count."""
    attack, reason = STATISTICS[name]
    method = five.method if part == "weighted_mean" else build_federation(tiny(**FIVE | {"aggregators": [part]})).method
    sites = replace(method, guard=method.guard.model_copy(update={"largest_influence": 0.5}))
    for number in (1, 5, 10):
        before, replies = attacked(without, number, attack)
        for judge, at_sites in ((sites, True), (method, False)):
            after = judge.aggregate(replace(before, numbers={"l_dawa.rounds": 9}), replies, number, images(64))
            outcome = reasons_in(after, REFUSED) | reasons_in(after, CAPPED)
            if reason is not None:
                assert reason in outcome[BAD] or "far above" in outcome[BAD]
            assert set(outcome) <= {BAD}
            statistics = {n: t for n, t in after.tensors.items() if n.endswith(("running_mean", "running_var"))}
            assert not any(far_off(replies, n, t) for n, t in statistics.items() if at_sites or reason)


def test_images_that_are_stated_in_the_answer_alone_do_not_raise_the_limits(five, without):
    """The site has not said how many it has, so that its answer may say any number."""
    before, replies = attacked(without, 1, weights_of_900)
    replies[BAD].numbers["samples"] = 1e12
    after = five.method.aggregate(before, replies, 1, dict.fromkeys(range(4), 64))
    assert "holds, as root mean square, 900, far above" in reasons_in(after, REFUSED)[BAD]
