"""A model's heads and target network; encoders cut into layers: the cut changes nothing, and roles do what they say."""

import copy

import pytest
import torch
from torch import nn

from fedssl.errors import UserError
from fedssl.models.encoders import build_encoder
from fedssl.models.model import mlp_head
from fedssl.models.stages import StagedEncoder
from tests.fedssl.small_models import FIRST_TWO, flat_model, scalar_model

INITIALS = {"L": nn.Linear, "B": nn.BatchNorm1d, "R": nn.ReLU}


@pytest.mark.parametrize(
    ("options", "layers", "sizes", "biases"),
    [
        ({}, "LBRL", [(6, 10), (10, 4)], [False, True]),
        ({"layers": 1}, "L", [(6, 4)], [True]),
        ({"layers": 3, "last_batch_norm": True}, "LBRLBRLB", [(6, 10), (10, 10), (10, 4)], [False] * 3),  # SimSiam's
        ({"layers": 3, "batch_norm": False}, "LRLRL", [(6, 10), (10, 10), (10, 4)], [True] * 3),
    ],
)
def test_the_layers_of_a_head(options, layers, sizes, biases):
    head = mlp_head(6, 10, 4, **options)
    linear = [layer for layer in head if isinstance(layer, nn.Linear)]
    assert [type(layer) for layer in head] == [INITIALS[initial] for initial in layers]
    assert [(layer.in_features, layer.out_features) for layer in linear] == sizes
    assert [layer.bias is not None for layer in linear] == biases
    output = head(torch.randn(64, 6))
    assert output.shape == (64, 4)
    if "last_batch_norm" in options:  # for standardised outputs
        assert head[-1].affine is False
        torch.testing.assert_close(output.mean(dim=0), torch.zeros(4), atol=1e-5, rtol=0)
        torch.testing.assert_close(output.var(dim=0, correction=0), torch.ones(4), atol=1e-2, rtol=0)


def test_images_are_represented_by_the_encoder_or_the_whole_online_network():
    model, images = flat_model(FIRST_TWO, predictor=((0.0, 1.0), (2.0, 0.0))), torch.arange(4.0).view(1, 1, 2, 2)
    assert [model.represent(images, layer).tolist() for layer in ("encoder", "predictor")] == [[[0, 1, 2, 3]], [[1, 0]]]


def test_what_trains_moves_by_its_share():
    model = scalar_model()  # whose target's weights are 0
    for parameter in model.online.parameters():
        torch.nn.init.ones_(parameter)
    model.update_target(0.75)
    model.encoder.requires_grad_(False)
    model.update_target(0.75)
    model.update_target(0.5)
    assert model.target["encoder"][0].weight.item() == 0.25
    assert model.target["projector"].weight.item() == 1 - 0.75 * 0.75 * 0.5


# Encoders cut into layers

#: name, layers, side, names that go with the first layer beside those of its block, names on top at depth 1
CUTS = [
    ("small_vit", 4, 8, {"cls_token", "pos_embed", "patch_embed"}, {"norm"}),
    ("test_vit3", 9, 32, {"reg_token", "pos_embed", "patch_embed"}, {"norm", "attn_pool"}),
    ("small_resnet10", 4, 8, {"conv1", "bn1"}, {"reshape"}),
    ("test_resnet", 4, 32, {"conv1", "bn1"}, {"reshape"}),
    ("small_convnet", 4, 8, set(), {"reshape"}),
]


def staged(name: str, side: int = 8) -> StagedEncoder:
    torch.manual_seed(0)
    return StagedEncoder(build_encoder(name, 1, side))


def images(side: int = 8, count: int = 3) -> torch.Tensor:
    return torch.randn(count, 1, side, side, generator=torch.Generator().manual_seed(1))


def first_parts(names: list[str]) -> set[str]:
    return {"reshape" if name.startswith("reshape.") else name.split(".")[1] for name in names}


