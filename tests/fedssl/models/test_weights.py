"""Weights that a run starts from: what is loaded, what is left out, and what is refused by name."""

import argparse
import pickle
import re
import shutil
import warnings
import zipfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from fedssl.engines import in_process
from fedssl.errors import UserError
from fedssl.evaluation.features import extract_features
from fedssl.export.encoder_folder import export_encoder
from fedssl.federation import build_federation
from fedssl.models.encoders import build_encoder
from fedssl.models.weights import ModelOptions, digest, load_weights, read_all_weights
from fedssl.randomness import seeded
from fedssl.recipe.reading import load_recipe
from fedssl.reports.evaluation import write_evaluation
from fedssl.run_folder.directory import RunDirectory
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import AVERAGED, METHODS
from tests.fedssl.export.finished_runs import randomise

pytestmark = pytest.mark.filterwarnings("error", "ignore::pytest.PytestUnraisableExceptionWarning")


def drawn(architecture, channels=1, side=8, seed=1):
    with seeded(seed, architecture):
        encoder = build_encoder(architecture, channels, side)
    randomise(encoder.state_dict(), torch.Generator().manual_seed(seed))
    return encoder


def read(path, architecture="small_convnet", **options):
    return read_all_weights(ModelOptions(weights=str(path), **options), [architecture])[architecture]


def same(state, other):
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


def test_round_0_equals_the_end_of_the_exported_run(noisy, finished, tmp_path):
    first = finished(noisy(**AVERAGED))
    export_encoder(first, tmp_path / "encoder")
    second = noisy(**AVERAGED, model={"weights": str(tmp_path / "encoder")}, rounds=1)
    in_process.run(second, tmp_path / "second")
    before, after = read_run(tmp_path / "second"), read_run(first)
    for metric in ("knn", "linear", "effective_rank"):
        assert before.evaluated(metric, "before") == after.evaluated(metric, "after")
    assert before.evaluated("effective_rank", "after") != after.evaluated("effective_rank", "after")


def test_every_client_and_target_network_starts_from_the_weights_of_its_architecture(noisy, tmp_path):
    hetero, weights, path = METHODS["hetero_ssfl"], drawn("small_convnet").state_dict(), str(tmp_path / "a.safetensors")
    save_file(weights, path)
    started = build_federation(noisy(**hetero, model={"weights": {"small_convnet": path}}))
    plain = build_federation(noisy(**hetero))
    for k in range(3):
        model, other = started.new_model(k), plain.new_model(k)
        expected = other.encoder.state_dict() if k == 1 else weights  # client 1 has the other architecture
        assert same(model.encoder.state_dict(), expected)
        assert same(model.target["encoder"].state_dict(), expected)
        assert same(model.online["projector"].state_dict(), other.online["projector"].state_dict())
    with pytest.raises(UserError, match="architectures has small_convnet, small_convnet_wide: give a mapping such as"):
        build_federation(noisy(**hetero, model={"weights": path}))


# Which files are read


def test_the_forms_of_a_file(tmp_path):
    state = drawn("small_convnet").state_dict()
    save_file(state, tmp_path / "a.safetensors")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "recipe.yaml").touch()  # which makes no run of the folder
    torch.save(state, tmp_path / "checkpoints/b.pt")
    of_two_gpus = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"state_dict": of_two_gpus, "epoch": 3}, tmp_path / "c.pth.tar")
    for name in ("a.safetensors", "checkpoints/b.pt", "c.pth.tar"):
        assert same(read(tmp_path / name), state)
        assert digest(read(tmp_path / name)) == digest(state)


class Evil:
    def __reduce__(self):
        return print, ("code was run",)


class Settings(dict):
    """Settings of a library that is not here, as those of omegaconf and yacs."""

    def __init__(self, **values):
        super().__init__(values)
        self.frozen = True


def others_form(name, state):
    """The encoder's tensors as the code of a paper stores them, with others beside them."""
    head = {"fc.0.weight": torch.ones(2, 2), "fc.2.bias": torch.ones(2)}

    def under(prefix, tensors):
        return {f"{prefix}{key}": tensor for key, tensor in tensors.items()}

    noise = {key: tensor + 1 for key, tensor in state.items()}
    return {
        "solo-learn": {"state_dict": under("backbone.", state) | under("classifier.", head), "epoch": 3},
        "Lightning": {
            "state_dict": under("model.", state),
            "optimizer_states": [{"state": {0: torch.ones(2)}}],
            "hyper_parameters": Settings(root=Path("data"), rate=np.float64(0.1), layer=partial(torch.nn.GELU)),
            "rng": np.zeros(3),
            "harm": Evil(),
        },
        "MAE": {"model": under("encoder.", state) | under("decoder.", head)},
        "nested": {"epoch": 3, "network": {"trunk": dict(state), "head": head}},
        "DINO": {
            "student": under("module.backbone.", noise) | under("module.head.", head),
            "teacher": under("backbone.", state) | under("head.", head),
            "args": argparse.Namespace(arch="vit"),
        },
        "MoCo": {"state_dict": under("module.encoder_q.", state | head) | under("module.encoder_k.", noise | head)},
    }[name]


