"""model.train: what trains travels and changes, the rest stays bit for bit, and an export needs no adapters."""

import sys
from collections import OrderedDict

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from fedssl.engines import in_process
from fedssl.errors import UserError
from fedssl.evaluation.features import extract_features
from fedssl.evaluation.fine_tuning import FineTuning, fine_tuned_network
from fedssl.export.encoder_folder import export_encoder, read_encoder
from fedssl.federation import build_federation, federation_of_run
from fedssl.local_updates.fedu import encoder_weights
from fedssl.models.encoders import build_encoder
from fedssl.models.trained_part import freeze
from fedssl.randomness import seeded
from fedssl.recipe.reading import load_recipe
from fedssl.reports.cost import estimate
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, FEDU2, LW_FEDSSL
from tests.fedssl.engines.short_runs import contents, metric, stopped_before_commit
from tests.fedssl.models.test_weights import drawn
from tests.fedssl.rounds_in_memory import train_rounds

SMALL_HEADS = {"hidden_features": 16, "output_features": 8}
ORCHESTRA = {"objective": {"name": "orchestra", "clusters": 8, "memory": 16, "features": 8}, "local_update": "replace"}
CLUSTERS = {"name": "orchestra_clusters", "local_clusters": 4, "steps": 2}
#: whatever sends or receives an encoder's weights
METHODS = {
    "weighted_mean": AVERAGED | {"regularizers": ["proximal"]},
    "eua": FEDU2,
    "l_dawa": AVERAGED | {"aggregators": ["l_dawa"], "transport": "bfloat16"},
    "trimmed_mean": AVERAGED | {"aggregators": ["trimmed_mean"]},
    "fedema": AVERAGED | {"local_update": "fedema"},
    "fedu": AVERAGED | {"local_update": "fedu"},
    "personal": AVERAGED | {"local_update": "personal", "regularizers": ["distance_to_global"]},
    "orchestra": ORCHESTRA | {"aggregators": ["weighted_mean", CLUSTERS]},
    "fedca": AVERAGED
    | {"aggregators": ["weighted_mean", {"name": "base_model", "epochs": 1}]}
    | {"objective": {"name": "simclr"} | SMALL_HEADS, "regularizers": ["base_alignment"]},
}
#: by architecture and option: how the names of what trains begin, or what they contain
TRAINED = {
    ("small_convnet", "last:2"): ("blocks.6.", "blocks.7.", "blocks.9.", "blocks.10."),
    ("small_resnet10", "last:1"): ("layer4.",),
    ("small_vit", "last:1"): ("blocks.3.", "norm."),
    ("mobilenetv3_small_050", "last:1"): ("blocks.5.", "conv_head."),
    ("small_vit", "lora:2"): ("lora_A.", "lora_B."),
}
RUNS = [("small_convnet", "last:2"), ("small_vit", "lora:2")]


@pytest.fixture(scope="module")
def partly(noisy, tmp_path_factory):
    """Build the recipe of an encoder that starts from drawn weights and trains in part."""
    folder = tmp_path_factory.mktemp("weights")

    def build(architecture="small_convnet", train="last:2", **changes):
        if train.startswith("lora"):
            pytest.importorskip("peft", reason="peft is not installed")
        path = folder / f"{architecture}.safetensors"
        save_file(drawn(architecture).state_dict(), path)
        model = {"weights": str(path), "train": train}
        return noisy(**AVERAGED | {"architectures": [architecture], "model": model} | changes)

    return build


@pytest.fixture(scope="module")
def ran(partly, finished):
    """A finished run, which is only read."""
    return lambda architecture, train: RunDirectory.open(finished(partly(architecture, train)))


@pytest.mark.parametrize(("architecture", "train"), TRAINED)
def test_what_trains(architecture, train):
    if train.startswith("lora"):
        pytest.importorskip("peft", reason="peft is not installed")
    encoder = build_encoder(architecture, 1, 8)
    frozen = freeze(encoder, train, architecture, (1, 8, 8))
    trained = {name for name in encoder.state_dict() if any(text in name for text in TRAINED[architecture, train])}
    assert trained
    assert trained == encoder.state_dict().keys() - set(frozen)


@pytest.mark.parametrize(("architecture", "train"), RUNS)
def test_only_what_trains_travels_and_changes_and_a_resumed_run_is_the_same(architecture, train, ran, tmp_path):
    """Bytes down are those of the tensors named above; `fedssl cost` predicts all figures."""
    run = ran(architecture, train)
    recipe = load_recipe(run.path / "recipe.yaml")
    start, end = build_federation(recipe).method.initial_state().tensors, run.server_state().tensors
    given, texts = drawn(architecture).state_dict(), TRAINED[architecture, train]
    own = {name for name in start if any(text in name.removeprefix("online.encoder.") for text in texts)}
    trained = own | {name for name in start if not name.startswith("online.encoder.")}
    assert own < trained < start.keys() == end.keys()
    at_client = {name.removeprefix("model/"): tensor for name, tensor in run.client_state(0).tensors.items()}
    for name, tensor in end.items():
        if name not in trained:
            others = (tensor, at_client[name], at_client[name.replace("online.", "target.")])
            entry = given[name.removeprefix("online.encoder.").replace("base_layer.", "")]
            assert all(torch.equal(entry, other) for other in others), name
        elif tensor.is_floating_point():
            assert not torch.equal(tensor, start[name]), name
    sent = sum(start[name].nbytes for name in trained)
    for cost in estimate(build_federation(recipe)):
        predicted = [cost.bytes_down[0], cost.bytes_up[0], cost.flops[0], cost.step[0].memory]
        logged = [metric(run.path, kind, cost.number)["0"] for kind in ("bytes_down", "bytes_up", "flops", "memory")]
        assert predicted == logged
        assert logged[0] == sent < logged[1] < sent + 100  # and some numbers of eight bytes
    with stopped_before_commit(2):
        in_process.run(recipe, tmp_path / "stopped")
    in_process.resume(tmp_path / "stopped")
    assert contents(tmp_path / "stopped") == contents(run.path)


