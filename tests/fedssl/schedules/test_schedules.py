"""Layer-wise and progressive training, and none: what trains, stays and travels, and that nobody lacks a layer."""

from collections.abc import Callable

import pytest
import torch

from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.evaluation.evaluate import evaluate_model
from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.recipe.recipe import Recipe
from fedssl.reports.cost import estimate
from fedssl.schedules.base import Plan
from fedssl.schedules.layer_wise import LayerWise
from fedssl.schedules.progressive import Progressive
from tests.fedssl.conftest import AVERAGED, LW_FEDSSL
from tests.fedssl.engines.short_runs import SMALL
from tests.fedssl.killed_runs import contents, killed_and_resumed
from tests.fedssl.rounds_in_memory import train_rounds

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def staged(tiny) -> Callable[..., Recipe]:
    """The small recipe with MoCo v3 on a network of four layers, one a stage, one round each."""

    def build(schedule: str = "layer_wise", architecture: str = "small_resnet10", **changes) -> Recipe:
        options = {"name": schedule, "rounds_per_stage": 1} | changes.pop("options", {})
        name = changes.pop("objective", "moco_v3")
        objective = {"name": name, "hidden_features": 16, "output_features": 8}
        values = AVERAGED | SMALL | {"architectures": [architecture], "objective": objective, "schedule": options}
        values |= {"rounds": 4, "training": {"local_epochs": 1, "batch_size": 10, "optimizer": "adamw"}}
        return tiny(**(values | changes))

    return build


# Plans


def test_plans_of_the_papers_setting():
    """12 layers, one a stage, 15 rounds each."""
    layer_wise = LayerWise(rounds_per_stage=15)
    assert layer_wise.plan(12, 1, 0) == layer_wise.plan(12, 15, 0) == Plan(1, 1, active=(0,))
    assert layer_wise.plan(12, 16, 0) == Plan(2, 2, active=(1,), frozen=(0,), done=1)
    four = LayerWise(layers_per_stage=4, rounds_per_stage=60)
    assert four.plan(12, 60, 0) == Plan(1, 4, active=(0, 1, 2, 3))
    assert four.plan(12, 180, 0) == Plan(3, 12, active=(8, 9, 10, 11), frozen=tuple(range(8)), done=8)
    progressive = Progressive(rounds_per_stage=15)
    assert progressive.plan(12, 180, 0) == Plan(12, 12, active=tuple(range(12)))


def test_depth_dropout_keeps_the_first_layer_and_draws_the_others_anew():
    options = {"rounds_per_stage": 15, "kept_layers": 5}
    layer_wise, progressive = LayerWise(**options), Progressive(**options)
    plans = {number: layer_wise.plan(12, number, seed=3) for number in range(1, 181)}
    for number, plan in plans.items():
        assert len(plan.frozen) == min(plan.stage - 1, 5)
        assert plan.frozen == tuple(sorted(set(plan.frozen)))
        assert set(plan.frozen) <= set(range(plan.stage - 1))
        assert plan.frozen[:1] == ((0,) if plan.stage > 1 else ())
        assert (plan.depth, plan.done, plan.active) == (plan.stage, plan.stage - 1, (plan.stage - 1,))
        assert progressive.plan(12, number, seed=3) == Plan(plan.stage, plan.stage, (*plan.frozen, *plan.active))
    last = [plans[number].frozen for number in range(166, 181)]
    assert len(set(last)) > 10
    assert {layer for frozen in last for layer in frozen} == set(range(11))
    assert layer_wise.plan(12, 180, seed=3) == plans[180]
    assert [layer_wise.plan(12, n, seed=4) for n in range(166, 181)] != [plans[n] for n in range(166, 181)]


# One run, message by message


