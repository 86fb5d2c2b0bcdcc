"""A broken client is named, refused and left out, by every aggregator, and the run goes on."""

import csv
import math
from dataclasses import replace
from unittest.mock import Mock, call, create_autospec

import pytest
import torch

from fedssl.aggregators.weighted_mean import WeightedMean
from fedssl.engines.in_process import resume, run
from fedssl.engines.observers import Observer
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.guard import REFUSED, Asked, capped_images, reasons_in, refusals
from fedssl.messages import Message
from fedssl.method import Method
from fedssl.outliers import change_of_mean, shortened
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.engines.short_runs import SMALL
from tests.fedssl.rounds_in_memory import train_rounds
from tests.fedssl.test_shipped_recipes import small

NAME = "online.encoder.weight"
SERVER = Message({NAME: torch.zeros(2, 3), "online.count": torch.tensor(4)})
EXPECTED = {NAME: (2, 3), "online.count": ()}


def answer(tensors=None, numbers=None, metrics=None, without=None):
    """A sound answer with these entries replaced, and without one."""
    all_tensors = {NAME: torch.ones(2, 3), "online.count": torch.tensor(7)} | (tensors or {})
    message = Message(all_tensors, {"samples": 5.0} | (numbers or {}), metrics={"loss": 1.0} | (metrics or {}))
    for entries in (message.tensors, message.numbers):
        entries.pop(without, None)
    return message


def with_entry(value):
    return answer({NAME: torch.tensor([[1, 1, 1], [1, 1, value]])})


BROKEN = [
    (with_entry(math.nan), f"{NAME} holds NaN"),
    (with_entry(-math.inf), f"{NAME} holds an infinite value"),
    (answer({NAME: torch.tensor([[math.nan, math.inf, 0]] * 2)}), "holds NaN"),
    (with_entry(-1e30), "holds 1e+30 in magnitude, more than 1e+06"),
    (answer({"online.count": torch.tensor(-(2**62))}), "online.count holds 4.61e+18 in magnitude, more than 9.01e+15"),
    (answer({"online.half": torch.full((2,), 3e38).bfloat16()}), "online.half holds 3e+38 in magnitude"),
    (answer({NAME: torch.ones(3, 2)}), f"{NAME} has shape [3, 2], expected [2, 3]"),
    (answer({NAME: torch.ones(6)}), "has shape [6], expected [2, 3]"),
    (answer({NAME: torch.ones(2, 3).long()}), "has dtype torch.int64, expected torch.float32"),
    (answer(without=NAME), f"{NAME} is missing"),
    (answer({"online.more": torch.ones(1)}), "online.more was not asked for"),
    (answer(numbers={"x" * 10**6: 1.0}), "xxx', expected at most 200 ASCII characters"),
    (answer({"x" * 10**6: torch.ones(1)}), "x" * 500),
    (answer(metrics={f"m{i}": 1.0 for i in range(1000)}), "numbers and metrics, more than 1000"),
    (answer(metrics={"bytes_up": 1.0}), "bytes_up has a name that only the server may use"),
    (answer(metrics={"local_model_distance": 1.0}), "local_model_distance has a name that only the server may use"),
    (answer(metrics={"k\u200bnn": 99.0}), r"of a metric is 'k\u200bnn', expected at most 200 ASCII characters"),
    (answer(metrics={"loss": 1.7e308}), "the metric loss is 1.7e+308"),
    (answer(without="samples"), "samples is missing, expected a positive number"),
    (answer(numbers={"samples": math.nan}), "samples is nan"),
    (answer(numbers={"samples": 1e15}), "the number samples is 1000000000000000"),
    (answer(metrics={"loss": math.nan}), "the metric loss is nan"),
    (answer(metrics={"flops": math.inf}), "the metric flops is inf"),
]


@pytest.mark.parametrize(("reply", "reason"), BROKEN)
def test_what_is_refused_and_why(reply, reason):
    replies = {0: answer(), 3: reply, 5: answer()}
    expected = EXPECTED | ({"online.half": (2,)} if "online.half" in reply.tensors else {})
    server = replace(SERVER, tensors=SERVER.tensors | {"online.half": torch.zeros(2).bfloat16()})
    refused = refusals(server, replies, Asked({0: EXPECTED, 3: expected, 5: EXPECTED}))
    assert list(refused) == [3]
    assert reason in refused[3]
    assert len(refused[3]) <= 500


