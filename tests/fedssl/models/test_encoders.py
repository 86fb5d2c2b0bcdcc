"""The encoders: shapes, the adaptation to small images, the documented sizes, and the errors."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from timm.models.resnet import ResNet
from torch import nn

from fedssl.accounting import StepCounter
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.models import encoders
from fedssl.models.encoders import build_encoder, encoder_names, has_small_image_stem


def documented_rows():
    """The rows of the module's table: name, parameters, two multiply-add counts in millions, features."""
    for line in encoders.__doc__.splitlines():
        cells = [cell.strip("` M") for cell in line.replace(",", "").strip("| ").split("|")]
        if cells[0].startswith("small_"):
            yield cells[0], *map(float, cells[1:])


@pytest.mark.parametrize("name", [*encoder_names(), "mobilenetv3_small_050"])
def test_output_is_one_vector_an_image_with_gradients(name):
    encoder = build_encoder(name, 3, 32)
    assert all(module.training for module in encoder.modules())
    for entry, tensor in encoder.named_buffers():  # nothing is left of the images that probe the network
        assert not entry.endswith("num_batches_tracked") or int(tensor) == 0
        assert not entry.endswith("running_var") or bool((tensor == 1).all())
    output = encoder(torch.randn(3, 3, 32, 32))
    assert output.shape == (3, encoder.num_features)
    output.square().sum().backward()
    first = next(encoder.parameters())
    assert first.grad is not None
    assert first.grad.abs().max() > 0


@pytest.mark.parametrize("row", list(documented_rows()), ids=lambda row: row[0])
def test_documented_sizes_are_true(row):
    assert sorted(row[0] for row in documented_rows()) == encoder_names()
    name, parameters, small, large, features = row
    grey, colour = build_encoder(name, 1, 8), build_encoder(name, 3, 32)
    assert sum(parameter.numel() for parameter in grey.parameters()) == parameters
    assert grey.num_features == colour.num_features == features
    for encoder, image, million in ((grey, torch.zeros(1, 1, 8, 8), small), (colour, torch.zeros(1, 3, 32, 32), large)):
        counter = StepCounter(encoder)
        with counter.forward(), torch.no_grad():
            assert encoder.eval()(image).shape == (1, features)
        assert counter.flops / 2e6 == pytest.approx(million, abs=0.05)


@pytest.mark.parametrize(("side", "sides"), [(32, [16, 8, 4, 2]), (7, [4, 2, 2, 2]), (1, [1, 1, 1, 1])])
def test_convnet_halves_the_side_until_two_and_averages_over_positions(side, sides):
    encoder = build_encoder("small_convnet", 1, side).eval()
    seen = []
    for layer in encoder.blocks:
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[-1]))
    images = torch.randn(2, 1, side, side)
    features = encoder(images)
    assert seen == sides
    torch.testing.assert_close(features, encoder.blocks(images).flatten(2).mean(dim=2))


@pytest.mark.parametrize(("name", "width"), [("small_resnet10_wide", 24), ("resnet18", 64), ("test_resnet", 32)])
def test_small_images_get_a_stride_one_stem_without_pooling_and_large_ones_keep_timms(name, width):
    encoder = build_encoder(name, 3, 32)
    assert isinstance(encoder, ResNet)
    assert isinstance(encoder.conv1, nn.Conv2d)
    assert (encoder.conv1.kernel_size, encoder.conv1.stride, encoder.conv1.out_channels) == ((3, 3), (1, 1), width)
    assert isinstance(encoder.maxpool, nn.Identity)
    # The first stage sees the full image.
    seen = []
    encoder.layer1.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[-1]))
    encoder.eval()(torch.zeros(1, 3, 32, 32))
    assert seen == [32]
    if name == "resnet18":
        encoder = build_encoder(name, 3, 96)
        assert encoder.conv1.stride == (2, 2)
        assert isinstance(encoder.maxpool, nn.MaxPool2d)
    assert has_small_image_stem(build_encoder(name, 3, 32, 96)) == name.startswith("small_")  # whichever side is long
    large = build_encoder(name, 3, 32, stem="large")
    assert has_small_image_stem(large) == name.startswith("small_")
    assert has_small_image_stem(build_encoder(name, 3, 96, stem="small"))


@pytest.mark.parametrize(("name", "blocks", "start"), [("small_resnet10", 4, 1), ("resnet18", 8, 0)])
def test_residual_branches_start_full_in_small_resnets_and_at_zero_in_timms(name, blocks, start):
    norms = [module.bn2 for module in build_encoder(name, 1, 8).modules() if hasattr(module, "bn2")]
    assert len(norms) == blocks
    assert all(bool((norm.weight == start).all()) for norm in norms)


