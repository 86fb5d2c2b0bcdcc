"""A site's own data, architecture and device, and a site file that is wrong."""

from __future__ import annotations

import pytest
import torch
import yaml

from fedssl.engines.flower.site import load_site, site_federation
from fedssl.errors import UserError
from fedssl.federation import build_federation
from fedssl.reports.evaluation import evaluate_run
from fedssl.reports.report import write_report
from tests.fedssl.conftest import ALIGNED, AVERAGED
from tests.fedssl.engines.flower.loop_grid import run_on, start, write_sites
from tests.fedssl.engines.stopped_runs import metric


def test_a_site_brings_its_own_images_and_architecture(quick, tmp_path):
    recipe = quick(**(ALIGNED | {"partition": {"name": "sites", "clients": 3}}))
    federation = build_federation(recipe)
    assert [len(rows) for rows in federation.client_rows] == [0, 0, 0]
    sites = write_sites(tmp_path, data={"name": "digits", "train_limit": 40, "test_limit": 60, "public_holdout": 30})
    changed = yaml.safe_load(sites[1].read_text()) | {"architecture": "small_convnet_wide", "device": "cpu"}
    sites[1].write_text(yaml.safe_dump(changed))
    own = site_federation(recipe, load_site(sites[1]))
    assert [len(rows) for rows in own.client_rows] == [0, 40, 0]
    assert own.recipe.architecture_of(1) == "small_convnet_wide"
    assert own.recipe.architecture_of(0) == federation.recipe.architecture_of(0)
    directory, grid = start(recipe, tmp_path / "b", sites)
    assert run_on(recipe, directory, grid) == []
    assert metric(tmp_path / "b", "knn", 2).keys() == {"0", "1", "2", "mean"}


def test_a_site_file_that_is_wrong(tmp_path, quick):
    file = tmp_path / "site.yaml"
    with pytest.raises(UserError, match=r"the site's file .* cannot be read"):
        load_site(file)
    file.write_text("client: 0\nstate: x\narchitektur: y\n")
    with pytest.raises(UserError, match=r"architektur: unknown key; did you mean architecture\?"):
        load_site(file)
    file.write_text("client: 0\n")
    with pytest.raises(UserError, match="state: missing"):
        load_site(file)
    file.write_text("client: 3\nstate: x\n")
    with pytest.raises(
        UserError, match=r"the site's client is 3, but the recipe has partition.clients=3: expected 0 to 2"
    ):
        site_federation(quick(**AVERAGED), load_site(file))
    file.write_text("client: 0\nstate: x\narchitecture: small_resnet10\n")
    with pytest.raises(UserError, match="differ, but weighted_mean exchanges weights"):
        site_federation(quick(**AVERAGED), load_site(file))
    file.write_text("client: 0\nstate: x\n")
    with pytest.raises(UserError, match=r"the site's data is missing: the recipe has partition.name=sites"):
        site_federation(quick(partition={"name": "sites", "clients": 2}), load_site(file))


def test_sites_of_their_own_data_are_for_the_flower_engine(tiny):
    with pytest.raises(UserError, match="partition sites needs engine flower"):
        build_federation(tiny(partition={"name": "sites", "clients": 2}))


NO_DATA = {"name": "none", "image_shape": [1, 8, 8]}
SITES = {"name": "sites", "clients": 2}


def test_a_server_without_data_trains_what_the_sites_hold(quick, tmp_path):
    recipe = quick(**AVERAGED, data=NO_DATA, partition=SITES)
    sites = write_sites(tmp_path, 2, data={"name": "digits", "train_limit": 40, "test_limit": 60})
    directory, grid = start(recipe, tmp_path / "without", sites)
    assert run_on(recipe, directory, grid) == []
    assert {name for _, _, name, _ in directory.read_metrics()} & {"knn", "linear"} == set()
    with_data = quick(**AVERAGED, data={"name": "digits", "test_limit": 60}, partition=SITES)
    others = tmp_path / "others"
    others.mkdir()
    known, grid = start(with_data, tmp_path / "with", write_sites(others, 2, data=own_digits()))
    assert run_on(with_data, known, grid) == []
    ours, theirs = directory.server_state().tensors, known.server_state().tensors
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(UserError, match="names no images to evaluate on"):
        evaluate_run(directory.path)
    write_report([directory.path])
    assert "there are no images" in (directory.path / "report.html").read_text(encoding="utf-8")


def own_digits():
    return {"name": "digits", "train_limit": 40, "test_limit": 60}


def test_a_site_brings_its_images_to_the_size_that_the_recipe_says(quick, tmp_path):
    recipe = quick(**AVERAGED, data=NO_DATA | {"image_shape": [1, 12, 12]}, partition=SITES)
    (site,) = write_sites(tmp_path, 1, data=own_digits())
    assert site_federation(recipe, load_site(site)).dataset.train_images.shape[1:] == (1, 12, 12)


def test_a_server_without_data_must_know_the_classes_of_labels(quick):
    with pytest.raises(UserError, match=r"as data\.class_names"):
        build_federation(quick(**AVERAGED, data=NO_DATA, partition=SITES, objective="supervised"))
