"""Flower's differential privacy and SecAgg+: what they do to a client's answer, and with which recipes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install .[flower]")

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from fedssl.aggregators.weighted_mean import weighted_mean
from fedssl.engine_options import FlowerOptions
from fedssl.engines import in_process
from fedssl.engines.flower import server as flower
from fedssl.engines.flower.privacy import private_answer, private_federation, quantization_range
from fedssl.engines.flower.site import load_site, site_federation
from fedssl.engines.flower.wire import from_records, to_records
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.method import Method
from fedssl.reading import load_recipe, parse_recipe
from fedssl.recipe import Recipe
from fedssl.run_directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, tiny_values
from tests.fedssl.engines.flower.test_server import FEDU2, Clock, LoopGrid, _identity, go, start, write_sites  # noqa: F401 - the fixture
from tests.fedssl.engines.test_in_process import metric

pytestmark = pytest.mark.usefixtures("one_thread")
HUGE = {"name": "fixed_clipping", "clipping_norm": 1e9, "noise_multiplier": 0}
SECURE = {"name": "secagg_plus", "max_weight": 60}
EQUAL = {"partition": {"name": "iid", "clients": 3}}  # differential privacy counts all clients the same
LAYER_WISE = AVERAGED | {
    "architectures": ["small_resnet10"],
    "objective": {"name": "moco_v3", "hidden_features": 16, "output_features": 8},
    "schedule": {"name": "layer_wise", "rounds_per_stage": 1},
    "rounds": 4,
    "training": {"local_epochs": 1, "batch_size": 20, "learning_rate": 0.001},
}
FEDEMA = AVERAGED | {"local_update": "fedema"}


# A client's answer


def answer(options: dict, received: Message, reply: Message) -> Message:
    """What leaves a client that has trained `reply` from `received`."""
    content = to_records(received)
    content["task"] = ConfigRecord({"client": 0, "round": 1})
    message = FlowerMessage(content, dst_node_id=1, message_type="train")

    def train() -> RecordDict:
        records = to_records(reply)
        records["answer"] = ConfigRecord({"client": 0, "round": 1})
        return records

    records = private_answer(FlowerOptions(**options), message, Context(0, 1, {}, RecordDict(), {}), train)
    assert dict(records["answer"]) == {"client": 0, "round": 1}
    return from_records(records)


RECEIVED = {
    "online.w": torch.tensor([[1.0, 1.0]]),
    "online.temperature": torch.tensor(2.0),
    "online.h": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
    "online.bn.num_batches_tracked": torch.tensor(3),
}
#: the update's L2 norm is sqrt(3^2 + 4^2 + 12^2) = 13
TRAINED = {
    "online.w": torch.tensor([[4.0, 5.0]]),
    "online.temperature": torch.tensor(14.0),
    "online.h": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
    "online.bn.num_batches_tracked": torch.tensor(10),
}


@pytest.mark.parametrize(("clipping_norm", "factor"), [(6.5, 0.5), (13.0, 1.0), (20.0, 1.0)])
def test_an_update_is_clipped_as_a_whole(clipping_norm, factor):
    options = {"differential_privacy": HUGE | {"clipping_norm": clipping_norm}}
    # more is received than comes back, as where a schedule sends layers that are final
    received = Message(RECEIVED | {"online.final": torch.ones(2)})
    came = answer(options, received, Message(TRAINED, {"samples": 7})).tensors
    assert {name: t.dtype for name, t in came.items()} == {name: t.dtype for name, t in TRAINED.items()}
    torch.testing.assert_close(came["online.w"], torch.tensor([[1 + 3 * factor, 1 + 4 * factor]]))
    torch.testing.assert_close(came["online.temperature"], torch.tensor(2 + 12 * factor))
    assert torch.equal(came["online.h"], RECEIVED["online.h"])
    assert came["online.bn.num_batches_tracked"] == 3  # as it was sent, not as it was trained


def test_local_noise_has_the_documented_deviation_also_where_nothing_was_learnt():
    weights = {"online.w": torch.zeros(40000)}
    privacy = {"name": "local_dp", "clipping_norm": 1.0, "epsilon": 0.8, "delta": 1e-5, "sensitivity": 0.5}
    noise = answer({"differential_privacy": privacy}, Message(weights), Message(weights, {"samples": 1})).tensors
    # 0.5 * sqrt(2 ln(125000)) / 0.8; the deviation of 40000 draws is known to 0.35 per cent
    assert float(noise["online.w"].std()) == pytest.approx(3.0280, rel=0.03)
    assert abs(float(noise["online.w"].mean())) < 6 * 3.0280 / 200
    del privacy["sensitivity"]
    noise = answer({"differential_privacy": privacy}, Message(weights), Message(weights, {"samples": 1})).tensors
    assert float(noise["online.w"].std()) == pytest.approx(4 * 3.0280, rel=0.03)


def test_noise_does_not_follow_from_a_state_that_others_know():
    weights = {"online.w": torch.zeros(100)}
    privacy = {"name": "local_dp", "clipping_norm": 1.0, "epsilon": 1.0, "delta": 1e-5}
    drawn = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002 - a node's processes are forks of one
        drawn.append(answer({"differential_privacy": privacy}, Message(weights), Message(weights, {"samples": 1})))
        follows = np.random.random()  # noqa: NPY002
    assert not torch.equal(drawn[0].tensors["online.w"], drawn[1].tensors["online.w"])
    np.random.seed(0)  # noqa: NPY002
    assert follows == np.random.random()  # noqa: NPY002


def test_what_tells_of_the_images_does_not_leave():
    metrics = {"loss": 0.3, "divergence": 2.0, "memory": 5.0, "flops": 6.0}
    trained = Message(TRAINED, {"samples": 7}, metrics=metrics)
    private = answer({"differential_privacy": HUGE}, Message(RECEIVED), trained)
    assert private.numbers == {"samples": 1}
    assert private.metrics == {"memory": 5.0, "flops": 6.0}
    plain = answer({}, Message(RECEIVED), trained)
    assert plain.numbers == {"samples": 7}
    assert plain.metrics == metrics


def test_an_update_that_cannot_be_clipped_stays_where_it_is():
    broken = TRAINED | {"online.temperature": torch.tensor(float("nan"))}
    with pytest.raises(UserError, match="not finite"):
        answer({"differential_privacy": HUGE}, Message(RECEIVED), Message(broken, {"samples": 7}))
    more = TRAINED | {"representation.0": torch.ones(3)}
    with pytest.raises(UserError, match=r"clips updates, and representation\.0 came with no message"):
        answer({"differential_privacy": HUGE}, Message(RECEIVED), Message(more, {"samples": 7}))


# The server's noise


def test_the_servers_noise_is_scaled_by_the_clients_in_the_mean(tiny):
    privacy = {"name": "fixed_clipping", "clipping_norm": 0.5, "noise_multiplier": 1.2}
    recipe = tiny(**AVERAGED, **EQUAL, engine="flower", flower={"differential_privacy": privacy})
    plain = build_federation(recipe).method
    state = plain.initial_state()
    reply = Message(dict(state.tensors), {"samples": 1})
    broken = Message(dict(state.tensors), {"samples": float("nan")})
    noisy = private_federation(build_federation(recipe)).method.aggregate(state, {0: reply, 1: reply, 2: broken}, 1)
    floats = [name for name, t in state.tensors.items() if t.is_floating_point()]
    weights = [name for name in floats if not name.endswith("running_var")]
    noise = torch.cat([(noisy.tensors[name] - state.tensors[name]).flatten() for name in weights])
    assert len(noise) > 4000
    assert float(noise.std()) == pytest.approx(1.2 * 0.5 / 2, rel=0.06)
    for name, tensor in state.tensors.items():
        assert noisy.tensors[name].dtype == tensor.dtype
        if name not in floats:
            assert torch.equal(noisy.tensors[name], tensor)
        if name.endswith("running_var"):
            assert float(noisy.tensors[name].min()) >= 0
    assert noisy.config == {"refused/2": "samples is nan, expected a positive number"}


# Which recipes

WEIGHTS = ["fedbyol", "feddecorr", "fedema", "fedmoco_v3", "fedsimclr", "fedsimsiam", "fedu", "fedu2_without_eua"]
WEIGHTS += ["fedx", "lw_fedssl", "prog_fedssl", "supervised_fedavg"]
OWN_RULE = {"fedu2": "eua", "fedu2_without_fur": "eua", "fedu2_released": "mgda", "l_dawa": "l_dawa"}
NO_WEIGHTS = {
    "hetero_ssfl": r"aggregators.0 representation_mean has clients send something else",
    "fedca": r"aggregators.1 dictionary has clients send something else",
    "orchestra": r"aggregators.1 orchestra_clusters has clients send something else",
    "local_only": r"aggregators \[\] exchange none",
}
OPTIONS = {
    "local_dp": ["flower.differential_privacy={name: local_dp, clipping_norm: 1, epsilon: 0.5, delta: 1.0e-5}"],
    "fixed_clipping": ["flower.differential_privacy={name: fixed_clipping, clipping_norm: 1, noise_multiplier: 1}"],
    "secagg_plus": ["flower.secure_aggregation={name: secagg_plus}"],
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_recipes_that_average_weights_take_all(name, option):
    load_recipe(name, ["engine=flower-simulation", *OPTIONS[option]])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", OWN_RULE)
def test_recipes_with_a_rule_of_their_own_take_local_noise_alone(name, option):
    overrides = ["engine=flower", *OPTIONS[option]]
    if option == "local_dp":
        load_recipe(name, overrides)
        return
    key = "secure_aggregation" if option == "secagg_plus" else "differential_privacy"
    expected = rf"flower\.{key} {option} does not go with aggregators\.0 {OWN_RULE[name]}, which looks at each"
    with pytest.raises(UserError, match=expected) as caught:
        load_recipe(name, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_recipes_whose_clients_send_more_or_else_are_refused(name, option):
    with pytest.raises(UserError, match=rf"flower\.\w+ {option} works on .*{NO_WEIGHTS[name]}"):
        load_recipe(name, ["engine=flower", *OPTIONS[option]])


@pytest.mark.parametrize("option", OPTIONS)
def test_the_engine_in_this_process_refuses_it(option):
    with pytest.raises(UserError, match=rf"{option} is Flower's: use engine=flower-simulation or engine=flower"):
        load_recipe("fedbyol", OPTIONS[option])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("differential_privacy={name: fixed}", r"flower.differential_privacy: .*'local_dp', 'fixed_clipping'"),
        (
            "differential_privacy={name: local_dp, clipping_norm: 1, epsilon: 0, delta: 1.0e-5}",
            r"epsilon: input should be greater than 0, got 0",
        ),
        ("differential_privacy={name: local_dp, clipping_norm: 1, epsilon: 1, delta: 2}", r"delta: .*less than 1"),
        (
            "differential_privacy={name: fixed_clipping, clipping_norm: 1, noise: 1}",
            r"noise: unknown key; .*allowed here are name, clipping_norm, noise_multiplier",
        ),
        ("secure_aggregation={name: secagg}", r"secure_aggregation.name: .*'secagg_plus'"),
        ("secure_aggregation={name: secagg_plus, shares: 3}", r"shares: unknown key; .*num_shares, reconstruction"),
        ("secure_aggregation={name: secagg_plus, num_shares: 4}", r"needs an odd num_shares, it is 4"),
    ],
)
def test_wrong_options(override, expected):
    with pytest.raises(UserError, match=expected):
        load_recipe("fedbyol", ["engine=flower", f"flower.{override}"])


def test_secure_aggregation_needs_a_second_client():
    with pytest.raises(UserError, match="needs 2 to 1023 clients a round, there are 1"):
        load_recipe("fedbyol", ["engine=flower", *OPTIONS["secagg_plus"], "clients_per_round=1"])


def test_a_client_with_more_images_than_max_weight_is_told(tiny, tmp_path):
    values = AVERAGED | {"engine": "flower", "flower": {"secure_aggregation": SECURE | {"max_weight": 30}}}
    with pytest.raises(UserError, match=r"client \d has more images than flower.secure_aggregation.max_weight 30"):
        build_federation(tiny(**values))
    sites = write_sites(tmp_path, 1, data={"name": "digits", "train_limit": 40, "public_holdout": 0})
    recipe = tiny(**values | {"partition": {"name": "sites", "clients": 3}})
    with pytest.raises(UserError, match="client 0 has more images") as caught:
        site_federation(recipe, load_site(sites[0]))
    assert "40" not in str(caught.value)  # the line leaves the site


@pytest.mark.parametrize(("clients", "expected"), [(2, 2**30), (3, 2**30), (4, 2**29), (10, 2**28), (1023, 2**22)])
def test_the_sum_of_what_clients_send_stays_below_the_modulus(clients, expected):
    assert quantization_range(clients) == expected
    assert clients * expected < 2**32


# Runs


class StageGrid(LoopGrid):
    """Loses the messages of some nodes in a stage of SecAgg+, in every round or in one."""

    def __init__(self, app, configs):
        super().__init__(app, configs)
        self.loses: Callable[[int, str, str], bool] = lambda node, stage, number: False
        self.stages: list[tuple[int, str]] = []

    def push_messages(self, messages):
        names = []
        for message in messages:
            node = message.metadata.dst_node_id
            record = message.content.get(RECORD_KEY_CONFIGS)
            stage = str(record[Key.STAGE]) if record else ""
            self.stages += [(node, stage)] if stage else []
            if stage and self.loses(node, stage, message.metadata.group_id):
                names.append(f"lost {next(self.numbers)}")
            else:
                names += super().push_messages([message])
        return names


def begin(recipe: Recipe, path: Path, sites: list[Path] | None = None) -> tuple[RunDirectory, StageGrid]:
    directory, grid = start(recipe, path, sites)
    return directory, StageGrid(grid.app, grid.configs)


@pytest.fixture
def private(monkeypatch):
    """A recipe with Flower's privacy, whose server waits without waiting."""
    monkeypatch.setattr(flower, "time", Clock())

    def build(*, dp: dict | None = None, secure: dict | None = None, **changes) -> Recipe:
        options = {
            "round_seconds": 100,
            "connect_seconds": 10,
            "differential_privacy": dp,
            "secure_aggregation": secure,
        }
        return parse_recipe(tiny_values(**changes, engine="flower", flower=options))

    return build


