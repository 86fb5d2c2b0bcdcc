"""An optimiser that lives as long as the run: as one long training, stored, resumed bit for bit, refused elsewhere."""

from __future__ import annotations

import pytest
import torch

from fedssl.client import LocalRound
from fedssl.data.batches import epoch_batches
from fedssl.engines.in_process import run
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.models.precision import with_channels_last
from fedssl.recipe.reading import load_recipe
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.killed_runs import contents, killed_and_resumed
from tests.fedssl.rounds_in_memory import train_rounds

KEPT = {"local_update": {"name": "keep_own", "keep_optimizer": True}}
OPTIMIZERS = {
    "sgd": {"momentum_buffer"},
    "adam": {"step", "exp_avg", "exp_avg_sq"},
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
}


def training(optimizer, **more):
    return {"local_epochs": 1, "batch_size": 8, "optimizer": optimizer, "learning_rate": 0.01} | more


def plain_steps(federation, optimizer, rounds):
    """Client 0's weights after the same steps with one torch optimiser for all rounds."""
    method, client = federation.method, federation.client(0, Message())
    model, options = client.model, method.training
    model.train()
    rules = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    more = {"momentum": options.momentum} if optimizer == "sgd" else {}
    parameters = [p for p in model.parameters() if p.requires_grad]
    rule = rules[optimizer](parameters, lr=1.0, weight_decay=options.weight_decay, **more)
    for number in range(1, rounds + 1):
        local = LocalRound(client, Message(), number, method.seed, method.objective, method.augmentation)
        rule.param_groups[0]["lr"] = options.learning_rate * (0.5 if number == 2 else 1.0)  # cosine over two rounds
        order = local.generator("order")
        for rows in epoch_batches(len(client.images), options.batch_size, order):
            views = tuple(map(with_channels_last, local.views(client.images[rows], rows, "training")))
            rule.zero_grad()
            method.objective.step(model, views, client.labels[rows]).loss.backward()
            rule.step()
            method.objective.after_step(model)
    return model.state_dict()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_rounds_are_the_steps_of_one_optimizer_whose_state_stays_with_the_client(optimizer, tiny):
    options = training(optimizer, learning_rate_schedule="cosine")
    federation = build_federation(tiny(**KEPT, training=options))
    done = train_rounds(federation, 2)
    state = done.clients[0].tensors
    for name, expected in plain_steps(federation, optimizer, 2).items():
        torch.testing.assert_close(state[f"model/{name}"], expected, rtol=0, atol=0)
    kept = [name for name in state if name.startswith("memory/optimizer/")]
    assert {name.rpartition("/")[2] for name in kept} == OPTIMIZERS[optimizer]
    trained = sum(p.requires_grad for p in federation.new_model(0).parameters())
    assert len(kept) == trained * len(OPTIMIZERS[optimizer])
    assert all(reply.tensors == {} for replies in done.replies.values() for reply in replies.values())
    renewed = train_rounds(build_federation(tiny(training=options)), 2).clients[0].tensors
    assert not any("optimizer" in name for name in renewed)
    assert any(not torch.equal(tensor, state[name]) for name, tensor in renewed.items())


@pytest.mark.parametrize(("optimizer", "place"), [("sgd", "disk"), ("adamw", "memory")])
def test_killed_and_resumed_it_ends_alike(optimizer, place, tiny, tmp_path):
    recipe = tiny(**KEPT, rounds=3, training=training(optimizer), client_states=place)
    run(recipe, tmp_path / "straight")
    assert contents(killed_and_resumed(recipe, tmp_path / "killed")) == contents(tmp_path / "straight")


def test_where_weights_are_replaced_there_is_no_such_option(tiny):
    with pytest.raises(UserError, match=r"local_update\.keep_optimizer"):
        tiny(**AVERAGED | {"local_update": {"name": "replace", "keep_optimizer": True}})


@pytest.mark.parametrize("name", ["byol", "simclr", "simsiam", "moco_v3"])
def test_centralised_recipes_keep_it_and_their_target_network(name):
    recipe = load_recipe(f"centralised_{name}")
    assert (recipe.objective.name, recipe.partition.clients, recipe.aggregators) == (name, 1, [])
    assert recipe.local_update.keeps_optimizer
    assert not recipe.objective.fresh_target