def test_sound_answers_pass():
    replies = {0: answer(), 1: with_entry(-1e3)}
    assert refusals(SERVER, replies, Asked(dict.fromkeys(replies, EXPECTED))) == {}
    unknown = {0: answer({"dictionary.0": torch.zeros(0, 3)})}  # of a part that does not say what it sends
    assert refusals(SERVER, unknown, Asked({0: EXPECTED}, complete=False)) == {}
    large = {0: answer(metrics={"flops": 1e15})}  # what is only logged: a round of a ResNet-18
    assert refusals(SERVER, large, Asked({0: EXPECTED})) == {}


@pytest.mark.parametrize(
    ("values", "refused"),
    # representations of different architectures may differ much; of two nobody knows which is right
    [((2.0, 2.0, 1900.0), []), ((2.0, 2.0, 2100.0), [2]), ((1.0, 9e5), []), ((1e-9, 3.0, 2.0), [])],
)
def test_what_one_client_sends_is_compared_with_what_the_others_send_under_their_numbers(values, refused):
    replies = {k: Message({f"r.{k}": torch.full((2, 2), value)}, {"samples": 1.0}) for k, value in enumerate(values)}
    reasons = refusals(Message(), replies, Asked({k: {f"r.{k}": (2, 2)} for k in replies}))
    assert list(reasons) == refused
    assert all("r holds, as root mean square, 2.1e+03, far above" in reason for reason in reasons.values())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.float16])
def test_what_the_server_has_no_entry_of_is_float32(dtype):
    replies = {
        k: Message({f"r.{k}": torch.ones(2, 2).to(dtype if k else torch.float32)}, {"samples": 1.0}) for k in (0, 1)
    }
    asked = Asked({k: {f"r.{k}": (2, 2)} for k in replies})
    assert refusals(Message(), replies, asked) == {1: f"r.1 has dtype {dtype}, expected torch.float32"}
    if dtype != torch.bool:  # a part that does not say what it sends
        assert refusals(Message(), replies, Asked({k: {} for k in replies}, complete=False)) == {}


WEIGHT, MEAN = "online.w", "norm.running_mean"


@pytest.mark.parametrize(
    ("name", "server", "values", "refused"),
    [
        (WEIGHT, 0, (1, 2, 9e5), [2]),
        (WEIGHT, 0, (9e5, 1), [0]),  # of two clients the one with the small weights is believed
        (WEIGHT, 0, (1, 999), []),  # from zero
        (WEIGHT, 0, (1, 1001), [1]),
        (WEIGHT, 0, (0, 999), []),
        (WEIGHT, 0, (0, 0, 999), []),  # most did not train
        (WEIGHT, 0, (5, 4000, 4000), []),  # the others are not refused because one is small
        (WEIGHT, 0, (9e5, 8e5, 1), []),  # the majority
        (WEIGHT, 0, (9e5,), [0]),
        (WEIGHT, 0, (math.nan, 1, 9e5), [0, 2]),
        (WEIGHT, 1, (29, 1), []),
        (WEIGHT, 1, (31, 1), [0]),
        (WEIGHT, 1, (999,), []),  # alone it is compared with the server's
        (WEIGHT, 1, (1001,), [0]),
        (WEIGHT, 1, (0.034, 1), []),
        (WEIGHT, 1, (1, 0.032), [1]),  # too small
        (WEIGHT, 1, (1, 0), [1]),
        (WEIGHT, 10, (10.1, 10.1, 10.49), []),  # of the change all three count
        (WEIGHT, 10, (10.1, 10.1, 10.51), [2]),
        (WEIGHT, 10, (10.1, 10.1, 9.49), [2]),
        (MEAN, 1, (900, 1), []),
        (MEAN, 1, (1001, 1), [0]),
        (MEAN, 1, (1001,), []),
        (MEAN, 10, (11, 11, 900), []),
        (MEAN, 10, (10.1, 10.1, 120), [2]),
    ],
)
def test_a_size_or_change_far_beyond_the_others_is_refused(name, server, values, refused):
    """Clients whose tensor holds these values; the server's holds `server`."""
    replies = {
        k: Message({name: torch.tensor([value, -value], dtype=torch.float32)}, {"samples": 1.0})
        for k, value in enumerate(values)
    }
    before = Message({name: torch.tensor([server, -server], dtype=torch.float32)})
    assert list(refusals(before, replies, Asked({k: {name: (2,)} for k in replies}))) == refused