def weights(path) -> dict[str, torch.Tensor]:
    state = RunDirectory.open(path).server_state().tensors
    return {name: t for name, t in state.items() if name.startswith("online.") and t.is_floating_point()}


def assert_close(a, b, *, atol: float) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("method", [FEDU2, FEDEMA, LAYER_WISE], ids=["fedu2", "fedema", "layers"])
def test_without_noise_and_clipping_the_run_is_the_plain_one(method, private, tiny, tmp_path):
    in_process.run(tiny(**method | EQUAL), tmp_path / "plain")
    privacy = {"name": "local_dp", "clipping_norm": 1e6, "epsilon": 1e30, "delta": 1e-5}
    recipe = private(dp=privacy, **method | EQUAL)
    assert go(recipe, *begin(recipe, tmp_path / "private")) == []
    assert_close(tmp_path / "plain", tmp_path / "private", atol=1e-6)
    start = build_federation(recipe).method.initial_state().tensors
    counters = {name: t for name, t in start.items() if not t.is_floating_point()}
    state = RunDirectory.open(tmp_path / "private").server_state().tensors
    assert counters
    assert all(torch.equal(state[name], tensor) for name, tensor in counters.items())
    assert metric(tmp_path / "private", "loss", 1) == {}


def test_a_small_clipping_norm_bounds_how_far_the_mean_moves(private, tmp_path):
    privacy = HUGE | {"clipping_norm": 0.01}
    recipe = private(dp=privacy, **AVERAGED | EQUAL, rounds=1)
    go(recipe, *begin(recipe, tmp_path / "private"))
    start = build_federation(recipe).method.initial_state().tensors
    moved = sum(float((t.double() - start[name]).square().sum()) for name, t in weights(tmp_path / "private").items())
    assert 0 < math.sqrt(moved) <= 0.01 * (1 + 1e-3)


