"""Sites with their own data and architectures, evaluations that no model gives, and a server without data."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from fedssl.data.options import DataOptions
from fedssl.engines import in_process
from fedssl.engines.flower.client import _site_from_file
from fedssl.engines.flower.messenger import Messenger
from fedssl.engines.flower.site import SiteStates, site_federation
from fedssl.engines.flower.site_files import SiteOptions, load_site
from fedssl.engines.flower.wire import evaluation_fault
from fedssl.errors import SendableError, UserError
from fedssl.export.embed import embed_images
from fedssl.export.encoder_folder import export_encoder
from fedssl.federation import build_federation
from fedssl.messages import Message
from fedssl.recipe.reading import load_recipe
from fedssl.reports.evaluation import write_evaluation
from fedssl.reports.report import write_report
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.data.data_files import random_pixels
from tests.fedssl.data.image_samples import save_array
from tests.fedssl.engines.flower.loop_grid import (
    EQUAL,
    HUGE,
    SECURE,
    Prepare,
    after_training,
    assert_close,
    write_sites,
)
from tests.fedssl.engines.short_runs import metric
from tests.fedssl.export.finished_runs import write_images
from tests.fedssl.models.test_weights import drawn


def test_a_site_brings_its_own_images_and_architecture(begin, tmp_path):
    data = {"name": "digits", "train_limit": 40, "test_limit": 60, "public_holdout": 30}
    sites = write_sites(tmp_path, own={1: {"architecture": "small_convnet_wide", "device": "cpu"}}, data=data)
    run = begin(sites, **ALIGNED, partition={"name": "sites", "clients": 3}, rounds=1)
    federation, own = build_federation(run.recipe), site_federation(run.recipe, load_site(sites[1]), 1)
    assert [len(rows) for rows in federation.client_rows] == [0, 0, 0]
    assert [len(rows) for rows in own.client_rows] == [0, 40, 0]
    assert own.recipe.architecture_of(1) == "small_convnet_wide"
    assert own.recipe.architecture_of(0) == federation.recipe.architecture_of(0)
    assert run.go() == []
    assert run.metric("knn", 1).keys() == {"0", "1", "2", "mean"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, r"the site's file .* cannot be read"),
        ("state: x\narchitektur: y\n", r"architektur: unknown key; did you mean architecture\?"),
        ("device: cpu\n", "state: missing"),
        ("state: x\narchitecture: small_resnet10\n", "differ, but weighted_mean exchanges weights"),
    ],
)
def test_a_site_file_that_is_wrong(text, told, quick, tmp_path):
    if text is not None:
        (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(UserError, match=told):
        site_federation(quick(**AVERAGED), load_site(tmp_path / "site.yaml"), 0)


def test_a_site_of_its_own_data_needs_data_and_the_flower_engine(quick, tiny, tmp_path):
    [site] = write_sites(tmp_path, 1)
    sites = {"partition": {"name": "sites", "clients": 2}}
    with pytest.raises(UserError, match=r"the site's data is missing: the recipe has partition.name=sites"):
        site_federation(quick(**sites), load_site(site), 0)
    with pytest.raises(UserError, match="partition sites needs engine flower"):
        build_federation(tiny(**sites))


def test_the_runs_name_cannot_leave_the_sites_folder(quick, tmp_path):
    [site] = write_sites(tmp_path, 1)
    (tmp_path / "recipe.yaml").write_text(quick(**AVERAGED).to_yaml())
    states = _site_from_file(tmp_path / "recipe.yaml", {"site": str(site)}, 0).states
    with pytest.raises(UserError, match="the server's name of the run is invalid: expected 1 to 64 letters"):
        states("../elsewhere")


def test_of_an_encoder_that_trains_in_part_each_site_reads_the_rest_itself(begin, tiny, tmp_path):
    """The run is that of one process, also with Flower's privacy, and a site with other weights is refused."""
    save_file(drawn("small_convnet").state_dict(), tmp_path / "w.safetensors")
    method = EQUAL | {"model": {"weights": str(tmp_path / "w.safetensors"), "train": "last:1"}, "rounds": 1}
    here, sites = in_process.run(tiny(**method), tmp_path / "here").path, write_sites(tmp_path)
    for folder, privacy in (("plain", {}), ("secure", {"secure": SECURE}), ("noisy", {"dp": HUGE})):
        run = begin(sites, folder, **method, **privacy)
        assert run.go() == []
        assert_close(here, run.path, atol=1e-6)
        assert metric(here, "bytes_down", 1)["0"] == run.metric("bytes_down", 1)["0"]
    save_file(drawn("small_convnet", seed=2).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="holds other weights than those recorded"):
        site_federation(load_recipe(run.path / "recipe.yaml"), load_site(sites[0]), 0)


