"""Runs with Flower's SecAgg+: the mean is the plain one, nothing else leaves, and lost clients are left out."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from fedssl.aggregators.weighted_mean import weighted_mean
from fedssl.engines.flower.registration import ConnectedClients
from fedssl.engines.flower.secure_aggregation import quantization_range
from fedssl.engines.flower.site import site_federation
from fedssl.engines.flower.site_files import load_site
from fedssl.engines.flower.wire import from_records, to_records
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.method import Method
from fedssl.recipe.reading import load_recipe
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.flower.loop_grid import (
    EQUAL,
    HUGE,
    LAYER_WISE,
    SECURE,
    WEIGHTS,
    Prepare,
    after_training,
    assert_close,
    changed,
    quantisation_error,
    weights,
    write_sites,
)


@pytest.mark.parametrize(("clients", "expected"), [(2, 2**30), (3, 2**30), (4, 2**29), (10, 2**28), (1023, 2**22)])
def test_the_sum_of_what_clients_send_stays_below_the_modulus(clients, expected):
    assert quantization_range(clients) == expected
    assert clients * expected < 2**32


def iid(clients: int) -> dict[str, Any]:
    return {"partition": {"name": "iid", "clients": clients}}


@pytest.fixture
def trained(monkeypatch) -> dict[int, dict[int, Message]]:
    """By round and client what the clients would have sent without Flower's privacy."""
    replies: dict[int, dict[int, Message]] = {}
    real = Method.client_round

    def note(method, client, received, number):
        reply = real(method, client, received, number)
        replies.setdefault(number, {})[client.index] = reply.copy()
        return reply

    monkeypatch.setattr(Method, "client_round", note)
    return replies


@pytest.fixture
def states(monkeypatch) -> list[Message]:
    """The server's state after each round, from round 0."""
    committed: list[Message] = []
    real = RunDirectory.commit

    def note(directory, number, server, *others):
        committed.append(server.copy())
        real(directory, number, server, *others)

    monkeypatch.setattr(RunDirectory, "commit", note)
    return committed


def assert_mean(state: Message, replies: dict[int, Message], *, atol: float) -> None:
    """The state's weights are the mean of what clients have trained."""
    samples = [reply.numbers["samples"] for reply in replies.values()]
    for name, tensor in next(iter(replies.values())).tensors.items():
        if tensor.is_floating_point():
            mean = weighted_mean([reply.tensors[name] for reply in replies.values()], samples)
            torch.testing.assert_close(state.tensors[name], mean, rtol=1e-6, atol=atol)


def test_at_sites_the_secure_mean_is_the_plain_one_and_nothing_else_leaves(begin, trained, finished, tiny, tmp_path):
    run = begin(write_sites(tmp_path), secure=SECURE, **WEIGHTS, rounds=1)
    assert run.go() == []
    error = quantisation_error(run.recipe)
    assert error < 1e-6
    assert run.metric("bytes_up", 1).keys() == {"0", "1", "2"}
    assert len(run.grid.stages) == 3 * 4
    answers = [reply.content for reply in run.grid.sent if "tensors" in reply.content]
    assert len(answers) == len(trained[1]) == 3
    floats = sum(t.numel() for t in trained[1][0].tensors.values() if t.is_floating_point())
    for content in answers:
        assert set(content) == {"tensors", "layout", "numbers", "config", "metrics"}
        message = from_records(content)
        assert message.numbers == {}
        assert message.metrics.keys() == {"memory", "flops"}
        [masked] = message.tensors.values()
        assert masked.shape == (1 + floats,)
        # uniform over all 2^32 integers, whose deviation is 2^32 / sqrt(12)
        assert float(masked.double().std()) == pytest.approx(2**32 / math.sqrt(12), rel=0.05)
        assert abs(float(masked.double().mean())) < 6 * 2**32 / math.sqrt(12 * floats)
    others = [reply.content for reply in run.grid.sent if "tensors" not in reply.content]
    assert {name for content in others for name in content} == {"answer", RECORD_KEY_CONFIGS}
    assert [dict(content["answer"]) for content in others if "answer" in content] == [{"images": 0}] * 3
    assert_close(finished(tiny(**WEIGHTS, rounds=1)), run.path, atol=error)


def test_of_layers_that_travel_by_round_each_round_has_the_mean(begin, trained, states):
    run = begin(secure=SECURE, **LAYER_WISE)
    assert run.go() == []
    assert len(states) == 1 + run.recipe.rounds
    for number, state in enumerate(states[1:], start=1):
        assert_mean(state, trained[number], atol=quantisation_error(run.recipe))
        for name, tensor in trained[number][0].tensors.items():
            assert tensor.is_floating_point() or torch.equal(state.tensors[name], states[0].tensors[name])
    held = {f"schedule/held/{k}": 2.0 for k in range(3)}
    assert held.items() <= states[-1].numbers.items()