@pytest.mark.parametrize(
    ("name", "side", "patch"),
    [
        *(("vit_tiny_patch16_224", side, patch) for side, patch in ((64, 8), (28, 4), (24, 2))),
        *(("vit_tiny_patch4", 24, 4), ("vit_tiny_patch8", 24, 8)),
    ],
)
def test_vision_transformers_have_patches_for_the_images_or_as_their_name_says(name, side, patch):
    encoder = build_encoder(name, 1, side)
    assert encoder.patch_embed.patch_size == (patch, patch)
    assert encoder.patch_embed.grid_size == (side // patch, side // patch)
    assert encoder(torch.randn(2, 1, side, side)).shape == (2, 192)
    if "16" not in name:
        says = f"{name} cuts images into .* got {side + 2}: set data.image_size={side} or {side + patch}"
        with pytest.raises(UserError, match=says):
            build_encoder(name, 1, side + 2)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_an_encoder_that_lacks_memory_is_not_said_to_refuse_the_images(monkeypatch, error):
    monkeypatch.setattr("fedssl.models.encoders.probe", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"^the memory does not suffice \(.*\): free some, or use smaller networks"):
        build_encoder("resnet18", 1, 8)


@pytest.mark.parametrize(
    ("name", "channels", "side", "says"),
    [
        ("resnet81", 3, 32, "architecture: unknown name 'resnet81'; .*resnet18"),
        ("zzqq", 3, 32, "architecture: unknown name 'zzqq'; .*small_convnet"),
        ("hf_hub:timm/resnet18.a1_in1k", 3, 32, "architecture: unknown name"),  # nothing is fetched
        ("pit_ti_224", 3, 8, "architecture: timm's 'pit_ti_224' does not take 8x8 pixels"),
    ],
)
def test_what_cannot_be_built_is_one_line(name, channels, side, says):
    with pytest.raises(UserError, match=says) as caught:
        build_encoder(name, channels, side)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "side", "whole"), [("vit_tiny_patch16_224", 30, 28), ("convnext_atto", 67, 64), ("poolformer_s12", 66, 65)]
)
def test_an_image_of_which_pixels_would_be_left_out_is_an_error(name, side, whole):
    with pytest.raises(UserError, match=rf"the last {side - whole} of {side}x{side}; set data.image_size={whole},"):
        build_encoder(name, 3, side)
    encoder = build_encoder(name, 3, whole).eval()
    images = torch.zeros(1, 3, whole, whole)
    corner = images.clone()
    corner[..., -1, -1] = 10.0
    assert not torch.equal(encoder(images), encoder(corner))


def test_images_that_are_not_square_are_checked_in_both_directions(noisy, tmp_path):
    for name, height, width, says in (
        ("convnext_atto", 66, 64, r"the last 2 of 66x64; set data\.image_size=64"),
        ("convnext_atto", 64, 66, r"the last 2 of 64x66; set data\.image_size=64"),
        ("small_vit", 66, 64, "'small_vit' does not take 66x64 pixels and 1 channels"),
    ):
        np.savez(tmp_path / "wide.npz", x_train=np.zeros((24, height, width), np.uint8))
        data = {"name": "npz", "path": str(tmp_path / "wide.npz")}
        with pytest.raises(UserError, match=says):
            build_federation(noisy(architectures=[name], data=data, partition={"name": "iid", "clients": 1}))


@pytest.mark.parametrize(
    ("side", "height", "width", "stride"), [(32, 4, 4, 2), (32, 4, 3, 2), (4, 1, 1, 1), (4, 2, 3, 1)]
)
def test_the_wide_block_trains_as_a_convolution_does(side, height, width, stride):
    generator = torch.Generator().manual_seed(0)
    wide = build_encoder("small_convnet_512", 1, side).blocks[9].double()
    assert wide.stride == (stride, stride)
    images = torch.randn(5, 128, height, width, generator=generator, dtype=torch.float64, requires_grad=True)
    values = wide(images)
    expected = nn.functional.conv2d(images, wide.weight, stride=stride, padding=1)
    torch.testing.assert_close(values, expected)
    weights = torch.randn(values.shape, generator=generator, dtype=torch.float64)
    found, wanted = (torch.autograd.grad((each * weights).sum(), [images, wide.weight]) for each in (values, expected))
    torch.testing.assert_close(found, wanted)
