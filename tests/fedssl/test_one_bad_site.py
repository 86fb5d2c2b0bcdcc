"""One bad site of five neither spoils nor stops a run of ten rounds, and is named with the reason."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedssl.aggregators.weighted_mean import is_statistic
from fedssl.evaluation.evaluate import evaluate_model
from fedssl.federation import Federation, build_federation
from fedssl.guard import CAPPED, REFUSED, reasons_in
from fedssl.messages import Message
from tests.fedssl.conftest import AVERAGED

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


def huge_buffers(server: Message, reply: Message) -> Message:
    huge = {n: torch.full_like(t, 9e5) for n, t in reply.tensors.items() if n.endswith("running_var")}
    return replace(reply, tensors=reply.tensors | huge)


def huge_counters(server: Message, reply: Message) -> Message:
    huge = {n: torch.full_like(t, 2**53) for n, t in reply.tensors.items() if n.endswith("num_batches_tracked")}
    return replace(reply, tensors=reply.tensors | huge)


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
    "huge buffers": (huge_buffers, "running_var holds, as root mean square, 9e+05"),
    "huge counters": (huge_counters, "num_batches_tracked has changed"),
    "a billion images": (a_billion, "samples is 1e+09, more than twice 64"),
}


@dataclass
class Run:
    """Ten rounds of a federation: by round, with 0 before them, the server's state, and each client's honest answer."""

    servers: list[Message]
    replies: list[dict[int, Message]]
    capped: list[dict[int, str]]


def run(federation: Federation, taking_part: list[int], stated: int = 64, attack: Attack | None = None) -> Run:
    """All five sites train in each round; the mean is of those taking part. `stated` are the bad site's images."""
    method, states = federation.method, [Message()] * 5
    done, model = Run([method.initial_state()], [{}], [{}]), federation.new_model(0)
    for number in range(1, ROUNDS + 1):
        replies = {}
        for k, sent in method.broadcast(done.servers[-1], list(range(5)), number).items():
            client = federation.client(k, states[k], model)
            replies[k] = method.client_round(client, sent, number)
            states[k] = federation.client_state(client, number)
            if attack and k == BAD:
                replies[k] = attack(done.servers[-1], replies[k])
        done.replies.append(replies)
        used = {k: replies[k] for k in taking_part}
        done.servers.append(method.aggregate(done.servers[-1], used, number, images(stated)))
        done.capped.append(reasons_in(done.servers[-1], CAPPED))
    return done


def images(stated: int) -> dict[int, int]:
    return {k: stated if k == BAD else 64 for k in range(5)}


def accuracy(federation: Federation, done: Run) -> float:
    model = federation.method.load_global(done.servers[-1], lambda: federation.new_model(None))
    return evaluate_model(model, federation.dataset, federation.recipe.evaluation, 0, linear=False)[0]["knn"]


@pytest.fixture(scope="module")
def five(tiny) -> Federation:
    return build_federation(tiny(**FIVE))


@pytest.fixture(scope="module")
def without(five) -> Run:
    """The run of the four other sites."""
    return run(five, [0, 1, 2, 3])


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_site_is_named_and_the_run_is_that_of_the_others(name, five, without):
    """The other sites' answers follow from the server's state, so a round with the same state has the same answers."""
    attack, reason = BROKEN[name]
    for number in range(1, ROUNDS + 1):
        before, replies = without.servers[number - 1], dict(without.replies[number])
        replies[BAD] = attack(before, replies[BAD])
        after = five.method.aggregate(before, replies, number, images(64))
        assert list(reasons_in(after, REFUSED)) == [BAD]
        assert reason in reasons_in(after, REFUSED)[BAD]
        assert after.tensors.keys() == without.servers[number].tensors.keys()
        assert all(torch.equal(tensor, after.tensors[n]) for n, tensor in without.servers[number].tensors.items())