def test_the_servers_noise_is_added_to_the_secure_mean(begin, finished, tiny):
    run = begin(dp=HUGE | {"noise_multiplier": 3e-13}, secure=SECURE, **EQUAL, rounds=1)
    assert run.go() == []
    plain, noisy = weights(finished(tiny(**EQUAL, rounds=1))), weights(run.path)
    noise = torch.cat([(noisy[name] - t).flatten() for name, t in plain.items() if "running_var" not in name])
    assert float(noise.std()) == pytest.approx(3e-13 * 1e9 / 3, rel=0.06)


def test_lost_clients_are_left_out_of_the_mean_unless_their_weights_came(begin, trained, states):
    """Client 1 is lost in another stage of each round; in round 4 two others are lost too."""
    lost = {1: Stage.SETUP, 2: Stage.SHARE_KEYS, 3: Stage.COLLECT_MASKED_VECTORS, 4: Stage.UNMASK, 5: Stage.UNMASK}
    run = begin(secure=SECURE, **WEIGHTS | iid(4), rounds=5)
    run.grid.loses = lambda node, stage, number: (
        stage == lost[int(number)] and node in ((12, 13, 14) if number == "4" else (12,))
    )
    warnings = run.go()
    assert warnings[:3] == [f"round {number}: client 1 is left out: no answer within 100 s" for number in (1, 2, 3)]
    for number in (1, 2, 3):
        assert trained[number].keys() == {0, 2, 3}
        assert run.metric("missing", number) == {"1": 1.0}
    # with too few left a round changes nothing, and the next one goes on
    assert warnings[3] == "round 4: client 0 is left out: too few clients are left for secure aggregation"
    assert [warning.partition(": ")[0] for warning in warnings[3:]] == ["round 4"] * 4
    assert states[4].tensors.keys() == states[3].tensors.keys()
    assert all(torch.equal(tensor, states[3].tensors[name]) for name, tensor in states[4].tensors.items())
    assert trained[5].keys() == {0, 1, 2, 3}
    for number in (1, 2, 3, 5):
        assert_mean(states[number], trained[number], atol=quantisation_error(run.recipe))
    assert [run.directory.client_rounds.get(k) for k in range(4)] == [5, 5, 5, 5]


def first_weight(value: float) -> Prepare:
    """Client 1 trains a weight of this value."""

    def change(reply: Message) -> None:
        next(iter(reply.tensors.values())).view(-1)[0] = value

    return after_training(change)


def shorten(content: RecordDict) -> None:
    if "tensors" in content:
        content.update(to_records(Message({"masked": torch.zeros(5, dtype=torch.int32)})))


def configs_with(stage_key: str, change: Callable[[Any], Any]) -> Prepare:
    """Client 1's answer in the stage that has this key."""

    def alter(content: RecordDict) -> None:
        configs = content.get(RECORD_KEY_CONFIGS, {})
        if stage_key in configs:
            configs[stage_key] = change(configs[stage_key])

    return changed(alter)


#: by round; in each client 1 alone is left out, and the mean is that of the other four
BAD_STAGES: dict[int, tuple[Prepare, str]] = {
    1: (configs_with(Key.PUBLIC_KEY_1, lambda key: b"garbage"), "stage setup of the secure aggregation is invalid"),
    2: (configs_with(Key.PUBLIC_KEY_2, lambda key: 7), "stage setup of the secure aggregation is invalid"),
    3: (configs_with(Key.CIPHERTEXT_LIST, lambda data: data[1:]), "stage share_keys of the secure aggregation is inv"),
    4: (configs_with(Key.DESTINATION_LIST, lambda nodes: [7, *nodes[1:]]), "stage share_keys of the secure"),
    5: (configs_with(Key.SHARE_LIST, lambda shares: [b""] * len(shares)), "stage unmask of the secure aggregation is"),
    6: (configs_with(Key.NODE_ID_LIST, lambda nodes: nodes[1:]), "stage unmask of the secure aggregation is invalid"),
    7: (configs_with(Key.DESTINATION_LIST, lambda nodes: list(map(str, nodes))), "stage share_keys of the secure"),
    8: (configs_with(Key.NODE_ID_LIST, lambda nodes: list(map(str, nodes))), "stage unmask of the secure aggregation"),
    9: (
        first_weight(65.0),
        r"holds a value beyond flower.secure_aggregation.clipping_range \(64\): raise that option",
    ),
    10: (first_weight(float("nan")), "not finite"),
    11: (changed(shorten), r"its masked weights are invalid: expected torch.int32 \[\d+\], got torch.int32 \[5\]$"),
}