@pytest.mark.parametrize(("name", "layers", "side", "bottom", "top"), CUTS)
def test_an_encoder_of_each_family_is_cut(name, layers, side, bottom, top):
    """Whole it computes what it computed uncut; at each depth it has full width, and its newest layer alone learns."""
    torch.manual_seed(0)
    encoder = build_encoder(name, 1, side)
    cut = StagedEncoder(copy.deepcopy(encoder))
    assert cut.layers == cut.depth == layers
    assert cut.num_features == encoder.num_features
    assert torch.equal(cut.eval()(images(side)), encoder.eval()(images(side)))
    # every entry belongs to one layer or to the top
    by_layer = [cut.names([layer]) for layer in range(layers)]
    everything = [n for names in by_layer for n in names] + cut.names([], top=layers)
    assert sorted(everything) == sorted(n for n in cut.state_dict() if not n.startswith("reshape."))
    blocks = {"blocks"} if "layer1" not in dict(cut.network.named_children()) else {"layer1"}
    assert first_parts(by_layer[0]) == bottom | blocks
    assert first_parts(cut.names([], top=1)) == top
    assert all(len(names) > 0 for names in by_layer)
    cut.train()
    parameters = dict(cut.named_parameters())
    for depth in range(1, layers + 1):
        cut.use(active=[depth - 1], frozen=range(depth - 1))
        cut.zero_grad(set_to_none=True)
        output = cut(images(side))
        assert output.shape == (3, cut.num_features)
        (output * torch.arange(float(cut.num_features))).sum().backward()
        learned = {n for n, p in parameters.items() if p.grad is not None}
        assert learned == set(cut.names([depth - 1], top=depth)) & set(parameters)
        assert learned == {n for n, p in parameters.items() if p.requires_grad}


def test_at_some_depth_a_transformer_is_its_first_blocks_and_a_resnet_is_pooled_and_reshaped():
    cut = staged("small_vit")
    shorter = copy.deepcopy(cut.network)
    shorter.blocks = nn.Sequential(*(switch.module for switch in list(shorter.blocks)[:2]))
    cut.use(range(2))
    assert torch.equal(cut(images()), shorter(images()))
    cut = staged("small_resnet10").eval()
    cut.use(range(2))
    net = cut.network
    x = net.act1(net.bn1(net.conv1(images())))
    x = net.layer2.module(net.layer1.module(x)).mean(dim=(2, 3))
    assert x.shape == (3, 32)
    torch.testing.assert_close(cut(images()), x @ cut.reshape["2"].weight.T + cut.reshape["2"].bias)
    assert set(cut.reshape) == {"1", "2", "3"}  # at full depth nothing is reshaped


def test_two_networks_run_equal_frozen_layers_once_for_each_view():
    cut = staged("small_resnet10")
    target = copy.deepcopy(cut)
    calls = []
    for encoder, who in ((cut, "online"), (target, "target")):
        encoder.use(active=[2], frozen=[0, 1])
        encoder.switches(0)[0].module.register_forward_hook(lambda m, i, o, who=who: calls.append(who))
    one, two = images(), images() + 1
    alone = [target(view) for view in (one, two)]
    assert calls == ["target", "target"]
    calls.clear()
    cut.share_frozen_outputs(target)
    cut(one), cut(two)
    shared = [target(view) for view in (one, two)]
    assert calls == ["online", "online"]
    torch.testing.assert_close(shared, alone, rtol=0, atol=0)
    target(one.clone())  # other images, so they are computed
    assert calls[2:] == ["target"]
    other = copy.deepcopy(cut)  # may get other weights
    other(one)
    assert len(calls) == 4


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "xcit_nano_12_p16_224"])
def test_a_network_of_another_family_is_refused(name):
    with pytest.raises(UserError, match=r"cannot be cut into layers.*resnet18 or vit_tiny_patch16_224"):
        StagedEncoder(build_encoder(name, 3, 32))