def test_numbered_layers_as_lightly_has_them_are_told_with_their_names(tmp_path):
    """nn.Sequential(*network.children()) numbers them; docs/own_images.md shows how they get their names back."""
    network, encoder = timm.create_model("resnet18"), build_encoder("resnet18", 3, 96)
    numbered = torch.nn.Sequential(*list(network.children())[:-1]).state_dict()
    state = {f"backbone.{name}": tensor for name, tensor in numbered.items()}
    with pytest.raises(UserError, match=r"layers are numbered, .*: name them conv1, bn1, layer1, .*, layer4 again$"):
        load_weights(encoder, state, "resnet18", "a.ckpt")
    names = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
    parts = {name.removeprefix("backbone."): tensor for name, tensor in state.items()}
    named = {names[n.partition(".")[0]] + n[1:]: tensor for n, tensor in parts.items()}
    load_weights(encoder, named, "resnet18", "a.pt")
    assert same(encoder.state_dict(), {n: t for n, t in network.state_dict().items() if not n.startswith("fc.")})


@pytest.mark.parametrize("name", ["solo-learn", "Lightning", "MAE", "nested"])
def test_the_prefix_under_which_all_of_the_encoders_names_lie_is_found_and_said(name, tmp_path, capsys):
    state, encoder = drawn("small_convnet").state_dict(), build_encoder("small_convnet", 1, 8)
    if name == "MAE":  # without BatchNorm's counters, which torch's own load_state_dict does without too
        state = {entry: tensor for entry, tensor in state.items() if "num_batches" not in entry}
    torch.save(others_form(name, state), tmp_path / "a.pt")
    with pytest.warns(UserWarning, match="the encoder's weights are those whose names begin with") as caught:
        load_weights(encoder, read(tmp_path / "a.pt"), "small_convnet", "a.pt")
    prefix = {"solo-learn": "backbone", "Lightning": "model", "MAE": "encoder", "nested": "network.trunk"}[name]
    assert f"begin with {prefix}." in str(caught[0].message)
    assert same({entry: encoder.state_dict()[entry] for entry in state}, state)
    assert "code was run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "choices", "chosen"),
    [
        ("DINO", ["student.module.backbone", "teacher.backbone"], "teacher.backbone"),
        ("MoCo", ["encoder_k", "encoder_q"], "encoder_q"),
    ],
)
def test_of_several_networks_in_a_file_one_is_chosen(name, choices, chosen, tmp_path):
    state, path = drawn("small_convnet").state_dict(), tmp_path / "a.pt"
    torch.save(others_form(name, state), path)
    encoder = build_encoder("small_convnet", 1, 8)
    says = f"{path} holds {len(choices)} networks that fit small_convnet: {', '.join(choices)}; choose one, such as "
    with pytest.raises(UserError, match=re.escape(f"{says}model.weights={path}:{choices[0]}")):
        load_weights(encoder, read(path), "small_convnet", str(path))
    weights = read(f"{path}:{chosen}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name == "MoCo" else "error")
        load_weights(encoder, weights, "small_convnet", str(path))
    assert same(encoder.state_dict(), state)
    if name == "DINO":
        with pytest.warns(UserWarning, match=r"begin with backbone\., and 2 others are left out"):
            load_weights(encoder, read(f"{path}:teacher"), "small_convnet", str(path))
    with pytest.raises(UserError, match=r"a\.pt holds no tensors whose names begin with nothing\.: it has"):
        read(f"{path}:nothing")


def test_what_is_no_weights_is_refused_and_code_in_a_file_never_run(tmp_path, capsys):
    (tmp_path / "evil.pt").write_bytes(pickle.dumps({"weight": Evil()}))
    torch.save({"weight": Evil()}, tmp_path / "evil2.pt")
    (tmp_path / "noise.safetensors").write_bytes(b"noise")
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "numbers.pt")
    torch.save({"weight": torch.eye(2).to_sparse()}, tmp_path / "sparse.pt")
    warnings.filterwarnings("ignore", "Validating sparse tensor")
    for name, says in {
        "evil.pt": r"evil\.pt cannot be read as weights",
        "evil2.pt": r"evil2\.pt holds no weights",
        "noise.safetensors": r"noise\.safetensors cannot be read as weights",
        "list.pt": r"list\.pt",
        "numbers.pt": "holds no weights; expected dense tensors by name",
        "sparse.pt": r"sparse\.pt holds no weights; expected dense tensors",
        "nothing.pt": "there is no file",
    }.items():
        with pytest.raises(UserError, match=says):
            read(tmp_path / name)
    assert "code was run" not in capsys.readouterr().out


