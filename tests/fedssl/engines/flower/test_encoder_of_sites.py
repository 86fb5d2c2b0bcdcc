"""Sites with folders of unlabelled images and a server without data: the encoder out, and weights in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from fedssl.engines.flower.site import load_site, site_federation
from fedssl.export.embed import embed_images
from fedssl.export.encoder_folder import export_encoder
from fedssl.federation import build_federation
from fedssl.reports.evaluation import evaluate_run
from fedssl.run_folder.record import read_run
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.data.data_files import random_pixels
from tests.fedssl.data.image_samples import save_array
from tests.fedssl.engines.flower.loop_grid import run_on, start, write_sites
from tests.fedssl.export.finished_runs import write_images

DEPLOYED = AVERAGED | {
    "partition": {"name": "sites", "clients": 2},
    "data": {"name": "none", "image_shape": [1, 8, 8]},
}


@pytest.fixture
def sites(tmp_path) -> list[Path]:
    """Two sites, each with a flat folder of images."""
    files = write_sites(tmp_path, 2)
    for site, file in enumerate(files):
        folder = tmp_path / f"images{site}"
        for number in range(20):
            save_array(folder / f"{number:02}.png", random_pixels(9, 8, seed=100 * site + number))
        data = {"data": {"name": "images", "path": str(folder), "image_size": 8}}
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | data))
    return files


def test_a_server_without_data_exports_the_encoder_and_starts_from_it(quick, tmp_path, sites):
    directory, grid = start(quick(**DEPLOYED), tmp_path / "run", sites)
    assert run_on(quick(**DEPLOYED), directory, grid) == []
    folder = export_encoder(tmp_path / "run", tmp_path / "encoder")
    assert "at the clients' sites" in (folder / "README.md").read_text()
    embed_images(folder, tmp_path / "images0", tmp_path / "features.npz")
    with np.load(tmp_path / "features.npz") as arrays:
        assert arrays["features"].shape == (20, 128)

    continued = quick(**DEPLOYED, model={"weights": str(folder)})
    federation = build_federation(continued)
    assert federation.method.global_model is not None
    first = federation.method.global_model.encoder.state_dict()
    last = directory.server_state().tensors
    assert all(torch.equal(tensor, last[f"online.encoder.{name}"]) for name, tensor in first.items())
    # the sites do not have the server's files: their weights come with the first message
    evaluation = {"downstream": {"other": {"name": "npz", "path": str(tmp_path / "only_at_the_server.npz")}}}
    absent = quick(**DEPLOYED, model={"weights": str(tmp_path / "only_at_the_server")}, evaluation=evaluation)
    at_site = site_federation(absent, load_site(sites[0]))
    assert (at_site.weights, at_site.downstream) == ({}, {})
    write_images(tmp_path / "labelled.npz")
    evaluation = {"downstream": {"other": {"name": "npz", "path": str(tmp_path / "labelled.npz")}}}
    continued = quick(**DEPLOYED, model={"weights": str(folder)}, evaluation=evaluation)
    directory, grid = start(continued, tmp_path / "continued", sites)
    assert run_on(continued, directory, grid) == []
    run = read_run(tmp_path / "continued")
    assert run.finished
    for when in ("before", "after"):
        assert run.evaluated("downstream_other_knn", when) is not None
    assert run.evaluated("knn", "after") is None
    header, row = evaluate_run(tmp_path / "continued").read_text().splitlines()
    assert header.split(",")[:2] == ["client", "downstream_other_knn"]
    assert float(row.split(",")[1]) == pytest.approx(run.evaluated("downstream_other_knn", "after"), abs=0.006)
