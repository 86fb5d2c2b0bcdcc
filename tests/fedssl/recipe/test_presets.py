"""A recipe names a method; presets fill in what belongs to the data, and say so."""

import numpy as np
import pytest
import yaml
from PIL import Image

from fedssl.data.datasets import load_dataset
from fedssl.data.partitions import partition_indices
from fedssl.data.summary import DataSummary, summarise
from fedssl.errors import UserError
from fedssl.parts import part_class, part_names
from fedssl.recipe.overrides import read_values, recipe_names
from fedssl.recipe.presets import preset_names, read_preset
from fedssl.recipe.reading import fill_in, load_recipe, parse_recipe
from fedssl.recipe.recipe import Recipe
from fedssl.untrusted import PART_KEYS

#: what belongs to the data or to the length of a run, and so to presets
OF_THE_DATA = {"rounds", "data", "augmentation", "training", "evaluation"}


def images(path, count, shape, labelled=True, **more):
    """An .npz file of random training and test images."""
    arrays = {"x_train": np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)}
    arrays["x_test"] = arrays["x_train"][:20]
    if labelled:
        arrays |= {"y_train": np.arange(count) % 5, "y_test": np.arange(20) % 5}
    np.savez(path, **arrays, **more)
    return [f"data={{name: npz, path: {path}}}"]


@pytest.mark.parametrize(
    ("shape", "preset"),
    [
        ((28, 28), "small_grey"),
        ((1, 64, 64), "small_grey"),
        ((32, 32, 3), "small_colour"),
        ((3, 64, 64), "small_colour"),
        ((65, 80, 3), "natural"),
        ((96, 96), "grey_medical"),
    ],
)
def test_the_preset_is_chosen_by_size_and_channels(tmp_path, shape, preset):
    recipe = load_recipe("fedbyol", images(tmp_path / "own.npz", 40, shape))
    assert recipe.preset == preset


def test_recipes_hold_nothing_that_belongs_to_the_data():
    for name in recipe_names():
        values = read_values(name)
        expected = {"scratch": {"rounds"}, "feddino": {"augmentation"}}  # of which DINO's recipe holds the name alone
        assert OF_THE_DATA & set(values) == expected.get(name, set()), name
        assert set(values.get("augmentation", {})) <= {"name"}, name
        assert values.get("architectures", "several") == "several", name
        assert name.startswith(("centralised_", "scratch")) or "partition" not in values, name


def test_all_images_of_ones_own_are_dealt_where_no_part_uses_public_images(tmp_path):
    recipe = load_recipe("fedbyol", images(tmp_path / "own.npz", 700, (32, 32, 3)))
    dataset = load_dataset(recipe.data, recipe.seed)
    assert dataset.public_images is None
    assert sum(map(len, partition_indices(dataset.train_labels, recipe.partition, recipe.seed))) == 700
    assert (recipe.augmentation.flip, recipe.augmentation.crop_scale) == (0.5, (0.2, 1.0))


def test_a_quarter_at_most_becomes_public_where_a_part_needs_it(tmp_path):
    own = images(tmp_path / "few.npz", 700, (28, 28))
    for changes, holdout in ([], 175), (["data.public_holdout=9"], 9), (["data.public_path=p.npz"], 0):
        assert load_recipe("hetero_ssfl", [*own, *changes]).data.public_holdout == holdout


def test_batches_fit_the_smallest_data_and_images_without_labels_are_dealt_in_equal_shares(tmp_path):
    own = images(tmp_path / "own.npz", 100, (28, 28))
    recipe = load_recipe("fedbyol", own)
    assert (recipe.training.batch_size, recipe.partition.name, recipe.partition.min_samples) == (8, "dirichlet", 8)
    assert load_recipe("fedbyol", [*own, "training.batch_size=16"]).training.batch_size == 16
    many = load_recipe("fedbyol", images(tmp_path / "many.npz", 3000, (28, 28)))
    assert many.training.batch_size == 64
    unlabelled = images(tmp_path / "own.npz", 100, (28, 28), labelled=False)
    assert load_recipe("fedbyol", unlabelled).partition.name == "iid"


def test_the_fewer_the_images_the_more_often_each_is_seen(tmp_path):
    passes = {}
    for count in (100, 12_000, 100_000):
        summary = images(tmp_path / f"{count}.npz", count, (4, 4))
        recipe = load_recipe("fedsimclr", summary)
        passes[count] = recipe.rounds * recipe.training.local_epochs
    assert passes == {100: 402, 12_000: 102, 100_000: 30}  # whole rounds of three passes
    assert load_recipe("fedsimclr", [*summary, "training.local_epochs=1"]).rounds == 30
    assert load_recipe("fedsimclr", [*summary, "rounds=7"]).rounds == 7


