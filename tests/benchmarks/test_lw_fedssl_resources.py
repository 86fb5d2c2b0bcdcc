"""``python -m benchmarks.lw_fedssl_resources``: figures are the paper's, and those that are computed by hand."""

import pytest
import yaml

from benchmarks.lw_fedssl_resources import RESULTS, write
from website.result_tables import read


def test_flops_and_traffic_of_lw_fedssl_are_the_papers(tmp_path):
    """ViT-Tiny at full size, in batches of two: neither figure depends on the batch. Some rows of the table."""
    values = yaml.safe_load((RESULTS / "lw_fedssl_resources" / "table.yaml").read_text(encoding="utf-8"))
    bounds = {  # FLOPs within 0.01, traffic within 0.02, as printed in the paper's Tables 2, 3 and 5
        "FedMoCoV3": (1.0, 1.0),
        "LW-FedSSL, 6 layers a stage": (0.58, 0.56),
        "LW-FedSSL, everyone new in every round": (0.24, 0.40),
        "Prog-FedSSL, 6 layers a stage": (0.75, 0.78),
    }
    values["rows"] = [row for row in values["rows"] if row["label"] in bounds]
    values["settings"]["training"] = {"batch_size": 2}
    (tmp_path / "table.yaml").write_text(yaml.safe_dump(values))
    write(tmp_path)
    assert (tmp_path / "table.md").read_text().count("\n| ") == 1 + len(bounds)
    table = read(tmp_path)
    for label, (flops, traffic) in bounds.items():
        assert table["flops ratio"][label][0] == pytest.approx(flops, abs=0.01)
        assert table["traffic ratio"][label][0] == pytest.approx(traffic, abs=0.02)
    # by hand: a block has 12 w^2 + 13 w parameters at width w = 192; 64 patches and a class token pass it
    width, tokens = 192, 65
    block = 12 * width**2 + 13 * width
    outside = 3 * 16 * width + width + tokens * width + width + 2 * width  # patches, position, class token, last norm
    heads = width * 512 + 512 * 512 + 512 * 256 + 256 * 512 + 512 * 256 + 3 * 2 * 512  # linear maps and BatchNorm
    statistics = 4 * 2 * (3 * 512 + 2 * 256) + 5 * 8  # running means and variances, and counters of eight bytes
    logged = 8 * 6  # samples, loss, total loss, gradient norm, memory and operations
    payload = 4 * (12 * block + outside + heads) + statistics
    assert table["traffic"]["FedMoCoV3"][0] == pytest.approx(180 * (2 * payload + logged) / (1000 * 2**20), rel=1e-12)
    passes = 12 * (12 * width**2 * tokens + 2 * tokens**2 * width) + 64 * 48 * width
    passes += width * 512 + 512 * 512 + 512 * 256 + 256 * 512 + 512 * 256
    assert table["flops"]["FedMoCoV3"][0] == pytest.approx(180 * 3 * 3 * passes / 1e9, rel=1e-12)
