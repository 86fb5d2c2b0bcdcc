"""Layer-wise and progressive training, and none: what trains, stays and travels, and that nobody lacks a layer."""

from collections.abc import Callable, Iterable

import pytest
import torch

from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.evaluation.evaluate import evaluate_model
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.models.model import Model
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


def names(model: Model, layers: Iterable[int], top: int | None = None) -> set[str]:
    """Entries of some layers; with `top`, what is on top at that depth, and the heads."""
    heads = [f"online.{name}" for name in model.online.state_dict() if top and not name.startswith("encoder.")]
    return {f"online.encoder.{name}" for name in model.encoder.names(layers, top=top)}.union(heads)


@pytest.fixture(scope="module", params=[("byol", "small_resnet10"), ("simclr", "small_vit")], ids=str)
def two_stages(request, staged):
    """Two stages of two layers and two rounds: objective, architecture, model, and what the rounds left."""
    objective, architecture = request.param
    options = {"layers_per_stage": 2, "rounds_per_stage": 2}
    federation = build_federation(staged(objective=objective, architecture=architecture, options=options))
    return objective, architecture, federation.new_model(None), train_rounds(federation, 4, [0, 1])


def test_nothing_but_the_newest_layers_and_the_heads_is_in_a_message(two_stages):
    objective, _, model, done = two_stages
    for number, newest in ((1, [0, 1]), (2, [0, 1]), (3, [2, 3]), (4, [2, 3])):
        wanted = names(model, newest, top=newest[1] + 1)
        final = names(model, [0, 1]) if number == 3 else set()  # the stage that has just ended
        for k in (0, 1):
            assert set(done.replies[number][k].tensors) == wanted
            assert set(done.sent[number][k].tensors) == wanted | final
        heads = {name.split(".")[1] for name in wanted} - {"encoder"}
        assert heads == ({"projector"} if objective == "simclr" else {"projector", "predictor"})


def test_frozen_layers_and_their_buffers_do_not_change_by_a_bit(two_stages):
    """At the server, at each client, and in a client's target network."""
    objective, architecture, model, done = two_stages
    first, final = done.servers[1].tensors, done.servers[3].tensors
    frozen = names(model, [0, 1])
    assert any(name.endswith("running_var") for name in frozen) == (architecture == "small_resnet10")
    assert any(not torch.equal(first[name], final[name]) for name in frozen)
    for name in frozen:
        assert torch.equal(done.servers[4].tensors[name], final[name])
        assert torch.equal(done.server.tensors[name], final[name])
        for client in done.clients.values():
            assert torch.equal(client.tensors["model/" + name], final[name])
            if objective != "simclr":
                assert torch.equal(client.tensors["model/" + name.replace("online.", "target.")], final[name])
    for server in (done.servers[4], done.server):  # running statistics of what trains too
        assert not any(torch.equal(server.tensors[name], final[name]) for name in names(model, [2]))


def test_a_client_that_joins_late_or_whose_answer_was_refused_receives_what_it_lacks(staged):
    federation = build_federation(staged(rounds=8, options={"rounds_per_stage": 2}))
    method, model, server = federation.method, federation.new_model(None), federation.method.initial_state()

    def exchanged(number: int, clients: list[int], broken: int | None = None) -> dict[int, Message]:
        """What the server sends; clients answer with weights that have not changed, a broken one leaves one out."""
        nonlocal server
        sent, stage = method.broadcast(server, clients, number), (number + 1) // 2
        weights = {name: server.tensors[name] for name in names(model, [stage - 1], top=stage)}
        replies = {k: Message(dict(weights), {"samples": 13.0}) for k in clients}
        if broken is not None:
            replies[broken].tensors.popitem()
        server = method.aggregate(server, replies, number)
        return sent

    for number in range(1, 6):
        exchanged(number, [0, 1])
    down = exchanged(6, [0, 1, 2])  # in stage 3; client 2 takes part for the first time
    active, both = names(model, [2], top=3), names(model, [0, 1])
    assert set(down[0].tensors) == active
    assert set(down[2].tensors) == active | both
    missing = sum(t.numel() * t.element_size() for n, t in server.tensors.items() if n in both)
    assert down[2].num_bytes - down[0].num_bytes == missing
    # client 1 misses the whole of stage 4 but for its last round, and client 0's first answer in it is refused
    exchanged(7, [0, 2], broken=0)
    assert "refused/0" in server.config
    down = exchanged(8, [0, 1, 2])
    for k in (0, 1):
        assert set(down[k].tensors) == names(model, [3], top=4) | names(model, [2])
    assert set(down[2].tensors) == names(model, [3], top=4)


def test_the_target_network_starts_every_round_as_the_online_one(staged, monkeypatch):
    federation = build_federation(staged(objective="byol"))
    method, client = federation.method, federation.client(0, Message())
    server, state = method.initial_state(), client.model.state_dict()
    method.client_round(client, method.broadcast(server, [0], 1)[0], 1)
    name = "encoder.network.conv1.weight"
    assert not torch.equal(state["target." + name], state["online." + name])
    monkeypatch.setattr("fedssl.method.train_locally", lambda *_: None)
    method.client_round(client, method.broadcast(server, [0], 2)[0], 2)
    assert torch.equal(state["target." + name], state["online." + name])


def test_a_dropped_layer_is_skipped_and_does_not_travel(staged):
    federation = build_federation(staged("progressive", architecture="small_vit", options={"kept_layers": 1}))
    model, done = federation.new_model(None), train_rounds(federation, 4, [0, 1])
    for number in (1, 2, 3, 4):
        wanted = names(model, {0, number - 1}, top=number)
        assert set(done.replies[number][0].tensors) == set(done.sent[number][0].tensors) == wanted
        before, after = done.servers[number].tensors, done.servers[number + 1].tensors
        assert all(torch.equal(after[name], before[name]) for name in names(model, range(1, number - 1)))
    whole = federation.method.load_global(done.server, lambda: model)
    assert [whole.encoder.switches(layer)[0].role for layer in range(4)] == 4 * ["active"]


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