def test_who_has_more_images_may_change_more_and_a_single_entry_is_seen():
    before = Message({WEIGHT: torch.ones(100), MEAN: torch.ones(2)})
    asked = Asked({k: {WEIGHT: (100,), MEAN: (2,)} for k in range(3)})

    def refused(change, samples=10.0, entries=100):
        replies = {}
        for k, moved in enumerate((0.1, 0.1, change)):
            tensor = torch.ones(100)
            tensor[: entries if k == 2 else 100] += moved
            replies[k] = Message({WEIGHT: tensor, MEAN: torch.ones(2)}, {"samples": samples if k == 2 else 10.0})
        return list(refusals(before, replies, asked))

    assert refused(0.9) == [2]
    assert refused(0.9, samples=20.0) == []
    assert refused(2.9, entries=1) == []  # its root mean square is 0.29
    assert refused(3.1, entries=1) == [2]


@pytest.mark.parametrize(
    ("bad", "times", "images", "counted", "named", "refused"),
    [
        ("online", -1.9, 10, -1.9, False, False),
        ("online", -4.9, 10, -1.0, True, False),
        ("online", -5.1, 10, -1.0, True, True),
        ("online", 5.9, 30, 5.9, False, False),  # three times the steps
        ("target", -4.9, 10, -1.0, True, False),
        ("target", -29.0, 10, -1.0, True, False),  # less than the online network's
        ("target", 17.0, 30, 17.0, False, False),  # it follows the online network by more with each step
    ],
)
def test_an_update_that_is_longer_than_usual_counts_as_usual(bad, times, images, counted, named, refused):
    """One client of five; a target network changes by a thousandth of what the online one does."""
    usual = {"online": 0.01, "target": 1e-5}
    names = {network: f"{network}.encoder.weight" for network in usual}
    server = Message({name: torch.ones(100) for name in names.values()})

    def change(client: int, network: str) -> float:
        return usual[network] * (times if (client, network) == (4, bad) else 1.0)

    replies = {
        k: Message({names[n]: torch.ones(100) + change(k, n) for n in names}, {"samples": 10.0 if k < 4 else images})
        for k in range(5)
    }
    shorter, reasons = shortened(server, replies, {k: reply.numbers["samples"] for k, reply in replies.items()})
    assert [f"its {bad}.* weights have changed" in why for why in reasons.values()] == [True] * named
    assert list(reasons) == [4] * named
    for k, reply in shorter.items():
        for network, name in names.items():
            wanted = usual[network] * (counted if (k, network) == (4, bad) else 1.0)
            assert float((reply.tensors[name] - 1).mean()) == pytest.approx(wanted, rel=0.01)
    asked = Asked({k: dict.fromkeys(names.values(), (100,)) for k in replies})
    assert list(refusals(server, replies, asked)) == [4] * refused


def state_at(value: float) -> Message:
    return Message({WEIGHT: torch.full((4,), value)})


def mean_at(value: float) -> dict[int, Message]:
    """What secure aggregation gives: the answer of every client is the mean."""
    tensors = state_at(value).tensors
    return {k: Message(tensors, {"samples": 1.0}) for k in range(3)}


@pytest.mark.parametrize(
    ("change", "rate", "refused"), [(4.9, 1.0, False), (5.1, 1.0, True), (90.0, 20.0, False), (110.0, 20.0, True)]
)
def test_a_secure_mean_is_compared_with_the_state_and_changes_by_more_only_at_a_higher_rate(change, rate, refused):
    """The first round of a run that goes on after its cosine has ended trains at twenty times the rate."""
    asked = Asked({k: {WEIGHT: (4,)} for k in range(3)}, rate=rate)
    assert list(refusals(state_at(1.0), mean_at(60.0), asked)) == [0, 1, 2]
    assert refusals(state_at(3.0), mean_at(60.0), asked) == {}
    before = replace(state_at(10.0), numbers=change_of_mean(state_at(9.99), mean_at(10.0), 1.0))
    reasons = refusals(before, mean_at(10.0 + 0.01 * change), asked)
    assert bool(reasons) == refused
    assert all("the clients' mean has changed the weights, after the round before" in why for why in reasons.values())