def quantisation_error(recipe: Recipe) -> float:
    """The mean's: each client's integer is off by less than one step."""
    secure = recipe.flower.secure_aggregation
    counts = [len(rows) for rows in build_federation(recipe).client_rows]
    step = 2 * secure.clipping_range / quantization_range(len(counts))
    return len(counts) * step / (sum(counts) / secure.max_weight)


@pytest.mark.parametrize("sites", [False, True], ids=["simulated", "sites"])
def test_the_secure_mean_is_the_plain_one_to_the_quantisation_error(sites, private, tiny, tmp_path):
    in_process.run(tiny(**AVERAGED, rounds=1), tmp_path / "plain")
    recipe = private(secure=SECURE, **AVERAGED, rounds=1)
    directory, grid = begin(recipe, tmp_path / "secure", write_sites(tmp_path) if sites else None)
    assert go(recipe, directory, grid) == []
    error = quantisation_error(recipe)
    assert error < 1e-6
    assert_close(tmp_path / "plain", tmp_path / "secure", atol=error)
    assert len(grid.stages) == 3 * 4
    assert metric(tmp_path / "secure", "bytes_up", 1).keys() == {"0", "1", "2"}


@pytest.fixture
def trained(monkeypatch) -> list[Message]:
    """What the clients would have sent without Flower's privacy, in the order in which they were asked."""
    replies = []
    real = Method.client_round

    def note(method, client, *arguments):
        replies.append(real(method, client, *arguments).copy())
        return replies[-1].copy()

    monkeypatch.setattr(Method, "client_round", note)
    return replies


