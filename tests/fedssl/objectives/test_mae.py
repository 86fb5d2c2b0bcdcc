"""MAE: what the encoder sees, which patches are predicted, and the error of their pixels."""

import copy
import statistics

import pytest
import torch

from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.models.encoders import build_encoder
from fedssl.models.stages import StagedEncoder
from fedssl.objectives.mae import MAE, patches_of, reconstruction_loss, sine_cosine_positions, visible_patches
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.rounds_in_memory import train_rounds

PART = MAE(decoder_features=16, decoder_layers=2, decoder_heads=2)
IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))  # 16 patches of 4x4 pixels
VISIBLE = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:4] for i in range(3)])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return PART.build(build_encoder("small_vit", 3, 16), 2).eval()


def test_patches_are_cut_row_by_row():
    patches = patches_of(IMAGES, (4, 8))
    assert patches.shape == (3, 8, 96)
    assert torch.equal(patches[1, 5], IMAGES[1, :, 8:12, 8:16].flatten())


def test_positions_are_sines_and_cosines_of_row_and_column():
    positions = sine_cosine_positions(2, 3, 8)
    for patch, (row, column) in enumerate((r, c) for r in range(2) for c in range(3)):
        angles = torch.tensor([row, row / 100, column, column / 100], dtype=torch.float32)
        both = torch.stack([angles.sin(), angles.cos()]).view(2, 2, 2)  # function, axis, wavelength
        torch.testing.assert_close(positions[patch], both.transpose(0, 1).flatten())


@pytest.mark.parametrize("normalize", [False, True])
def test_the_error_is_the_mean_over_pixels(normalize):
    predicted, pixels = torch.randn(2, 3, 2, 5, dtype=torch.float64).unbind()
    total = 0.0
    for guess, x in zip(predicted.flatten(0, 1).tolist(), pixels.flatten(0, 1).tolist(), strict=True):
        deviation = (statistics.variance(x) + 1e-6) ** 0.5
        target = [(one - statistics.mean(x)) / deviation for one in x] if normalize else x
        total += sum((g - one) ** 2 for g, one in zip(guess, target, strict=True))
    assert float(reconstruction_loss(predicted, pixels, normalize)) == pytest.approx(total / 30, rel=1e-10)


@pytest.mark.parametrize("beside", ["timm's layers", "lightly"])
@pytest.mark.parametrize("cut", [False, True])
def test_the_encoder_sees_the_visible_patches_alone(model, beside, cut):
    network = model.encoder
    encoder = StagedEncoder(copy.deepcopy(network)) if cut else network
    with visible_patches(getattr(encoder, "network", encoder), VISIBLE) as tokens:
        pooled = encoder(IMAGES)
    if beside == "lightly":
        peers = pytest.importorskip("lightly.models.modules", reason="lightly is not installed")
        how = {"weight_initialization": "skip", "pos_embed_initialization": "skip"}
        kept = torch.cat([torch.zeros(3, 1, dtype=torch.int64), VISIBLE + 1], dim=1)  # the class token first
        expected = peers.MaskedVisionTransformerTIMM(network, **how).encode(IMAGES, idx_keep=kept)
    else:
        patches = network.patch_embed(IMAGES) + network.pos_embed[:, 1:]
        seen = torch.stack([patches[i, VISIBLE[i]] for i in range(3)])
        first = (network.cls_token + network.pos_embed[:, :1]).expand(3, -1, -1)
        expected = network.norm(network.blocks(torch.cat([first, seen], dim=1)))
    torch.testing.assert_close(tokens, [expected], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pooled, expected[:, 0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(encoder(IMAGES), pooled)  # all patches are seen again


def test_each_image_has_its_own_three_quarters_masked_and_their_pixels_are_the_target(model):
    calls = []  # what the decoder is given; it predicts 0
    model.online["decoder"].register_forward_hook(lambda m, given, out: calls.append(given) or torch.zeros_like(out))
    part = PART.model_copy(update={"normalize_pixels": False})
    torch.manual_seed(1)
    step = part.step(model, (IMAGES,), torch.zeros(3))
    [(tokens, visible, masked)] = calls
    assert (tokens.shape, visible.shape, masked.shape) == ((3, 5, 64), (3, 4), (3, 12))
    both = torch.cat([visible, masked], dim=1)
    assert torch.equal(both.sort(dim=1).values, torch.arange(16).expand(3, 16))
    assert len({tuple(row) for row in visible.sort(dim=1).values.tolist()}) == 3
    pixels = patches_of(IMAGES, (4, 4))
    expected = torch.stack([pixels[i, masked[i]] for i in range(3)]).square().mean()
    torch.testing.assert_close(step.loss, expected)
    assert torch.equal(step.representations[0], tokens[:, 0])
    part.step(model, (IMAGES,), torch.zeros(3))
    assert not torch.equal(calls[1][2], masked)


def test_the_decoder_predicts_each_patch_from_tokens_and_places(model):
    """Their order is of no importance, unlike their places."""
    decoder, tokens = model.online["decoder"], torch.randn(1, 5, 64)
    visible, masked = torch.tensor([[3, 9, 0, 12]]), torch.tensor([[1, 2, 15]])
    predicted = decoder(tokens, visible, masked)
    other = decoder(tokens[:, [0, 2, 3, 1, 4]], visible[:, [1, 2, 0, 3]], masked[:, [2, 0, 1]])
    torch.testing.assert_close(other, predicted[:, [2, 0, 1]])
    assert (decoder(tokens, visible[:, [1, 0, 2, 3]], masked) - predicted).abs().max() > 1e-4
    assert (predicted[0, 0] - predicted[0, 1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("small_resnet10", {}, "needs a vision transformer such as small_vit.*got ResNet"),
        ("small_vit", {"masked_share": 0.99}, "masked_share 0.99 leaves 0 of 16 patches visible"),
        ("small_vit", {"decoder_heads": 3}, "decoder_heads 3 must divide decoder_features 512"),
    ],
)
def test_what_it_cannot_train_is_refused(noisy, architecture, options, message):
    with pytest.raises(UserError, match=message):
        build_federation(noisy(**AVERAGED, objective={"name": "mae"} | options, architectures=[architecture]))


@pytest.mark.parametrize("name", ["layer_wise", "progressive"])
def test_the_error_falls_also_where_layers_are_added(noisy, name):
    schedule = {"name": name, "layers_per_stage": 2, "rounds_per_stage": 1}
    training = {"local_epochs": 2, "batch_size": 8, "optimizer": "adamw", "learning_rate": 0.003}
    parts = AVERAGED | {"architectures": ["small_vit"], "schedule": schedule, "training": training}
    replies = train_rounds(build_federation(noisy(**parts, objective=PART.model_dump())), 2).replies
    assert replies[2][0].metrics["loss"] < replies[1][0].metrics["loss"]