def test_one_site_s_garbage_in_any_stage_is_its_own_fault(begin, trained, states):
    """A site that answers wrongly in the last stage is in the mean by the weights that it sent before."""
    run = begin(secure=SECURE, **WEIGHTS | iid(5), rounds=1 + len(BAD_STAGES))
    warnings = run.go({number: prepare for number, (prepare, _) in BAD_STAGES.items()})
    for warning, (number, (_, reason)) in zip(warnings, BAD_STAGES.items(), strict=True):
        assert re.search(f"^round {number}: client 1 is left out: .*{reason}", warning)
        counted = {k: reply for k, reply in trained[number].items() if k != 1 or number in (5, 6, 8)}
        assert_mean(states[number], counted, atol=2 * quantisation_error(run.recipe))


@pytest.mark.parametrize(
    ("privacy", "stage", "asked"),
    [
        ({"name": "fixed_clipping", "noise_multiplier": 0}, 5, [0, 1, 2, 3, 4]),
        ({"name": "local_dp", "epsilon": 0.5, "delta": 1e-5}, 1, [0, 2, 3, 4]),
    ],
    ids=["in the mean", "never asked"],
)
def test_of_a_client_every_update_counts_that_left_it_or_is_in_a_mean(privacy, stage, asked, begin):
    run = begin(dp=privacy | {"clipping_norm": 1e-3}, secure=SECURE, **WEIGHTS | iid(5), rounds=1)
    [warning] = run.go({1: BAD_STAGES[stage][0]})
    assert warning.startswith("round 1: client 1 is left out: ")
    spent = json.loads((run.path / "privacy_spent.json").read_text())
    assert spent == {"round": 1, "asked": asked, "earlier": {}}


@pytest.mark.parametrize(
    "garbage",
    [
        configs_with(Key.CIPHERTEXT_LIST, lambda data: [b"garbage"] * len(data)),
        configs_with(Key.SHARE_LIST, lambda shares: [one[:20] + bytes([one[20] ^ 1]) + one[21:] for one in shares]),
    ],
    ids=["unreadable key shares", "wrong shares of keys"],
)
def test_shares_of_keys_that_are_garbage_leave_a_round_without_a_mean(garbage, begin, trained, states):
    """Nobody can tell whose they are: the round changes nothing, and the next one goes on."""
    run = begin(secure=SECURE, **WEIGHTS | iid(5), rounds=2)
    assert len(run.go({1: garbage})) == 5
    assert all(torch.equal(tensor, states[0].tensors[name]) for name, tensor in states[1].tensors.items())
    assert_mean(states[2], trained[2], atol=quantisation_error(run.recipe))


def all_60(reply: Message) -> None:
    reply.tensors = {n: t * 0 + 60 if t.is_floating_point() else t for n, t in reply.tensors.items()}


def turned_round(reply: Message) -> None:
    """The weights have the size of honest ones, and their mean moves much further than the one before."""
    weights = [name for name, t in reply.tensors.items() if t.is_floating_point() and "running" not in name]
    reply.tensors |= {name: -2 * reply.tensors[name] for name in weights}


@pytest.mark.parametrize(
    ("fault", "told"),
    [(all_60, r"online\S+ holds, .*far above"), (turned_round, "under secure aggregation the clients' mean")],
)
def test_weights_that_spoil_the_mean_end_the_run_before_it_is_committed(fault, told, begin):
    run = begin(secure=SECURE, **WEIGHTS)
    with pytest.raises(UserError, match=f"round 2: 0 of 3 answers are valid.*client 0: {told}"):
        run.go({2: after_training(fault, client=2)})
    assert RunDirectory.open(run.path).checkpoint.round == 1


@pytest.mark.parametrize(("rounds", "lost", "committed"), [(4, (2, 3), 2), (2, (2,), 1)])
def test_two_rounds_without_an_answer_or_the_last_end_the_run(rounds, lost, committed, begin):
    run = begin(secure=SECURE, **WEIGHTS, rounds=rounds)
    run.grid.loses = lambda node, stage, number: int(number) in lost
    with pytest.raises(UserError, match=f"round {lost[-1]}: 0 of 3 clients answered, .* client 0: no answer within"):
        run.go()
    assert RunDirectory.open(run.path).checkpoint.round == committed