def test_a_site_takes_the_weights_from_the_server_but_the_stem_and_kept_statistics_from_the_recipe(quick, tmp_path):
    save_file(drawn("small_convnet").state_dict(), tmp_path / "w.safetensors")
    model = {"weights": str(tmp_path / "w.safetensors"), "batch_statistics": "kept", "stem": "large"}
    downstream = {"other": {"name": "npz", "path": str(tmp_path / "only_at_the_server.npz")}}
    recipe = quick(**AVERAGED, model=model, evaluation={"downstream": downstream})
    (tmp_path / "w.safetensors").unlink()
    federation = site_federation(recipe, load_site(write_sites(tmp_path)[0]), 0)
    assert (federation.weights, federation.downstream) == ({}, {})
    assert federation.recipe.model.stem == "large"
    assert not federation.new_model(0).train().encoder.blocks[1].training


# A client's evaluation of its own model is checked like any other answer


MEASURES = {"knn": 80.0, "linear": 100.0, "effective_rank": 2.7, "fine_tune_f1": 0.0}
SPECTRUM = torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"downstream_mine_uniformity": -3.0, "downstream_mine_effective_rank": 300.0}, None),
        ({"linear": math.nan}, "an invalid linear: expected a finite number, got nan"),
        ({"knn": -1.7e308}, "an invalid knn: expected a finite number, got -1.7e+308"),
        ({f"fine_tune_{i}": 1.0 for i in range(40_000)}, "40004 measures, more than 100"),
        ({"fine_tune_" + "x" * 10**6: 1.0}, f"'fine_tune_{'x' * 90}', which is not a measure"),
        ({"bytes_up": 1.0}, "'bytes_up', which is not a measure"),
        (None, "no valid spectrum"),
        (torch.ones(2, 2), "no valid spectrum"),
        (torch.ones(3, dtype=torch.int64), "no valid spectrum"),
        (torch.zeros(10**6), "spectrum has 1000000 values, more than 65536"),
        (torch.tensor([1.0, -1.0]), "spectrum is invalid"),
        (torch.tensor([math.inf, 1.0]), "spectrum is invalid"),
        (torch.tensor([1.0, math.nan]), "spectrum is invalid"),
    ],
)
def test_measures_and_a_spectrum_that_no_model_has_are_refused(changes, fault):
    measures, spectrum = (MEASURES | changes, SPECTRUM) if isinstance(changes, dict) else (MEASURES, changes)
    told = evaluation_fault(measures, spectrum)
    if fault is None:
        assert told is None
    else:
        assert re.match(f"its evaluation('s| has| holds) {re.escape(fault)}", told), told


def test_evaluations_and_registrations_may_be_small_only(begin, monkeypatch):
    """Before the first round each client's own model is evaluated; after it, in the answer to the training."""
    largest, collect = [], Messenger.collect

    def collect_and_note(messenger, waiting, seconds, most, *patience):
        largest.append(most)
        return collect(messenger, waiting, seconds, most, *patience)

    monkeypatch.setattr(Messenger, "collect", collect_and_note)
    begin(rounds=1).go()
    *others, training = largest
    assert set(others) == {2**22}
    assert training >= 2**28


# Sites with folders of unlabelled images, and a server that holds no data: the encoder out, and weights in


SITES = {"partition": {"name": "sites", "clients": 2}}
NONE = {"name": "none", "image_shape": [1, 8, 8]}
NO_DATA = {"data": NONE}


@pytest.fixture
def sites(tmp_path) -> list[Path]:
    """Two sites, each with a flat folder of images."""
    own = {}
    for site in range(2):
        folder = tmp_path / f"images{site}"
        for number in range(20 + site):
            save_array(folder / f"{number:02}.png", random_pixels(9, 8, seed=100 * site + number))
        own[site] = {"data": {"name": "images", "path": str(folder), "image_size": 8}}
    return write_sites(tmp_path, 2, own)


