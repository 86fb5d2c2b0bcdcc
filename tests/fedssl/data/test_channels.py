"""Images of any number of channels: what is read, how windows hold by channel, and a run on five channels."""

import imagecodecs
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from fedssl.data.datasets import load_dataset
from fedssl.data.files import list_files
from fedssl.data.image_files import image_kind, read_pixels, stored_values
from fedssl.data.image_kinds import BrokenImageError
from fedssl.data.npz import images_in
from fedssl.data.options import DataOptions
from fedssl.data.pixels import parse_window
from fedssl.data.summary import summarise
from fedssl.errors import UserError
from fedssl.export.embed import embed_images
from fedssl.export.encoder_folder import export_encoder, read_encoder
from fedssl.federation import build_federation
from fedssl.recipe.reading import load_recipe, parse_recipe
from fedssl.reports.images import thumbnails
from tests.fedssl.conftest import AVERAGED, tiny_values
from tests.fedssl.data.data_files import load_npz, random_pixels, refused, save


def values_of(dtype: str, *shape: int) -> np.ndarray:
    return (np.random.default_rng(0).random(shape) * (200 if dtype.endswith("1") else 20_000)).astype(dtype)


@pytest.mark.parametrize("dtype", ["u1", "u2", "i2", "u4", "f4"])
@pytest.mark.parametrize("place", ["pixels", "planes", "tiles"])
@pytest.mark.parametrize(
    "options", [{"byteorder": "<"}, {"byteorder": ">", "compression": "deflate", "predictor": True}]
)
def test_bands_of_a_tiff(tmp_path, dtype, place, options):
    for channels in (2, 5):
        values, file = values_of(dtype, 16, 32, channels), tmp_path / "a.tif"
        form = {"photometric": "minisblack", "tile": (16, 16) if place == "tiles" else None}
        if place == "planes":
            tifffile.imwrite(file, values.transpose(2, 0, 1), planarconfig="separate", **form, **options)
        else:
            tifffile.imwrite(file, values, planarconfig="contig", **form, **options)
        kind = image_kind(file, channels)
        assert (kind.size, kind.channels, kind.deep) == ((32, 16), channels, dtype != "u1")
        assert np.array_equal(stored_values(file, channels), values.reshape(-1, channels))


def test_pages_and_arrays_are_read_by_channel(tmp_path):
    """A window for each channel, in each kind of file; the pixels are not resized."""
    values, window = values_of("u2", 6, 6, 4), ((0.0, 20_000.0), (0.0, 10_000.0), (5_000.0, 9_000.0), (0.0, 65_535.0))
    low, high = np.array(window).T
    wanted = np.rint(np.clip((values - low) / (high - low), 0, 1) * 255).astype(np.uint8).transpose(2, 0, 1)
    pages = [Image.fromarray(values[:, :, channel]) for channel in range(4)]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    np.save(tmp_path / "last.npy", values)
    np.save(tmp_path / "first.npy", values.transpose(2, 0, 1))
    for name in ("pages.tif", "last.npy", "first.npy"):
        assert np.array_equal(read_pixels(tmp_path / name, 6, 6, 4, window), wanted), name
    assert np.array_equal(read_pixels(tmp_path / "pages.tif", 6, 6, 1, "full")[0], np.rint(values[:, :, 0] / 257))
    with pytest.raises(BrokenImageError, match="1 channels, expected 5"):
        read_pixels(tmp_path / "pages.tif", 6, 6, 5, (0, 1))
    loaded = load_npz(save(tmp_path / "a.npz", x=values[None]), window=window)
    assert np.array_equal(loaded.train_images[0].numpy(), wanted)
    refused("x in .*: 4 channels, but data.window has 2 pairs", npz_of(tmp_path, values[None], window=window[:2]))


@pytest.mark.parametrize("dtype", ["u2", "f4"])
def test_a_grey_image_is_read_through_three_windows_in_arrays_as_in_files(tmp_path, dtype):
    """An image of no value in any of them is refused."""
    values, window = values_of(dtype, 2, 16, 16), ((0.0, 20_000.0), (5_000.0, 9_000.0), (19_000.0, 65_535.0))
    low, high = np.array(window).T[:, :, None, None]
    wanted = np.rint(np.clip((values[:, None] - low) / (high - low), 0, 1) * 255).astype(np.uint8)
    for number, one in enumerate(values):
        tifffile.imwrite(tmp_path / f"{number}.tif", one)
        assert np.array_equal(read_pixels(tmp_path / f"{number}.tif", 16, 16, 3, window), wanted[number])
    for array in (values, values[..., None], values[:, None]):
        for channels in (None, 3):
            (images,) = images_in(save(tmp_path / "a.npz", x=array), ["x"], window, channels).values()
            assert np.array_equal(images, wanted)
    if dtype == "f4":
        says = "x in .*: 2 of 2 images lie wholly outside"
        refused(says, npz_of(tmp_path, values - 30_000, window=window, channels=3))