def test_a_small_file_of_large_weights_is_refused_before_it_is_unpacked(tmp_path):
    torch.save({"weight": torch.zeros(2**22)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for entry in plain.infolist():
            bomb.writestr(entry.filename, plain.read(entry), zipfile.ZIP_DEFLATED)
    torch.save({"weight": torch.zeros(1).expand(2**40)}, tmp_path / "expanded.pt")
    torch.save({"weight": torch.zeros(4)}, tmp_path / "lies.pt")
    text = (tmp_path / "lies.pt").read_bytes()
    at = text.index(b"PK\x01\x02")  # the first entry of the zip's directory: 24 bytes on, its unpacked size
    (tmp_path / "lies.pt").write_bytes(text[: at + 24] + (2**31).to_bytes(4, "little") + text[at + 28 :])
    assert (tmp_path / "bomb.pt").stat().st_size < 2**20
    for name, says in {
        "bomb.pt": r"bomb\.pt has [\d,]+ bytes, but what it holds would take 16,7",
        "lies.pt": r"lies\.pt has .* bytes, but what it holds would take 2,147,",
        "expanded.pt": r"expanded\.pt has .* bytes, but what it holds would take 4,398,046,511,104,",
    }.items():
        with pytest.raises(UserError, match=says):
            read(tmp_path / name)


def test_a_runs_folder_and_an_export_of_another_architecture_are_refused(noisy, finished, tmp_path):
    run = finished(noisy(**AVERAGED))
    for path in (run, next((run / "checkpoints").glob("server*"))):
        with pytest.raises(UserError, match=rf"export its encoder first, with fedssl export {run} FOLDER"):
            read(path)
    folder = export_encoder(run, tmp_path / "encoder")
    with pytest.raises(UserError, match="holds the weights of small_convnet, not of small_convnet_wide: set"):
        read(folder, "small_convnet_wide")
    with pytest.raises(UserError, match="holds the weights of resnet18, not of small_convnet"):
        read("timm:resnet18.a1_in1k")


def test_timms_names(monkeypatch):
    with pytest.raises(UserError, match="timm has no model 'resnet1000'"):
        read("timm:resnet1000", "resnet1000")
    with pytest.raises(UserError, match=r"timm has no pretrained weights 'resnet18\.nothing'"):
        read("timm:resnet18.nothing", "resnet18")
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", Mock(side_effect=ConnectionError("no route to the hub")))
    message = r"timm:resnet18\.a1_in1k cannot be fetched here.*hf download timm/resnet18\.a1_in1k model\.safetensors"
    with pytest.raises(UserError, match=message) as caught:
        read("timm:resnet18.a1_in1k", "resnet18")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **rest: create(name, **rest))
    before = torch.random.get_rng_state()
    assert "layer4.1.bn2.weight" in read("timm:resnet18.a1_in1k", "resnet18")
    assert torch.equal(before, torch.random.get_rng_state())


def test_misfits_are_named_with_both_shapes_and_a_long_list_is_cut():
    state = drawn("small_convnet").state_dict()
    state["blocks.3.weight"] = torch.zeros(1, 2, 3, 3)
    del state["blocks.4.bias"]
    state["extra"] = torch.zeros(1)
    encoder = build_encoder("small_convnet", 1, 8)
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_weights(encoder, state, "small_convnet", "mine.pt")
    shapes = "blocks.3.weight has the shape [1, 2, 3, 3], expected [64, 32, 3, 3]"
    assert f"{shapes}; missing: blocks.4.bias; in no layer of the encoder: extra" in str(caught.value)
    assert same(encoder.state_dict(), before)
    with pytest.raises(UserError, match=r"missing: (\S+, ){5}and 15 more; in no layer of the encoder: fc"):
        load_weights(encoder, {"fc": torch.zeros(1)}, "small_convnet", "mine.pt")
    state = {f"net.{name}": tensor for name, tensor in before.items()} | {"net.blocks.99.weight": torch.ones(1)}
    with pytest.raises(UserError, match=r"in no layer of the encoder: blocks\.99\.weight"):  # which is no head
        load_weights(encoder, state, "small_convnet", "mine.pt")
    large, small = build_encoder("resnet18", 3, 96), build_encoder("resnet18", 3, 32)
    with pytest.raises(UserError, match=r"conv1.weight has the shape \[64, 3, 3, 3\], expected \[64, 3, 7, 7\]"):
        load_weights(large, small.state_dict(), "resnet18", "x")


def test_a_timm_checkpoint_with_its_classifier(tmp_path):
    checkpoint = timm.create_model("resnet10t", num_classes=7)
    encoder = build_encoder("resnet10t", 3, 96)
    load_weights(encoder, dict(checkpoint.state_dict()), "resnet10t", "mine.pt")
    images = torch.randn(2, 3, 96, 96)
    expected = checkpoint.eval().forward_head(checkpoint.forward_features(images), pre_logits=True)
    torch.testing.assert_close(encoder.eval()(images), expected)


@pytest.mark.parametrize(
    ("architecture", "shapes"), [("resnet18", r"\(conv1.weight \[64, 3, 7, 7\]\)"), ("resnet10t", r"\(conv1.0.weight")]
)
def test_the_stem_for_small_images_says_what_it_leaves_out(architecture, shapes):
    pretrained = timm.create_model(architecture).state_dict()
    encoder = build_encoder(architecture, 1, 32)
    stem = encoder.state_dict()["conv1.weight"].clone()
    says = f"the 3x3 stem for small images starts at random, as the weights have another stem {shapes}"
    with pytest.warns(UserWarning, match=says) as caught:
        load_weights(encoder, dict(pretrained), architecture, "mine.pt")
    assert len(caught) == 1
    assert torch.equal(encoder.state_dict()["conv1.weight"], stem)
    assert torch.equal(encoder.state_dict()["layer1.0.conv1.weight"], pretrained["layer1.0.conv1.weight"])


def test_weights_of_colour_images_see_grey_ones_as_three_equal_channels():
    colour, grey = drawn("small_convnet", channels=3), build_encoder("small_convnet", 1, 8)
    with pytest.warns(UserWarning, match="summed over the colours"):
        load_weights(grey, colour.state_dict(), "small_convnet", "mine.pt")
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    expected = extract_features(colour, images.expand(-1, 3, -1, -1))
    torch.testing.assert_close(extract_features(grey, images), expected)


# The recipe and the run's record


def test_a_path_is_seen_from_the_recipes_folder_and_an_override_from_here(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "recipes" / "mine.yaml"
    text = "{objective: byol, schedule: end_to_end, local_update: keep_own, name: mine, model: {weights: %s}}"
    file.write_text(text % "../encoder")
    assert load_recipe(file).model.weights == str(tmp_path / "encoder")
    assert load_recipe(file, ["model.weights=encoder"]).model.weights == str(tmp_path / "encoder")
    file.write_text(text % "{small_convnet: a.pt, resnet18: 'timm:resnet18.a1_in1k'}")
    weights = {"small_convnet": str(tmp_path / "recipes" / "a.pt"), "resnet18": "timm:resnet18.a1_in1k"}
    assert load_recipe(file).model.weights == weights


def test_a_run_is_not_continued_with_other_weights_but_evaluated_without_them(noisy, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(drawn("small_convnet").state_dict(), path)
    in_process.run(noisy(**AVERAGED, model={"weights": str(path)}), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    recorded = load_recipe(tmp_path / "run" / "recipe.yaml").model.digests
    assert recorded == {"small_convnet": digest(drawn("small_convnet").state_dict())}
    directory = RunDirectory.open(tmp_path / "run")
    directory.commit(1, directory.server_state(), finished=False)
    save_file(drawn("small_convnet", seed=2).state_dict(), path)
    with pytest.raises(UserError, match=r"holds other weights than those recorded in model\.digests"):
        in_process.resume(tmp_path / "run")
    path.unlink()
    with pytest.raises(UserError, match="there is no file"):
        in_process.resume(tmp_path / "run")
    assert write_evaluation(tmp_path / "whole").is_file()


def test_batch_statistics_of_weights_may_be_kept(noisy, tmp_path):
    """In online and target networks, in worker processes too; an architecture without weights trains its own."""
    save_file(drawn("small_convnet").state_dict(), tmp_path / "a.safetensors")
    model = {"weights": {"small_convnet": str(tmp_path / "a.safetensors")}, "batch_statistics": "kept"}
    architectures = ["small_convnet", "small_convnet_wide"]
    recipe = noisy(model=model, architectures=architectures, clients_parallel=2, rounds=1)
    run, federation = in_process.run(recipe, tmp_path / "run"), build_federation(recipe)
    for client, kept in ((0, True), (1, False)):
        state, start = run.client_state(client).tensors, federation.new_model(client).state_dict()
        for branch in ("online", "target"):
            names = [name for name in start if name.startswith(f"{branch}.encoder.")]
            assert names
            for name in names:
                statistics = "running_" in name or "num_batches" in name
                assert torch.equal(state[f"model/{name}"], start[name]) == (statistics and kept), (client, name)
    with pytest.raises(ValueError, match="batch_statistics=kept keeps those of weights to start from"):
        ModelOptions(batch_statistics="kept")