class Exchange:
    """Rounds of a federation by hand, with every message and state kept."""

    def __init__(self, recipe: Recipe):
        self.federation: Federation = build_federation(recipe)
        self.method = self.federation.method
        self.server = self.method.initial_state()
        self.states: dict[int, Message] = {}
        self.layers = self.federation.new_model(None).encoder

    def round(self, number: int, clients: list[int], break_client: int | None = None):
        """What went down and what came up, by client."""
        down, up = self.method.broadcast(self.server, clients, number), {}
        for k in clients:
            client = self.federation.client(k, self.states.get(k, Message()))
            up[k] = self.method.client_round(client, down[k], number)
            if k != break_client:
                # the whole model, for tests to look at; what a round needs of it is in test_client_states.py
                self.states[k] = self.federation.client_state(client, self.federation.recipe.rounds)
        if break_client is not None:
            up[break_client].tensors.popitem()
        self.server = self.method.aggregate(self.server, up, number)
        return down, up

    def names(self, layers, top: int | None = None) -> set[str]:
        """Entries of some layers; with `top`, what is on top at that depth, and the heads."""
        heads = [name for name in self.server.tensors if top is not None and not name.startswith("online.encoder.")]
        return {"online.encoder." + name for name in self.layers.names(layers, top=top)}.union(heads)


@pytest.fixture(scope="module", params=[("byol", "small_resnet10"), ("simclr", "small_vit")], ids=str)
def two_stages(request, staged):
    """Two stages of two layers and two rounds: objective, architecture, and all that was sent and kept, by round."""
    objective, architecture = request.param
    options = {"layers_per_stage": 2, "rounds_per_stage": 2}
    exchange = Exchange(staged(objective=objective, architecture=architecture, options=options))
    rounds = {n: (*exchange.round(n, [0, 1]), exchange.server, dict(exchange.states)) for n in range(1, 5)}
    return objective, architecture, exchange, rounds


def test_nothing_but_the_newest_layers_and_the_heads_is_in_a_message(two_stages):
    objective, _, exchange, rounds = two_stages
    newest = {1: [0, 1], 2: [0, 1], 3: [2, 3], 4: [2, 3]}
    for number, (down, up, _, _) in rounds.items():
        wanted = exchange.names(newest[number], top=newest[number][1] + 1)
        final = exchange.names([0, 1]) if number == 3 else set()  # the stage that has just ended
        for k in (0, 1):
            assert set(up[k].tensors) == wanted
            assert set(down[k].tensors) == wanted | final
        heads = {name.split(".")[1] for name in wanted} - {"encoder"}
        assert heads == ({"projector"} if objective == "simclr" else {"projector", "predictor"})


def test_frozen_layers_and_their_buffers_do_not_change_by_a_bit(two_stages):
    """At the server, at each client, and in a client's target network."""
    objective, architecture, exchange, rounds = two_stages
    first, final = exchange.method.initial_state().tensors, rounds[2][2].tensors
    frozen = exchange.names([0, 1])
    assert any(name.endswith("running_var") for name in frozen) == (architecture == "small_resnet10")
    assert any(not torch.equal(first[name], final[name]) for name in frozen)
    for number in (3, 4):
        _, _, server, states = rounds[number]
        for name in frozen:
            assert torch.equal(server.tensors[name], final[name])
            for k in (0, 1):
                own = states[k].tensors
                assert torch.equal(own["model/" + name], final[name])
                if objective != "simclr":
                    assert torch.equal(own["model/" + name.replace("online.", "target.")], final[name])
        assert any(not torch.equal(server.tensors[n], final[n]) for n in exchange.names([2]))


def test_a_client_that_joins_late_or_whose_answer_was_refused_receives_what_it_lacks(staged):
    exchange = Exchange(staged(rounds=8, options={"rounds_per_stage": 2}))
    for number in range(1, 5):
        exchange.round(number, [0, 1])
    for number in (5, 6):  # stage 3; client 2 takes part for the first time in round 6
        down, _ = exchange.round(number, [0, 1] if number == 5 else [0, 1, 2])
    active, both = exchange.names([2], top=3), exchange.names([0, 1])
    assert set(down[0].tensors) == active
    assert set(down[2].tensors) == active | both
    missing = sum(t.numel() * t.element_size() for n, t in exchange.server.tensors.items() if n in both)
    assert down[2].num_bytes - down[0].num_bytes == missing
    for name in both:
        assert torch.equal(exchange.states[2].tensors["model/" + name], exchange.server.tensors[name])
    # client 1 misses the whole of stage 4 but for its last round, and client 0's first answer in it is refused
    exchange.round(7, [0, 2], break_client=0)
    assert "refused/0" in exchange.server.config
    down, _ = exchange.round(8, [0, 1, 2])
    for k in (0, 1):
        assert set(down[k].tensors) == exchange.names([3], top=4) | exchange.names([2])
    assert set(down[2].tensors) == exchange.names([3], top=4)