def test_a_server_without_data_trains_as_one_with_data_exports_the_encoder_and_starts_from_it(begin, tmp_path, sites):
    begun = begin(sites, **AVERAGED, **SITES, **NO_DATA)
    federation = build_federation(begun.recipe)
    assert len(federation.dataset.train_images) == len(federation.dataset.test_images) == 0
    assert begun.go() == []
    run = read_run(begun.path)
    assert run.finished
    assert run.overall("loss").keys() == {1, 2}
    assert run.overall("effective_rank") == run.overall("knn") == {}
    assert "there are no images" in write_report([begun.path]).read_text()
    with pytest.raises(UserError, match=r"names no images to evaluate on \(data\.name=none\)"):
        write_evaluation(begun.path)
    known = begin(sites, "with_data", **AVERAGED, **SITES, data={"name": "digits", "test_limit": 60})
    assert known.go() == []
    last, theirs = begun.directory.server_state().tensors, known.directory.server_state().tensors
    assert last.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in last.items())

    folder = export_encoder(begun.path, tmp_path / "encoder")
    assert "at the clients' sites" in (folder / "README.md").read_text()
    embed_images(folder, tmp_path / "images0", tmp_path / "features.npz")
    with np.load(tmp_path / "features.npz") as arrays:
        assert arrays["features"].shape == (20, 128)

    write_images(tmp_path / "labelled.npz")
    evaluation = {"downstream": {"other": {"name": "npz", "path": str(tmp_path / "labelled.npz")}}}
    own = NO_DATA | {"model": {"weights": str(folder)}, "evaluation": evaluation}
    continued = begin(sites, "continued", **AVERAGED, **SITES, **own)
    federation = build_federation(continued.recipe)
    assert federation.method.global_model is not None
    first = federation.method.global_model.encoder.state_dict()
    assert all(torch.equal(tensor, last[f"online.encoder.{name}"]) for name, tensor in first.items())
    assert continued.go() == []
    run = read_run(continued.path)
    assert run.finished
    for when in ("before", "after"):
        assert run.evaluated("downstream_other_knn", when) is not None
    assert run.evaluated("knn", "after") is None
    header, row = write_evaluation(continued.path).read_text().splitlines()
    assert header.split(",")[:2] == ["client", "downstream_other_knn"]
    assert float(row.split(",")[1]) == pytest.approx(run.evaluated("downstream_other_knn", "after"), abs=0.006)


def test_sites_evaluate_the_models_that_they_keep(begin, sites):
    run = begin(sites, **SITES, **NO_DATA)
    assert run.go() == []
    for measure in ("effective_rank", "alignment", "uniformity"):
        assert run.metric(measure, 2).keys() == {"0", "1", "mean"}


def test_a_site_whose_images_change_during_a_run_is_left_out_and_named(begin, tmp_path, sites):
    """Site 0's images move. Site 1 has another image in rounds 2 and 3, and its own again after them."""
    run = begin(sites, **AVERAGED, **SITES, **NO_DATA, rounds=4)
    (tmp_path / "images0").rename(tmp_path / "moved")
    sites[0].write_text(sites[0].read_text().replace("images0", "moved"))
    file = tmp_path / "images1" / "03.png"
    before = file.read_bytes()
    other = lambda grid, patch: save_array(file, random_pixels(9, 8, seed=7))  # noqa: E731
    warnings = run.go({2: other, 4: lambda grid, patch: file.write_bytes(before)})
    reason = "its data have changed since it began this run (client 1): put them back as they were"
    assert warnings == [f"round {number}: client 1 is left out: {reason}" for number in (2, 3)]


@pytest.mark.parametrize(
    ("channels", "options", "expected"),
    [(1, {}, 3), (3, {}, 1), (3, {"channels": 3}, 3)],  # what the site's file says goes first
)
def test_a_site_brings_its_images_to_the_size_and_the_colours_that_the_recipe_says(
    channels, options, expected, quick, tmp_path
):
    np.savez(tmp_path / "own.npz", x_train=random_pixels(9, 16, 16, channels))
    recipe = quick(**AVERAGED, **SITES, data=NONE | {"image_shape": [4 - expected if options else expected, 12, 12]})
    (site,) = write_sites(tmp_path, 1, data={"name": "npz", "path": str(tmp_path / "own.npz")} | options)
    images = site_federation(recipe, load_site(site), 0).dataset.train_images[:]
    assert images.shape == (9, expected, 12, 12)
    assert (images == images[:, :1]).all() == (channels == 1 or expected == 1)