@pytest.mark.parametrize(
    ("images", "share", "capped"),
    [
        ([10] * 5, None, {}),
        ([10, 10, 10, 10, 93], None, {}),  # 0.7 of all is 93.3
        ([10, 10, 10, 10, 94], None, {4: 40 * 0.7 / 0.3}),
        ([10, 10, 10, 10, 10**9], 0.5, {4: 40.0}),
        ([10, 10**9, 10, 10**8], 0.4, {1: 40.0, 3: 40.0}),  # 40 % of 100 each
        ([10, 20, 30, 40], 0.25, {1: 10.0, 2: 10.0, 3: 10.0}),
        ([10, 20, 30, 40], 0.1, {1: 10.0, 2: 10.0, 3: 10.0}),
        ([10, 99], None, {1: 90.0}),  # two sites: 0.9
        ([7], 0.1, {}),
        ([], None, {}),
        ([10, 10**9], 1.0, {}),
    ],
)
def test_by_how_many_images_a_client_counts(images, share, capped):
    assert capped_images(dict(enumerate(images)), share) == pytest.approx(capped)


@pytest.mark.parametrize("name", ["online.norm.running_var", "online.norm.num_batches_tracked"])
def test_variances_and_counters_are_not_negative(name):
    replies = {k: Message({name: torch.tensor([3, 4 - 5 * k])}, {"samples": 1.0}) for k in (0, 1)}
    expected, server = {key: {name: (2,)} for key in replies}, Message({name: torch.tensor([1, 1])})
    assert refusals(server, replies, Asked(expected)) == {1: f"{name} holds -1, expected no negative value"}
    assert refusals(server, replies, Asked(expected, noisy=True)) == {}


@pytest.mark.parametrize(("samples", "refused"), [(10.0, []), (11.0, [1])])
def test_a_client_may_have_got_as_many_images_again_since_the_run_began(samples, refused):
    replies = {0: answer(), 1: answer(numbers={"samples": samples}), 2: answer()}
    asked = Asked(dict.fromkeys(replies, EXPECTED), samples={0: 5, 1: 5})
    assert list(refusals(SERVER, replies, asked)) == refused


@pytest.mark.parametrize(
    ("sizes", "known", "refused", "wanted"),
    [
        # the lowest of two or the majority may be hostile
        ({0: (5, 3), 1: (9, 3)}, {"images": 9}, [0], "9"),
        ({0: (5, 3), 1: (5, 3), 2: (5, 3), 3: (9, 3)}, {"images": 9}, [0, 1, 2], "9"),
        ({k: (k, 3) for k in range(5)}, {"images": range(1, 4)}, [0, 4], "1 to 3"),
    ],
)
def test_a_size_that_all_share_is_the_servers(sizes, known, refused, wanted):
    replies = {k: Message({f"r.{k}": torch.ones(size)}, {"samples": 1.0}) for k, size in sizes.items()}
    asked = Asked({k: {f"r.{k}": ("images", None)} for k in replies}, sizes=known)
    assert refusals(Message(), replies, asked) == {
        k: f"r.{k} has shape {list(sizes[k])}, expected [{wanted}, any]" for k in refused
    }


def test_the_server_forgets_the_metrics_of_the_round_before(tiny):
    method = build_federation(tiny(**KINDS["eua"])).method
    first = method.initial_state()
    near, far = first.copy(), first.copy()
    for distance, state in ((1.0, near), (2.0, far)):
        state.numbers = {"samples": 10}
        for tensor in state.tensors.values():
            if tensor.is_floating_point():
                tensor += distance
    server = method.aggregate(first, {0: near, 1: far}, 1)
    assert {"eua_weight/0", "eua_weight/1"} <= server.metrics.keys()
    server = method.aggregate(server, {0: near, 2: far}, 2)
    assert {name for name in server.metrics if "eua_weight" in name} == {"eua_weight/0", "eua_weight/2"}
    assert method.aggregate(server, {}, 3).metrics == {}


# Through the engine