@pytest.mark.parametrize("method", [FEDEMA, LAYER_WISE], ids=["fedema", "layers"])
def test_in_every_round_the_server_gets_the_mean_of_what_was_trained(method, private, trained, tmp_path, monkeypatch):
    states = []
    real = RunDirectory.commit

    def note(directory, number, server, finished):
        states.append(server.copy())
        real(directory, number, server, finished)

    monkeypatch.setattr(RunDirectory, "commit", note)
    recipe = private(secure=SECURE, **method)
    assert go(recipe, *begin(recipe, tmp_path / "secure")) == []
    error = quantisation_error(recipe)
    assert len(states) == 1 + recipe.rounds
    for number, state in enumerate(states[1:], start=1):
        replies = trained[3 * number - 3 : 3 * number]
        samples = [reply.numbers["samples"] for reply in replies]
        for name, tensor in replies[0].tensors.items():
            if tensor.is_floating_point():
                mean = weighted_mean([reply.tensors[name] for reply in replies], samples)
                torch.testing.assert_close(state.tensors[name], mean, rtol=1e-6, atol=error)
            else:
                assert torch.equal(state.tensors[name], states[0].tensors[name])
    if method is LAYER_WISE:
        held = {f"schedule/held/{k}": 3.0 for k in range(3)}
        assert held.items() <= states[-1].numbers.items()