@pytest.mark.parametrize("method", METHODS)
def test_with_every_method_no_message_holds_what_is_frozen(method, partly):
    federation = build_federation(partly(train="last:1", **METHODS[method]))
    done = train_rounds(federation, 2)
    messages = [m for sent in (done.sent, done.replies) for of_round in sent.values() for m in of_round.values()]
    assert len(messages) >= 12
    assert "online.encoder.blocks.9.weight" in done.replies[2][0].tensors
    for name in {name for message in messages for name in message.tensors}:
        assert ".blocks." not in f".{name}" or ".blocks.9." in name or ".blocks.10." in name, name
    start, changed = federation.method.initial_state().tensors, done.server.tensors
    for name, tensor in start.items():
        if name.startswith("online.encoder.blocks.") and ".blocks.9." not in name and ".blocks.10." not in name:
            assert torch.equal(changed[name], tensor), name


def test_frozen_layers_do_not_dilute_how_far_an_encoder_moved(partly):
    """FedU's and FedEMA's divergence is a mean over tensors: of those that train."""
    federation = build_federation(partly(train="last:1", **METHODS["fedu"]))
    assert list(encoder_weights(federation.new_model(0))) == ["blocks.9.weight"]


@pytest.mark.parametrize(("architecture", "train", "client"), [(*RUNS[0], None), (*RUNS[1], None), (*RUNS[1], 1)])
def test_an_export_is_the_plain_network_with_the_same_outputs(architecture, train, client, ran, tmp_path):
    """Fine-tuned as a whole, it ends like that of the run: adapters are not beside what they adapt, nothing is kept."""
    run = ran(architecture, train)
    encoder = read_encoder(export_encoder(run.path, tmp_path / "encoder", client)).network
    assert encoder.state_dict().keys() == build_encoder(architecture, 1, 8).state_dict().keys()
    federation, images = federation_of_run(run), torch.arange(640).view(10, 1, 8, 8).to(torch.uint8)
    if client is None:
        trained = federation.method.load_global(run.server_state(), lambda: federation.new_model(None)).encoder
    else:
        trained = federation.client(client, run.client_state(client)).model.encoder
    outputs = extract_features(trained, images)
    torch.testing.assert_close(extract_features(encoder, images), outputs, rtol=0, atol=1e-5)
    assert (extract_features(drawn(architecture), images) - outputs).abs().max() > 1e-3
    labels, tuning = torch.arange(10) % 2, FineTuning(1, 5, "sgd", 0.1)
    own, plain = (
        fine_tuned_network(each, images, labels, 2, tuning, 0, torch.Generator())[0] for each in (trained, encoder)
    )
    torch.testing.assert_close(own.state_dict(), plain.state_dict(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train": "lora:4"}, "small_convnet has none that it calls as they are: train its last layers, such as model"),
        ({"train": "last:4"}, r"last:4 is for encoders of more layers, and small_convnet has 4: expected last:1 to l"),
        ({"train": "last:1", "weights": None}, r"leaves blocks\.0\.weight of small_convnet as it starts, .* at random"),
        ({"train": "last:1", "schedule": LW_FEDSSL["schedule"]}, "schedule layer_wise says itself which layers train"),
        ({"train": "lora:0"}, r"model.train: .*expected all, last:N or lora:R.*got 'lora:0'"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(changes, says, partly, noisy):
    build = (lambda **model: noisy(**AVERAGED, model=model)) if "weights" in changes else partly
    with pytest.raises(UserError, match=says):
        build_federation(build(**changes))


def test_a_stem_that_starts_at_random_is_not_frozen(noisy, tmp_path):
    with seeded(1, "resnet"):
        save_file(timm.create_model("resnet18", num_classes=0).state_dict(), tmp_path / "w.safetensors")
    model = {"weights": str(tmp_path / "w.safetensors"), "train": "last:1"}
    with pytest.warns(UserWarning, match="stem"), pytest.raises(UserError, match=r"conv1\.weight of resnet18.*large"):
        build_federation(noisy(**AVERAGED, architectures=["resnet18"], model=model))


def test_adapters_are_refused_where_they_would_not_be_called_or_there_is_no_peft(partly, monkeypatch):
    network = nn.Sequential(OrderedDict(attn=nn.Linear(4, 4)))
    network.attn.qkv = nn.Linear(4, 4)  # whose weights some networks take: adapters around it would do nothing
    with pytest.raises(UserError, match="any_vit has none that it calls as they are"):
        freeze(network, "lora:2", "any_vit", (4,))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"model.train=lora:2 needs peft .*pip install '.*\[lora\]'"):
        freeze(build_encoder("small_vit", 1, 8), "lora:2", "small_vit", (1, 8, 8))