def test_percentiles_are_measured_on_the_training_images_and_stay(tmp_path, tiny):
    x = np.stack([values_of("f4", 8, 8, 5) * (channel + 1) for channel in range(30)])
    federation = build_federation(tiny(**AVERAGED, **five(tmp_path, x, window="percentiles")))
    window = federation.recipe.data.window
    assert np.allclose(window, np.percentile(x.astype("f8"), (1, 99), axis=(0, 1, 2)).T)
    assert 0.005 < (federation.dataset.train_images == 0).float().mean() < 0.02
    again = build_federation(federation.recipe)
    assert torch.equal(again.dataset.train_images, federation.dataset.train_images)
    eight_bits = build_federation(tiny(**AVERAGED, **five(tmp_path, x.astype("u1"), window="percentiles")))
    assert eight_bits.recipe.data.window is None


def npz_of(tmp_path, x: np.ndarray, **options: object) -> DataOptions:
    return DataOptions(name="npz", path=save(tmp_path / "b.npz", x=x), **options)


def five(tmp_path, x: np.ndarray, **options: object) -> dict[str, object]:
    data = npz_of(tmp_path, x, **options).model_dump(mode="json", exclude_unset=True)
    return {
        "data": data,
        "partition": {"name": "iid", "clients": 2},
        "augmentation": {"jitter_probability": 0.0, "grayscale": 0.0},
        "rounds": 1,
    }


@pytest.mark.parametrize(
    ("shape", "options", "found"),
    [
        *((shape, {}, (1, 6, 8)) for shape in ((3, 6, 8), (3, 6, 8, 1), (3, 1, 6, 8))),
        *(((3, 3, 6, 8), {}, (3, 6, 8)), ((3, 3, 6, 3), {}, (3, 3, 6))),
        *((shape, {}, (5, 8, 8)) for shape in ((3, 8, 8, 5), (3, 5, 8, 8))),
        *(((3, 6, 8, 5), {}, (5, 6, 8)), ((3, 5, 8, 6), {}, (5, 8, 6)), ((3, 33, 40, 5), {}, (5, 33, 40))),
        *((shape, {}, (32, 8, 8)) for shape in ((3, 8, 8, 32), (3, 32, 8, 8))),
        *(((3, 6, 6, 6), {"channels": 6}, (6, 6, 6)), ((3, 4, 8, 6), {"channels": 6}, (6, 4, 8))),
        *((shape, {"channels": 3}, (3, 8, 8)) for shape in ((3, 8, 8), (3, 8, 8, 1), (3, 1, 8, 8))),
        *((shape, {"channels": 1}, (1, 8, 8)) for shape in ((3, 8, 8), (3, 8, 8, 3), (3, 3, 8, 8))),
        ((3, 6, 6, 6), {}, r"may be \[n, H, W, C\] or \[n, C, H, W\]; set data\.channels=6"),
        ((3, 33, 40, 40), {}, r"shape \[3, 33, 40, 40\]; expected .* with 1 to 32 channels"),
        ((3, 40, 40, 0), {}, r"is empty \(shape \[3, 40, 40, 0\]\)"),
        ((3, 8, 8, 5), {"channels": 4}, r"with data\.channels=4"),
        ((3, 8, 8, 5), {"channels": 3}, r"with data\.channels=3"),
    ],
)
def test_where_an_array_has_its_channels(tmp_path, shape, options, found):
    data = npz_of(tmp_path, random_pixels(*shape), **options)
    if isinstance(found, str):
        refused(found, data)
    else:
        images = load_npz(data.path, **options).train_images
        assert images.shape[1:] == found
        np.save(tmp_path / "a.npy", random_pixels(*shape))
        assert torch.equal(load_npz(tmp_path / "a.npy", **options).train_images, images)