KINDS = {
    "eua": {"aggregators": ["eua"], "local_update": "replace"},
    "l_dawa": {"aggregators": [{"name": "l_dawa", "plain_rounds": 0}], "local_update": "replace"},
    "trimmed_mean": {"aggregators": ["trimmed_mean"], "local_update": "replace"},
    "aligned": ALIGNED,
}
#: these average; one remembers a client's last model, the others send more than weights
RECIPES = ("fedema", "orchestra", "fedca")


def break_client(monkeypatch, index, how, rounds):
    """Client `index` answers wrongly in these rounds; `how` is told the reply. Returns the replies that it gave."""
    given = []
    real_round = Method.client_round

    def client_round(self, client, received, number):
        reply = real_round(self, client, received, number)
        if client.index == index and number in rounds:
            if number:
                with torch.no_grad():  # its model is broken as well
                    next(client.model.parameters()).fill_(math.nan)
            how(reply)
            given.append(reply)
        return reply

    monkeypatch.setattr(Method, "client_round", client_round)
    return given


def with_nan(reply):
    next(tensor for tensor in reply.tensors.values() if tensor.is_floating_point()).view(-1)[:1] = math.nan


@pytest.mark.parametrize("kind", [*KINDS, *RECIPES])
def test_a_broken_client_is_left_out_by_every_aggregator(kind, tiny, tmp_path, monkeypatch):
    """Broken in the opening round, if there is one, and in the first of two: the run ends sound."""
    given = break_client(monkeypatch, 1, with_nan, {0, 1})
    told = create_autospec(Observer, instance=True)
    recipe = small(kind) if kind in RECIPES else tiny(**KINDS[kind] | SMALL)
    directory = run(recipe, tmp_path / "a", told)
    rounds = [0, 1] if build_federation(recipe).method.opening_round else [1]
    assert len(given) == len(rounds)
    rows = directory.read_metrics()
    assert [(r, who) for r, who, metric, _ in rows if metric == "refused"] == [(r, "1") for r in rounds]
    assert [r for r, who, metric, _ in rows if (who, metric) == ("1", "loss")] == [2]
    with open(tmp_path / "a" / "refused.csv", newline="") as file:
        reasons = list(csv.DictReader(file))
    assert [(row["round"], row["client"]) for row in reasons] == [(str(r), "1") for r in rounds]
    assert told.warn.mock_calls == [
        call(f"round {row['round']}: the answer of client 1 is left out: {row['reason']}") for row in reasons
    ]
    server = directory.server_state()
    assert reasons_in(server, REFUSED) == {}  # sound in the second
    for state in (server, *(directory.client_state(k) for k in range(recipe.partition.clients))):
        assert state.tensors
        assert all(tensor.isfinite().all() for tensor in state.tensors.values())
    assert directory.client_state(1).numbers["rounds_taken"] == 1  # the other does not count


DICTIONARY = {
    "objective": {"name": "simclr", "hidden_features": 16, "output_features": 8},
    "regularizers": [{"name": "dictionary_contrast"}],
    "aggregators": [{"name": "dictionary", "samples": 8}],
}
CLUSTERS = small("orchestra").model_dump(include={"objective", "aggregators", "local_update", "augmentation"})


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        (ALIGNED, lambda t: t[:, :0], "has shape [20, 0], expected [20, 1 to 8192]"),
        (ALIGNED, lambda t: t[:, :1].expand(-1, 9000), "has shape [20, 9000], expected [20, 1 to 8192]"),
        (ALIGNED, lambda t: t.new_ones(5, 3), "has shape [5, 3], expected [20, 1 to 8192]"),
        (DICTIONARY, lambda t: t.new_ones(5, 3), "has shape [5, 3], expected [1 to 8, 8]"),
        (DICTIONARY, lambda t: 100 * t, "has a row of length 100, expected at most 1"),
        (CLUSTERS, lambda t: 100 * t, "has a row of length 100, expected at most 1"),
    ],
)
def test_what_only_one_client_sends_is_refused_where_it_cannot_be_right(kind, change, reason, tiny):
    """The state is as if the first of two clients had not answered, also where only the server knows the right size."""
    federation = build_federation(tiny(**kind | SMALL, partition={"name": "iid", "clients": 2}))
    method, server = federation.method, federation.method.initial_state()
    number = 0 if method.opening_round else 1
    replies = train_rounds(federation, number).replies[number]
    [name] = [name for name in replies[0].tensors if name.startswith(("representation", "dictionary", "local_"))]
    replies[0].tensors[name] = change(replies[0].tensors[name])
    after = method.aggregate(server, replies, number)
    assert list(reasons_in(after, REFUSED)) == [0]
    assert f"{name} {reason}" in reasons_in(after, REFUSED)[0]
    without = method.aggregate(server, {1: replies[1]}, number)
    assert all(torch.equal(tensor, without.tensors[name]) for name, tensor in after.tensors.items())