def test_local_noise_and_clipping_go_under_the_masks(private, tiny, tmp_path):
    in_process.run(tiny(**AVERAGED | EQUAL, rounds=1), tmp_path / "plain")
    recipe = private(dp=HUGE, secure=SECURE, **AVERAGED | EQUAL, rounds=1)
    assert go(recipe, *begin(recipe, tmp_path / "secure")) == []
    assert_close(tmp_path / "plain", tmp_path / "secure", atol=1e-6)
    noisy = private(dp=HUGE | {"noise_multiplier": 3e-9}, secure=SECURE, **AVERAGED | EQUAL, rounds=1)
    assert go(noisy, *begin(noisy, tmp_path / "noisy")) == []
    first, second = weights(tmp_path / "secure"), weights(tmp_path / "noisy")
    noise = torch.cat([(second[name] - t).flatten() for name, t in first.items() if "running_var" not in name])
    assert float(noise.std()) == pytest.approx(1.0, rel=0.06)


def test_what_leaves_a_client_under_secure_aggregation(private, trained, tmp_path):
    recipe = private(secure=SECURE, **AVERAGED, rounds=1)
    directory, grid = begin(recipe, tmp_path / "secure")
    go(recipe, directory, grid)
    answers = [reply.content for reply in grid.left if "tensors" in reply.content]
    assert len(answers) == len(trained) == 3
    floats = sum(t.numel() for t in trained[0].tensors.values() if t.is_floating_point())
    for content in answers:
        assert set(content) == {"tensors", "layout", "numbers", "config", "metrics", "answer"}
        message = from_records(content)
        assert message.numbers == {}
        assert message.metrics.keys() == {"memory", "flops"}
        [masked] = message.tensors.values()
        assert masked.shape == (1 + floats,)
        # uniform over all 2^32 integers, whose deviation is 2^32 / sqrt(12)
        assert float(masked.double().std()) == pytest.approx(2**32 / math.sqrt(12), rel=0.05)
        assert abs(float(masked.double().mean())) < 6 * 2**32 / math.sqrt(12 * floats)
    others = [reply.content for reply in grid.left if "tensors" not in reply.content]
    assert {name for content in others for name in content} == {"answer", "data", RECORD_KEY_CONFIGS}
    assert {dict(content["data"])["public"] for content in others if "data" in content} == {""}


@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.SHARE_KEYS, Stage.COLLECT_MASKED_VECTORS])
def test_a_client_that_is_lost_before_its_weights_came_is_left_out_of_the_mean(stage, private, tiny, tmp_path):
    four = AVERAGED | {"partition": {"name": "disjoint_classes", "clients": 4, "classes_per_client": 3}, "rounds": 1}
    plain = private(**four)
    directory, grid = begin(plain, tmp_path / "plain")
    grid.silent = {12}
    go(plain, directory, grid)
    recipe = private(secure=SECURE, **four)
    directory, grid = begin(recipe, tmp_path / "secure")
    grid.loses = lambda node, at, number: (node, at) == (12, stage)
    assert go(recipe, directory, grid) == ["round 1: client 1 is left out: no answer within 100 s"]
    assert_close(tmp_path / "plain", tmp_path / "secure", atol=quantisation_error(recipe))
    assert metric(tmp_path / "secure", "missing", 1) == {"1": 1.0}
    assert directory.client_round(1) is None
    assert directory.client_round(0) == 1