def test_a_server_that_does_not_ask_for_masks_gets_nothing(begin, quick, monkeypatch):
    """Whether a client masks its weights is decided by its own copy of the recipe."""
    run = begin(secure=SECURE, **WEIGHTS, rounds=1)
    run.recipe = quick(**WEIGHTS, rounds=1)  # the server's
    monkeypatch.setattr(ConnectedClients, "_images_fault", lambda *arguments: None)  # private sites state no images
    with pytest.raises(UserError, match=r"round 1: 0 of 3 clients answered, .* is 1; client 0: "):
        run.go()
    assert not any("tensors" in reply.content for reply in run.grid.sent if reply.has_content())


# Which recipes SecAgg+ and differential privacy work with, and which options are refused


TAKEN = ["fedbyol", "feddecorr", "fedema", "fedmoco_v3", "fedsimclr", "fedsimsiam", "fedu", "fedu2_without_eua"]
TAKEN += ["fedx", "lw_fedssl", "prog_fedssl", "supervised_fedavg"]
OWN_RULE = {"fedu2": "eua", "fedu2_without_fur": "eua", "fedu2_released": "eua", "l_dawa": "l_dawa"}
NO_WEIGHTS = {
    "hetero_ssfl": r"aggregators.0 representation_mean chooses itself what clients send",
    "fedca": r"aggregators.1 dictionary chooses itself what clients send",
    "orchestra": r"aggregators.1 orchestra_clusters chooses itself what clients send",
    "local_only": r"aggregators \[\] exchange none",
}
OPTIONS = {
    "local_dp": ["flower.differential_privacy={name: local_dp, clipping_norm: 1, epsilon: 0.5, delta: 1.0e-5}"],
    "fixed_clipping": ["flower.differential_privacy={name: fixed_clipping, clipping_norm: 1, noise_multiplier: 1}"],
    "secagg_plus": ["flower.secure_aggregation={name: secagg_plus}"],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_which_recipes_take_it(option):
    """Those that average weights; those with a rule of their own take local noise alone."""
    key = "secure_aggregation" if option == "secagg_plus" else "differential_privacy"
    refused = {name: f"works on .*{why}" for name, why in NO_WEIGHTS.items()}
    if option != "local_dp":
        told = r"does not go with aggregators\.0 {}, which looks at each"
        refused |= {name: told.format(rule) for name, rule in OWN_RULE.items()}
    for name in (*TAKEN, *OWN_RULE, *NO_WEIGHTS):
        overrides = ["engine=flower", *OPTIONS[option]]
        if name in refused:
            with pytest.raises(UserError, match=rf"flower\.{key} {option} {refused[name]}"):
                load_recipe(name, overrides)
        else:
            load_recipe(name, overrides)


@pytest.mark.parametrize("option", OPTIONS)
def test_it_goes_neither_with_the_engine_in_this_process_nor_with_rounded_weights(option):
    with pytest.raises(UserError, match=rf"{option} is Flower's: use engine=flower-simulation or engine=flower"):
        load_recipe("fedbyol", OPTIONS[option])
    with pytest.raises(UserError, match=rf"transport bfloat16 does not go with flower\.\w+ {option}: .* use transport"):
        load_recipe("fedbyol", ["engine=flower", "transport=bfloat16", *OPTIONS[option]])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["differential_privacy={name: local_dp, clipping_norm: 1, epsilon: 0, delta: 1.0e-5}"], "epsilon: .*got 0"),
        (["differential_privacy={name: local_dp, clipping_norm: 1, epsilon: 1, delta: 2}"], "delta: .*less than 1"),
        (["epsilon_budget=3"], "epsilon_budget limits what flower.differential_privacy spends, which is off"),
        (["secure_aggregation={name: secagg_plus, num_shares: 4}"], "needs an odd num_shares, it is 4"),
        (["secure_aggregation={name: secagg_plus}", "clients_per_round=1"], "needs 2 to 1023 clients a round, there"),
    ],
)
def test_wrong_options(overrides, expected):
    option, *others = overrides
    with pytest.raises(UserError, match=expected):
        load_recipe("fedbyol", ["engine=flower", f"flower.{option}", *others])


def test_a_client_with_more_images_than_max_weight_is_told(tiny, tmp_path):
    values = AVERAGED | {"engine": "flower", "flower": {"secure_aggregation": SECURE | {"max_weight": 30}}}
    with pytest.raises(UserError, match=r"client \d has more images than flower.secure_aggregation.max_weight 30"):
        build_federation(tiny(**values))
    sites = write_sites(tmp_path, 1, data={"name": "digits", "train_limit": 40, "public_holdout": 0})
    recipe = tiny(**values | {"partition": {"name": "sites", "clients": 3}})
    with pytest.raises(UserError, match="client 0 has more images") as caught:
        site_federation(recipe, load_site(sites[0]), 0)
    assert "40" not in str(caught.value)  # the line leaves the site