@pytest.mark.parametrize("fails", ["aggregate", "broadcast", "NaN"])
def test_an_answer_with_which_the_server_fails_is_refused_before_it_is_committed(fails, tiny, monkeypatch):
    """Client 1 of three alone makes the joining fail, or the next round's messages, or what they hold."""
    method = build_federation(tiny(**AVERAGED)).method
    server = method.initial_state()
    replies = {k: replace(server.copy(), numbers={"samples": 10}) for k in range(3)}
    names = [name for name in server.tensors if name.endswith("conv1.weight") or "blocks.0.weight" in name][:1]
    replies[1].tensors[names[0]] *= 1.5

    def is_bad(message):
        return not torch.equal(message.tensors[names[0]], server.tensors[names[0]])

    real_join, real_send = WeightedMean.aggregate, WeightedMean.broadcast

    def aggregate(self, server, answers):
        if fails == "aggregate" and any(map(is_bad, answers.values())):
            raise IndexError("no such row")
        return real_join(self, server, answers)

    def broadcast(self, state, clients, travelling):
        if fails == "broadcast" and is_bad(state):
            raise IndexError("no such row")
        if fails == "NaN" and is_bad(state):
            state = Message({name: tensor * math.nan for name, tensor in state.tensors.items()})
        return real_send(self, state, clients, travelling)

    monkeypatch.setattr(WeightedMean, "aggregate", aggregate)
    monkeypatch.setattr(WeightedMean, "broadcast", broadcast)
    after = method.aggregate(server, replies, 1)
    assert list(reasons_in(after, REFUSED)) == [1]
    assert reasons_in(after, REFUSED)[1].startswith("the server cannot go on with it: ")
    assert all(torch.equal(tensor, server.tensors[name]) for name, tensor in after.tensors.items())
    method.broadcast(after, [0, 1, 2], 2)
    with pytest.raises(UserError, match=r"0 of 1 answers are valid.*client 1: the server cannot go on with it"):
        method.aggregate(server, {1: replies[1]}, 1)
    with pytest.raises((IndexError, ValueError)):  # not one client's fault
        method.aggregate(server, {0: replies[1], 1: replies[1], 2: replies[1]}, 1)
    no_memory = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(WeightedMean, "aggregate", Mock(side_effect=[no_memory, Message()]))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        method.aggregate(server, replies, 1)


def test_a_client_that_recovers_goes_on_from_its_last_good_state(tiny, tmp_path, monkeypatch):
    """Refused in round 2 of 3: in round 3 it takes part again, with the target network that it had after round 1."""
    break_client(monkeypatch, 1, lambda reply: reply.tensors.popitem(), {2})
    directory = run(tiny(**AVERAGED | SMALL, rounds=3), tmp_path / "a")
    rows = directory.read_metrics()
    assert [(r, who) for r, who, metric, _ in rows if metric == "refused"] == [(2, "1")]
    assert {r for r, who, metric, _ in rows if metric == "loss" and who == "1"} == {1, 3}
    state = directory.client_state(1)
    assert state.numbers["rounds_taken"] == 2
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())


def test_too_few_sound_answers_end_the_run_and_the_rounds_before_are_kept(finished, tiny, tmp_path, monkeypatch):
    recipe = tiny(**AVERAGED | SMALL, guard={"minimum_answers": 3})
    reason = r"samples is 1e\+30, more than twice \d+, the client's number of images when the run began"
    with monkeypatch.context() as patch:
        break_client(patch, 2, lambda reply: reply.numbers.update(samples=1e30), {2})
        with pytest.raises(UserError, match=rf"^round 2: 2 of 3 answers are valid, .* is 3; client 2: {reason}$"):
            run(recipe, tmp_path / "a")
    assert RunDirectory.open(tmp_path / "a").checkpoint.round == 1
    ours, theirs = resume(tmp_path / "a").server_state(), RunDirectory.open(finished(recipe)).server_state()
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)