def test_a_client_that_is_lost_after_its_weights_came_counts(private, tiny, tmp_path):
    in_process.run(tiny(**AVERAGED, rounds=1), tmp_path / "plain")
    recipe = private(secure=SECURE, **AVERAGED, rounds=1)
    directory, grid = begin(recipe, tmp_path / "secure")
    grid.loses = lambda node, stage, number: (node, stage) == (12, Stage.UNMASK)
    assert go(recipe, directory, grid) == []
    assert_close(tmp_path / "plain", tmp_path / "secure", atol=quantisation_error(recipe))
    assert directory.client_round(1) == 1


def test_with_too_few_left_a_round_changes_nothing_and_the_next_one_goes_on(private, tmp_path):
    recipe = private(secure=SECURE, **AVERAGED)
    directory, grid = begin(recipe, tmp_path / "secure")
    grid.loses = lambda node, stage, number: (node, stage) in ((12, Stage.UNMASK), (13, Stage.UNMASK)) and number == "1"
    warnings = go(recipe, directory, grid)
    assert [w.split(": ", 1)[0] for w in warnings] == ["round 1"] * 3
    assert warnings[0] == "round 1: client 0 is left out: too few clients are left for secure aggregation"
    assert metric(tmp_path / "secure", "missing", 1).keys() == {"0", "1", "2"}
    assert metric(tmp_path / "secure", "missing", 2) == {}
    assert directory.client_round(0) == 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [(65.0, " is beyond flower.secure_aggregation.clipping_range 64: raise it"), (float("nan"), "not finite")],
)
def test_weights_that_the_sum_cannot_hold_are_refused_by_their_client(value, reason, private, tmp_path, monkeypatch):
    real = Method.client_round

    def spoil(method, client, *arguments):
        reply = real(method, client, *arguments)
        if client.index == 2:
            next(iter(reply.tensors.values())).view(-1)[0] = value
        return reply

    monkeypatch.setattr(Method, "client_round", spoil)
    recipe = private(secure=SECURE, **AVERAGED, rounds=1)
    directory, grid = begin(recipe, tmp_path / "secure")
    warnings = go(recipe, directory, grid)
    assert len(warnings) == 1, warnings
    warning = warnings[0]
    assert warning.startswith("round 1: client 2 is left out: ")
    assert reason in warning


def test_what_is_no_masked_vector_is_left_out(private, tmp_path):
    recipe = private(secure=SECURE, **AVERAGED, rounds=1)
    directory, grid = begin(recipe, tmp_path / "secure")

    def shorten(node, reply):
        if node == 13 and "tensors" in reply.content:
            short = to_records(Message({"masked": torch.zeros(5, dtype=torch.int32)}))
            reply.content["tensors"], reply.content["layout"] = short["tensors"], short["layout"]

    grid.tamper = shorten
    warnings = go(recipe, directory, grid)
    assert len(warnings) == 1, warnings
    warning = warnings[0]
    assert warning.startswith("round 1: client 2 is left out: expected ")
    assert "masked weights, it sent something else" in warning


def test_keys_that_are_none_do_not_end_the_run(private, tmp_path):
    recipe = private(secure=SECURE, **AVERAGED, rounds=1)
    directory, grid = begin(recipe, tmp_path / "secure")

    def spoil(node, reply):
        record = reply.content.get(RECORD_KEY_CONFIGS, {})
        if node == 13 and Key.PUBLIC_KEY_1 in record:
            del record[Key.PUBLIC_KEY_1]

    grid.tamper = spoil
    warnings = go(recipe, directory, grid)
    assert len(warnings) == 3
    assert "secure aggregation failed: KeyError" in warnings[0]


def test_a_server_that_does_not_ask_for_masks_gets_nothing(private, tmp_path, monkeypatch):
    """Whether a client masks its weights is decided by its own copy of the recipe."""
    recipe = private(secure=SECURE, **AVERAGED, rounds=1)
    directory, grid = begin(recipe, tmp_path / "secure")
    with pytest.raises(UserError, match=r"round 1: 0 of 3 clients answered, .* is 1; client 0: "):
        go(private(**AVERAGED, rounds=1), directory, grid)
    assert not any("tensors" in reply.content for reply in grid.left if reply.has_content())