def test_colours_become_grey_as_pillow_makes_them_and_the_reverse_in_arrays_as_in_files(tmp_path):
    colours, grey = random_pixels(9, 8, 8, 3), random_pixels(9, 8, 8)
    images = load_npz(save(tmp_path / "data.npz", x_train=colours), channels=1).train_images
    assert np.array_equal(images[:, 0], [Image.fromarray(one).convert("L") for one in colours])
    deep = load_npz(save(tmp_path / "data.npz", x_train=colours.astype("u2") * 257), channels=1, window="full")
    assert torch.equal(deep.train_images, images)
    tripled = load_npz(save(tmp_path / "data.npz", x_train=grey), channels=3).train_images
    assert all(np.array_equal(tripled[:, channel], grey) for channel in range(3))
    summaries = [summarise({"name": "npz", "path": str(tmp_path / "data.npz"), "channels": n}) for n in (None, 1, 3)]
    assert [summary.channels for summary in summaries] == [1, 1, 3]


GREY, COLOUR = (8, 8, 1), (8, 8, 3)


@pytest.mark.parametrize(
    ("shapes", "channels", "used"),
    [
        ([COLOUR] * 4 + [GREY], None, 3),
        ([GREY] + [COLOUR] * 4, None, 3),
        ([COLOUR] + [GREY] * 7, None, 1),
        ([COLOUR] * 2, 1, 1),
        ([COLOUR, GREY], 1, 1),
        ([GREY] * 2, 3, 3),
    ],
)
def test_percentiles_are_those_of_the_channels_that_grey_and_coloured_images_become(tmp_path, shapes, channels, used):
    images = [values_of("u2", *shape) // (number + 1 + np.arange(shape[2])) for number, shape in enumerate(shapes)]
    for number, image in enumerate(images):
        (tmp_path / f"{number}.png").write_bytes(imagecodecs.png_encode(image.astype("u2").squeeze()))
    values = [image.reshape(-1, 1) if used == 1 else np.broadcast_to(image, COLOUR).reshape(-1, 3) for image in images]
    options = DataOptions(name="images", path=tmp_path, image_size=8, window="percentiles", channels=channels)
    dataset = load_dataset(options, 0)
    assert dataset.train_images.shape == (len(images), used, 8, 8)
    wanted = np.percentile(np.concatenate(values), (1, 99), axis=0).T
    assert np.allclose(np.reshape(dataset.window, (used, 2)), wanted)
    if len(set(shapes)) == 1:
        x = np.stack(images).astype("u2")
        array = load_npz(save(tmp_path / "a.npz", x=x), window="percentiles", channels=channels)
        assert np.allclose(array.window, wanted)


def test_percentiles_are_those_of_what_most_of_all_images_are_whatever_the_training_images_are(tmp_path):
    for split, shape, count in (("train", COLOUR, 3), ("train", GREY, 2), ("test", GREY, 5)):
        for number in range(count):
            file = tmp_path / split / f"{len(shape)}{shape[2]}{number}.png"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(imagecodecs.png_encode(values_of("u2", *shape).squeeze() + np.uint16(number)))
    data = load_dataset(DataOptions(name="images", path=tmp_path, image_size=8, window="percentiles"), 0)
    assert data.train_images.shape == (5, 1, 8, 8)
    assert len(data.window) == 2


def varying(low: float, high: float) -> np.ndarray:
    return np.linspace(low, high, 8 * 8 * 5, dtype="f4").reshape(8, 8, 5)


@pytest.mark.parametrize(
    ("arrays", "options", "says"),
    [
        ([varying(0, 1), varying(0, 1)[:, :, :4]], {"window": (0, 1)}, r"0\.npy has 5 channels and .*1\.npy 4"),
        ([np.full((8, 8, 5), np.nan, "f4")], {"window": (0, 1)}, r"0\.npy .*\(pixels that are NaN or infinite\)"),
        ([varying(0, 1), varying(7, 9)], {"window": (0, 1)}, r"1\.npy .*all values, 7 to 9, lie outside data\.window"),
        ([varying(0, 1), varying(-1, 1)], {}, r"1\.npy has pixels from -1 to 1; expected uint8, or floats in \[0, 1\]"),
        ([varying(0, 1), varying(0, 9)[:, :, :1]], {"channels": 1}, r"expected .* of 1 channels"),
        ([varying(0, 1)], {"window": ((0, 1), (0, 2))}, r"data\.window has 2 pairs, but the images have 5 channels"),
        ([random_pixels(40, 40, 33)], {}, r"0\.npy .*an array \[40, 40, 33\], expected .* of 1 to 32 channels"),
        ([random_pixels(8, 8, 5)], {"channels": 4}, r"0\.npy .*an array \[8, 8, 5\], expected .* of 4 channels"),
        ([varying(1, 9)[..., 0].astype("u2"), varying(0, 9)[..., 0]], {}, r"0\.npy has pixels of more than 8 bits, as"),
        ([np.array(["a"])], {}, r"an array \[1\] of <U1, expected numbers \[H, W\]"),
    ],
)
def test_folders_that_are_refused(tmp_path, arrays, options, says):
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    refused(says, DataOptions(name="images", path=tmp_path, image_size=8, **options))


@pytest.mark.parametrize(("most", "told"), [(1.0, False), (1.05, True), (200.0, False)])
def test_arrays_of_floats_are_the_same_images_in_files_and_in_one_file(tmp_path, caplog, most, told):
    arrays = np.stack([varying(0, most), varying(0, most)[::-1]])
    for number, array in enumerate(arrays):
        np.save(tmp_path / f"{number}.npy", array)
    in_files = load_dataset(DataOptions(name="images", path=tmp_path, image_size=8), 0).train_images
    assert ("values are above 1, up to 1.0" in caplog.text) == told
    assert torch.equal(in_files, load_npz(save(tmp_path / "x.npz", x=arrays)).train_images)


def test_other_refusals(tmp_path):
    for channels in (0, 33):
        with pytest.raises(ValueError, match=r"channels\n.* equal to (1|32)"):
            npz_of(tmp_path, random_pixels(3, 8, 8, 5), channels=channels)
    far = np.stack([varying(0, 1), varying(7, 9), np.full((8, 8, 5), 7, "f4")])
    refused(r"1 of 3 images lie wholly outside .* row 1, of 7 to 9", npz_of(tmp_path, far, window=(0, 1)))
    jitter = five(tmp_path, random_pixels(30, 8, 8, 5)) | {"augmentation": {"flip": 0.0}}
    with pytest.raises(UserError, match=r"augmentation\.jitter_probability is 0\.8 .* the images have 5"):
        build_federation(parse_recipe(tiny_values(**AVERAGED, **jitter)))
    np.save(tmp_path / "labels.npy", np.arange(3))
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    assert list_files(tmp_path, False)[0] == [tmp_path / "a.png"]  # beside images an array is no image
    (tmp_path / "bands").mkdir()
    tifffile.imwrite(
        tmp_path / "bands" / "a.tif", values_of("u2", 8, 8, 4), photometric="minisblack", planarconfig="contig"
    )
    bands = DataOptions(name="images", path=tmp_path / "bands", window="percentiles", channels=5)
    refused(r"a\.tif .*\(4 channels, expected 5\)", bands)
    tuned = five(tmp_path, random_pixels(30, 8, 8, 5)) | {"evaluation": {"fine_tune": {}}}
    with pytest.raises(UserError, match=r"the images have 5: set evaluation\.fine_tune\.augmentation=none"):
        build_federation(parse_recipe(tiny_values(**AVERAGED, **tuned)))
    assert (parse_window("[0,1],[2,3]"), parse_window("file")) == (((0, 1), (2, 3)), "file")


def test_a_run_on_five_channels_from_presets_to_features(tmp_path, finished):
    x = values_of("u2", 40, 8, 8, 5)
    keys = (
        f"data.name=npz data.path={save(tmp_path / 'x.npz', x=x)} data.window=percentiles rounds=1 partition.clients=2"
    )
    recipe = load_recipe("fedbyol", [*keys.split(), "training.local_epochs=1", "architectures=[small_convnet]"])
    assert (recipe.augmentation.jitter_probability, recipe.augmentation.grayscale) == (0, 0)
    encoder = export_encoder(finished(recipe), tmp_path / "encoder")
    window = read_encoder(encoder).window
    assert len(window) == 5
    assert "by channel from" in (encoder / "README.md").read_text()
    np.save(tmp_path / "y.npy", x[:7])
    embed_images(encoder, tmp_path / "y.npy", tmp_path / "f.npz")
    with torch.no_grad():
        pixels = load_npz(tmp_path / "x.npz", window=window).train_images[:7]
        own = read_encoder(encoder).network(pixels.float() / 63.75 - 2)
    assert np.allclose(np.load(tmp_path / "f.npz")["features"], own.numpy(), atol=1e-5)
    images = torch.arange(2 * 5 * 32 * 32).remainder(251).to(torch.uint8).reshape(2, 5, 32, 32)
    rows = torch.arange(2)
    assert np.array_equal(thumbnails(images, rows), images[:, :3].permute(0, 2, 3, 1).numpy())
    assert np.array_equal(thumbnails(images[:, :2], rows), images[:, :2].float().mean(1).to(torch.uint8).numpy())