def test_a_state_with_a_flipped_bit_is_not_used_and_one_of_an_earlier_version_is(tmp_path):
    states = SiteStates(tmp_path, 1, prune=True)
    written = Message({"online.weight": torch.arange(9.0)}, {"a": 1.0})
    for number, kept in ((1, []), (2, [1]), (3, [2]), (2, [1])):
        states.store(number, written, kept)
        assert torch.equal(states.load(number).tensors["online.weight"], torch.arange(9.0))
    assert len(list(tmp_path.iterdir())) == 2  # the state of round 2 and its digest; the others are not needed any more
    file = tmp_path / "client-0001.round-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(SendableError, match="its state of round 2 was changed since it was written, or is damaged"):
        states.load(2)
    digest = file.with_suffix(".sha256").rename(tmp_path / "digest")  # an earlier version wrote none
    assert states.load(2).numbers == {"a": 1.0}
    digest.rename(file.with_suffix(".sha256"))
    file.unlink()
    with pytest.raises(UserError, match=r"cannot be read as a checkpoint .*No such file"):
        states.load(2)


def test_a_site_that_is_killed_between_a_state_and_its_digest_goes_on(tmp_path, monkeypatch):
    states = SiteStates(tmp_path, 1, prune=True)
    states.store(1, Message({}, {"a": 1.0}), [])

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedssl.engines.flower.site.write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        states.store(1, Message({}, {"a": 2.0}), [])
    assert states.load(1).numbers == {"a": 2.0}


def test_no_name_or_path_of_a_site_reaches_the_server_where_something_fails(begin, tmp_path, sites, capsys):
    """A broken file and one exception a round, each of which names a patient; the site's own log has them."""
    name = "huber_maria_1961"

    def fails(error: Exception) -> Prepare:
        def fail(reply: object) -> None:
            raise error

        return after_training(fail)

    with pytest.raises(ValidationError) as invalid:
        SiteOptions.model_validate({"device": name, "state": "x"})
    faults = {
        1: (fails(OSError(2, "No such file or directory", f"/scans/{name}.png")), "a file of it cannot be"),
        2: (fails(OSError(28, "No space left", f"/scans/{name}.png")), "no space left on its disk"),
        3: (fails(KeyError(name)), "its code failed with KeyError"),
        4: (fails(UserError(f"/scans/{name}.png cannot be read")), "its data, settings or state cannot be used"),
        5: (fails(invalid.value), "its code failed with ValidationError"),
        6: (fails(MemoryError(name)), "it ran out of memory"),
        7: (fails(SendableError("its weights are not finite")), "its weights are not finite"),
        8: (fails(RuntimeError(f"DefaultCPUAllocator: can't allocate memory for {name}")), "it ran out of memory"),
    }
    method = AVERAGED | SITES | NO_DATA | {"rounds": len(faults), "guard": {"minimum_answers": 1}}
    run, again = begin(sites, **method), begin(sites, "again", **method)
    warnings = run.go({number: fault for number, (fault, _) in faults.items()})
    broken = tmp_path / "images1" / f"{name}.png"
    broken.write_bytes(b"no image")
    warnings += again.register()
    log = capsys.readouterr().out
    for warning, told in zip(warnings, [told for _, told in faults.values()] + ["its data, settings or"], strict=False):
        assert f" is left out: {told}" in warning
        if number := re.search(r"its own log has the reason as failure ([0-9a-f]{8})", warning):
            assert re.search(rf"failure {number[1]}: .*?{name}", log, re.DOTALL)
    assert len(log.split(name)) > len(faults)
    assert str(broken) in log
    for reply in [*run.grid.sent, *again.grid.sent]:
        text = repr(reply.error) if reply.has_error() else repr(dict(reply.content.config_records))
        assert name not in text
        assert str(tmp_path) not in text
    for file in run.path.rglob("*.csv"):
        assert name not in file.read_text()


def test_a_server_without_data_must_know_the_classes_of_labels_and_is_for_sites(quick, tiny):
    with pytest.raises(UserError, match=r"as data\.class_names"):
        build_federation(quick(**AVERAGED, **SITES, **NO_DATA, objective="supervised"))
    with pytest.raises(UserError, match=r"is for a server whose sites bring their own images, got partition iid"):
        build_federation(tiny(**AVERAGED, **NO_DATA, partition={"name": "iid", "clients": 2}))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "none"}, r"name=none needs image_shape=\[channels, height, width\]"),
        (NONE | {"image_shape": [33, 8, 8]}, r"image_shape\.0\n.* less than or equal to 32"),
        ({"image_shape": [1, 8, 8]}, "image_shape and class_names are for name=none"),
        ({"class_names": ["a"]}, "image_shape and class_names are for name=none"),
        (NONE | {"public_holdout": 5}, "name=none has no images: leave path and public_holdout out"),
    ],
)
def test_wrong_options_of_a_server_without_data(options, says):
    with pytest.raises(ValidationError, match=says):
        DataOptions(**options)