def test_what_the_recipe_or_an_override_says_goes_first(tmp_path):
    text = {"name": "own", "objective": {"name": "byol", "hidden_features": 33}, "schedule": "end_to_end"}
    text |= {"local_update": "keep_own", "augmentation": {"flip": 0.25}, "partition": {"name": "iid"}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(text))
    recipe = load_recipe(tmp_path / "own.yaml", ["augmentation.blur=0.125", "preset=natural", "rounds=3"])
    assert (recipe.objective.hidden_features, recipe.objective.output_features) == (33, 256)
    assert (recipe.augmentation.flip, recipe.augmentation.blur, recipe.augmentation.saturation) == (0.25, 0.125, 0.4)
    assert (recipe.partition.name, recipe.partition.clients, recipe.rounds) == ("iid", 5, 3)


def test_the_network_is_that_of_the_weights_where_they_tell_it_and_none_is_given(tmp_path):
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text('{"fedssl": {"architecture": "small_convnet_wide"}}')
    weights = f"model.weights={tmp_path / 'encoder'}"
    given, timm = [weights, "architectures=[small_vit]"], ["model.weights=timm:efficientnet_lite0.ra_in1k"]
    for words, network in (([weights], "small_convnet_wide"), (timm, "efficientnet_lite0"), (given, "small_vit")):
        assert load_recipe("fedsimclr", words).architectures == [network]


def test_training_from_scratch_on_own_images_names_what_to_compare_it_with(tmp_path):
    own = images(tmp_path / "a.npz", 90, (32, 32, 3), labelled=False)
    for words, told in ((own, True), ([*own, "model.weights=a.pt"], False), ([], False)):
        assert ("docs/does_federating_pay.md" in " ".join(fill_in("fedbyol", words, False)[1])) == told


def test_a_resolved_recipe_is_read_back_without_its_data(tmp_path):
    recipe = load_recipe("hetero_ssfl", images(tmp_path / "own.npz", 700, (28, 28)))
    (tmp_path / "stored.yaml").write_text(recipe.to_yaml())
    (tmp_path / "own.npz").unlink()
    assert load_recipe(tmp_path / "stored.yaml") == recipe


def test_none_takes_the_defaults_and_an_unknown_preset_or_data_that_are_not_there_are_refused():
    plain = load_recipe("fedbyol", ["preset=none", "rounds=1", "architectures=[small_convnet]"])
    assert plain.training == Recipe.model_fields["training"].default
    with pytest.raises(UserError, match="preset: 'natura' is unknown; did you mean natural"):
        load_recipe("fedbyol", ["preset=natura"])
    with pytest.raises(UserError, match=r"^fedbyol: training\.batch_size: [^;]*$"):  # not also what follows from it
        load_recipe("fedbyol", ["training.batch_size=two"])
    with pytest.raises(UserError, match=r"no file or folder .*name one with preset=NAME"):
        load_recipe("fedbyol", ["data={name: npz, path: /nowhere.npz}"])
    elsewhere = ["data={name: npz, path: /nowhere.npz}", "preset=natural"]
    assert load_recipe("fedbyol", elsewhere).training.batch_size == 128


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("recipe", recipe_names())
def test_every_preset_completes_every_recipe(recipe, preset):
    resolved = load_recipe(recipe, [f"preset={preset}"])
    assert parse_recipe(resolved.model_dump(mode="json")) == resolved


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_states_its_source_and_names_parts_that_exist(preset):
    read = read_preset(preset)
    assert len(read.source.split()) > 10
    for name, own in read.parts.items():
        [folder] = [folder for folder, _ in PART_KEYS.values() if name in part_names(folder)]
        assert set(own.options) <= set(part_class(folder, name).model_fields)


def test_the_papers_settings_are_one_word():
    hetero = load_recipe("hetero_ssfl", ["preset=paper:hetero_ssfl"])
    assert (hetero.rounds, hetero.training.learning_rate, hetero.data.public_holdout) == (200, 0.032, 5000)
    contrastive = load_recipe("lw_fedssl", ["preset=paper:lw_fedssl", "objective={name: simclr}"]).objective
    assert (contrastive.temperature, contrastive.projector_layers) == (0.05, 3)
    own = "evaluation.semi_supervised_protocol.epochs=30"
    for method, probe in (("fedu2", "fedu2"), ("lw_fedssl", "hetero_ssfl")):
        evaluation = load_recipe(method, [f"preset=paper:{method}", own]).evaluation
        assert (evaluation.neighbors, evaluation.linear.name) == (200, probe)
        assert (evaluation.semi_supervised_protocol.name, evaluation.semi_supervised_protocol.epochs) == (method, 30)


