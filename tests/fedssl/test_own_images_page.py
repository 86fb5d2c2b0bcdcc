"""docs/own_images.md from its first command to its last, on a small folder of images without labels."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "own_images.md").read_text(encoding="utf-8")
#: what makes the page's runs short; the page's own settings stay
SHORT = ("rounds=1", "training.local_epochs=1", "training.batch_size=16", "evaluation.linear.epochs=2")


def steps() -> list[tuple[str, str]]:
    """The page's commands and Python blocks in their order: ("fedssl" or "python", text)."""
    parts = re.findall(r"```python\n(.*?)```|^    (fedssl .*?[^\\])$", PAGE, re.DOTALL | re.MULTILINE)
    return [("python", code) if code else ("fedssl", re.sub(r"\\\n\s*", "", command)) for code, command in parts]


def test_every_step_works_in_the_pages_order(tmp_path, monkeypatch, capsys):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "load", raising=False)
    random = np.random.default_rng(0)
    for number in range(60):
        path = Path("photos") / ("" if number % 2 else "older") / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (32, 40, 3), np.uint8)).save(path)
    labelled = {"x_train": (40, 28, 28), "x_test": (20, 28, 28)}
    arrays = {name: random.integers(0, 256, shape, np.uint8) for name, shape in labelled.items()}
    np.savez("labelled.npz", **arrays, y_train=np.arange(40) % 2, y_test=np.arange(20) % 2)

    done = steps()
    assert [kind for kind, _ in done].count("python") == 3
    assert len(done) >= 12
    for kind, text in done:
        if kind == "python":
            exec(text, {})
            continue
        words = shlex.split(text)
        if words[1] == "run":
            words = [*words[:3], *(word for word in words[3:] if not word.startswith("rounds=")), *SHORT]
        if "--fine-tune" in words:  # forty epochs of RandAugment: checked elsewhere
            words = words[: words.index("--fine-tune")]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == 0, (text, capsys.readouterr().err)
    assert "Images as the encoder sees them" in Path("runs/photos/report.html").read_text()
    assert "downstream_mine_knn" in Path("runs/measured/metrics.csv").read_text()
    with np.load("features.npz") as features:
        assert features["features"].shape == (60, 128)
        assert "older/00.png" in features["files"]