def test_a_site_that_states_a_billion_images_is_named_and_costs_nothing(five, without):
    done = run(five, [0, 1, 2, 3, BAD], stated=10**9, attack=a_billion)
    for number in range(1, ROUNDS + 1):
        assert list(done.capped[number]) == [BAD]
        assert "states 1e+09 images, 100 % of all" in done.capped[number][BAD]
        weights, total = {0: 64, 1: 64, 2: 64, 3: 64, BAD: 256 * 0.7 / 0.3}, 256 / 0.3
        for name, tensor in done.servers[number].tensors.items():
            mean = sum(done.replies[number][k].tensors[name].double() * n / total for k, n in weights.items())
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=0.5 if "num_b" in name else 1e-6)
    assert abs(accuracy(five, done) - accuracy(five, without)) <= 5  # three seeds differ by 3.5


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

    def towards_the_others(federation: Federation) -> tuple[Run, float]:
        done = run(federation, [0, 1, 2, 3, BAD], stated=stated, attack=attack)
        first, last, honest = (
            model_weights(state) for state in (done.servers[0], done.servers[-1], without.servers[-1])
        )
        return done, float((last - first) @ (honest - first) / (honest - first).square().sum())

    _, free = towards_the_others(five)
    done, share = towards_the_others(bounded)
    assert share > max(left, free + gained)
    named = [(done.capped[n] | reasons_in(done.servers[n], REFUSED))[BAD] for n in range(1, ROUNDS + 1)]
    assert all(reason in why for why in named)


def test_of_two_reasons_to_count_by_less_both_are_told(five, without):
    method = replace(five.method, guard=five.method.guard.model_copy(update={"largest_influence": 0.15}))
    before, replies = without.servers[0], dict(without.replies[1])
    replies[BAD] = scaled_update(3)(before, replies[BAD])
    told = reasons_in(method.aggregate(before, replies, 1, images(64)), CAPPED)[BAD]
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
        before, replies = (
            replace(without.servers[number - 1], numbers={"l_dawa.rounds": 9}),
            dict(without.replies[number]),
        )
        replies[BAD] = attack(before, replies[BAD])
        for judge, at_sites in ((sites, True), (method, False)):
            after = judge.aggregate(before, replies, number, images(64))
            outcome = reasons_in(after, REFUSED) | reasons_in(after, CAPPED)
            if reason is not None:
                assert reason in outcome[BAD] or "far above" in outcome[BAD]
            assert set(outcome) <= {BAD}
            for n, tensor in after.tensors.items() if at_sites or reason else ():
                if n.endswith(("running_mean", "running_var")):
                    honest = torch.stack([replies[k].tensors[n] for k in range(4)])
                    assert (tensor >= honest.amin(dim=0) - 1e-6).all()
                    assert (tensor <= honest.amax(dim=0) + 1e-6).all()


def test_ten_rounds_with_running_statistics_that_are_off_end_as_those_of_the_others(five, without):
    guard = five.method.guard.model_copy(update={"largest_influence": 0.5})
    bounded = replace(five, method=replace(five.method, guard=guard))
    done = run(bounded, [0, 1, 2, 3, BAD], attack=STATISTICS["a deviation"][0])
    assert abs(accuracy(five, done) - accuracy(five, without)) <= 5


def test_images_that_are_stated_in_the_answer_alone_do_not_raise_the_limits(five, without):
    """The site has not said how many it has, so that its answer may say any number."""
    replies = dict(without.replies[1])
    replies[BAD] = replace(weights_of_900(without.servers[0], replies[BAD]), numbers={"samples": 1e12})
    after = five.method.aggregate(without.servers[0], replies, 1, dict.fromkeys(range(4), 64))
    assert "holds, as root mean square, 900, far above" in reasons_in(after, REFUSED)[BAD]


@pytest.mark.parametrize("factor", [-4.0, 4.0])
def test_what_the_guard_lets_through_stays_among_the_others_in_a_trimmed_mean(factor, tiny):
    """A drift just below the bound: every entry of the mean lies between those of honest sites."""
    federation = build_federation(tiny(**FIVE | {"aggregators": ["trimmed_mean"]}))
    done = run(federation, [0, 1, 2, 3, BAD], attack=scaled_update(factor))
    assert not any(reasons_in(server, REFUSED) for server in done.servers)
    for number in range(1, ROUNDS + 1):
        for name, tensor in done.servers[number].tensors.items():
            honest = torch.stack([done.replies[number][k].tensors[name].double() for k in range(4)])
            assert ((honest.amin(0) - 1e-6 <= tensor) & (tensor <= honest.amax(0) + 1e-6)).all()