def picture(path, size, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size).save(path)


@pytest.mark.parametrize(
    ("sizes", "mode", "side"),
    [
        ([(28, 28)] * 4, "L", 28),
        ([(100, 60), (90, 70), (60, 90)], "RGB", 32),
        ([(640, 480), (100, 100), (480, 640)], "RGB", 128),
        ([(512, 512)] * 3, "I;16", 128),
        ([(3, 3)] * 4, "L", 32),
    ],
)
def test_image_files_are_brought_to_one_size_by_their_headers(tmp_path, sizes, mode, side):
    for i, size in enumerate(sizes):
        picture(tmp_path / "train" / "a" / f"{i}.png", size, mode)
    picture(tmp_path / "test" / "a" / "0.png", (8, 8))
    seen = summarise({"name": "folder", "path": str(tmp_path)})
    assert seen == DataSummary(len(sizes), 3 if mode == "RGB" else 1, side, True, True)
    recipe = load_recipe("fedbyol", [f"data={{name: folder, path: {tmp_path}}}"])
    assert recipe.data.image_size == side


def test_the_limit_holds_for_what_a_holdout_leaves(tmp_path):
    of_data = [*images(tmp_path / "i.npz", 600, (28, 28)), "data.public_holdout=400", "data.train_limit=200"]
    recipe = load_recipe("fedbyol", [*of_data, "partition.clients=2"])
    assert recipe.training.batch_size == 32  # each client has 100 images, a preset's batch would be 64
    assert load_recipe("fedbyol", [*of_data[:2], "partition.clients=2"]) == recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"train_limit": None})}
    )


def test_a_folder_is_one_client_unless_clients_are_asked_for(tmp_path):
    for i in range(60):
        picture(tmp_path / f"{i}.png", (48, 48))
    (tmp_path / "notes.txt").write_text("no image")
    recipe = load_recipe("fedbyol", [f"data={{name: images, path: {tmp_path}}}"])
    assert summarise({"name": "images", "path": str(tmp_path)}) == DataSummary(60, 3, 48, False, True)
    (tmp_path / "some.csv").write_text("file,label\n" + "".join(f"{i}.png,a\n" for i in range(10)))
    listed = {"name": "images", "path": str(tmp_path), "labels": str(tmp_path / "some.csv"), "label_column": "label"}
    assert summarise(listed).images < 11
    assert (recipe.preset, recipe.data.image_size, recipe.partition.clients) == ("small_colour", 48, 1)
    _, told = fill_in("fedbyol", [f"data={{name: images, path: {tmp_path}}}"], False)
    assert any("are one client, and nothing is federated" in reason for reason in told)
    asked = load_recipe("fedbyol", [f"data={{name: images, path: {tmp_path}}}", "partition.clients=3"]).partition
    assert (asked.name, asked.clients) == ("iid", 3)
    assert load_recipe("local_only", [f"data={{name: images, path: {tmp_path}}}"]).partition.clients == 5
    labelled = summarise({"name": "images", "path": str(tmp_path), "labels": "folders"})
    assert labelled == DataSummary(48, 3, 48, True, True)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_what_cannot_be_looked_at_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "broken.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.npz cannot be read as an \.npz file") as caught:
        load_recipe("fedbyol", [f"data={{name: npz, path: {tmp_path / 'broken.npz'}}}"])
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="holds no image"):
        load_recipe("fedbyol", [f"data={{name: folder, path: {tmp_path}}}"])


@pytest.mark.parametrize(("key", "many"), [(key, many) for key, (_, many) in PART_KEYS.items()])
@pytest.mark.parametrize("preset", ["auto", "natural"])
def test_a_preset_does_not_run_the_code_of_a_part_that_is_not_trusted(preset, key, many, tmp_path):
    """It asks the parts whether they need public images, where the recipe does not say where these come from."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    values = {"objective": "byol", "preset": preset} | {key: ["./evil.py"] if many else "./evil.py"}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=r"r\.yaml names the part .*evil\.py, whose code would be run"):
        load_recipe(tmp_path / "r.yaml", ["rounds=2", "architectures=[small_resnet10]"])
    assert not (tmp_path / "ran").exists()