def test_the_target_network_starts_every_round_as_the_online_one(staged, monkeypatch):
    exchange = Exchange(staged(objective="byol"))
    exchange.round(1, [0])
    moved = exchange.states[0].tensors
    name = "encoder.network.conv1.weight"
    assert not torch.equal(moved["model/target." + name], moved["model/online." + name])
    started = []
    monkeypatch.setattr("fedssl.method.train_locally", lambda local, *rest: started.append(local.client.model))
    exchange.round(2, [0])
    assert torch.equal(started[0].state_dict()["target." + name], started[0].state_dict()["online." + name])


# Depth dropout


def test_a_dropped_layer_is_skipped_and_does_not_travel(staged):
    options = {"kept_layers": 1}
    exchange = Exchange(staged("progressive", architecture="small_vit", options=options))
    for number in (1, 2, 3, 4):
        before = exchange.server.tensors
        down, up = exchange.round(number, [0, 1])
        wanted = exchange.names({0, number - 1}, top=number)
        assert set(up[0].tensors) == set(down[0].tensors) == wanted
        dropped = exchange.names(range(1, number - 1))
        assert all(torch.equal(exchange.server.tensors[name], before[name]) for name in dropped)
    model = exchange.method.load_global(exchange.server, lambda: exchange.federation.new_model(None))
    assert [model.encoder.switches(layer)[0].role for layer in range(4)] == 4 * ["active"]


# Whole runs


@pytest.mark.parametrize("schedule", ["layer_wise", pytest.param("progressive", marks=pytest.mark.nightly)])
def test_killed_around_a_stages_end_and_resumed_it_ends_alike(schedule, staged, tmp_path):
    """Rounds 2 and 3 are the last of the first stage and the first of the second; two of three clients take part."""
    options, terms = {"rounds_per_stage": 2, "layers_per_stage": 2}, ["representation_alignment", "proximal"]
    recipe = staged(schedule, options=options, clients_per_round=2, regularizers=terms)
    run(recipe, tmp_path / "undisturbed")
    killed = killed_and_resumed(recipe, tmp_path / "killed", rounds=(2, 3))
    assert contents(killed) == contents(tmp_path / "undisturbed")


def test_a_run_is_evaluated_at_its_depth(tiny, tmp_path, monkeypatch):
    depths = []

    def watching(model, *arguments, **options):
        depths.append(model.encoder.depth)
        return evaluate_model(model, *arguments, **options)

    monkeypatch.setattr("fedssl.engines.rounds.evaluate_model", watching)
    run(tiny(**LW_FEDSSL | SMALL | {"evaluation": SMALL["evaluation"] | {"every": 1}}), tmp_path / "a")
    assert depths == [4, 2, 4]  # before training the untrained encoder, whole


# What does not fit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 5}, "rounds is 5, but 4 stages of schedule.rounds_per_stage 1 take 4: set rounds to that"),
        ({"options": {"layers_per_stage": 3}}, "layers_per_stage is 3, which does not divide the encoder's 4 layers"),
        ({"options": {"kept_layers": 2}}, "kept_layers leaves layers out.*use a vision transformer"),
        ({"aggregators": [], "local_update": "keep_own"}, "layer_wise sends layers.*add {name: weighted_mean}"),
        ({"local_update": "fedema"}, "local_update fedema works with a whole model.*use replace"),
        ({"architecture": "mobilenetv3_small_050"}, "MobileNetV3 cannot be cut into layers"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(changes, message, staged):
    with pytest.raises(UserError, match=message) as caught:
        build_federation(staged(**changes))
    assert "\n" not in str(caught.value)


# No training


def test_clients_and_server_keep_the_model_that_training_begins_with(tiny):
    federation = build_federation(tiny(**LW_FEDSSL | SMALL | {"schedule": "untrained"}))
    done = train_rounds(federation, 2)
    first = build_federation(tiny(**LW_FEDSSL | SMALL | {"schedule": "end_to_end"})).new_model(None).state_dict()
    for state in (done.server, *done.clients.values()):
        for name, tensor in state.tensors.items():
            if "online." in name:
                torch.testing.assert_close(tensor, first[name.removeprefix("model/")], rtol=1e-6, atol=1e-7)
    assert all(reply.metrics == {"memory": 0, "flops": 0} for reply in done.replies[1].values())
    assert [sum(cost.flops.values()) for cost in estimate(federation)] == [0, 0]
