"""The text of an exported folder's load.py."""

from __future__ import annotations

from typing import Any

from ..templates import fill_template


def load_script(config: dict[str, Any], stem_width: int | None = None) -> str:
    """Return the text of load.py, given config.json and the output channels of a ResNet's stem for small images."""
    ours = config["fedssl"]
    return fill_template(
        "fedssl.export",
        "load.py.jinja",
        timm="model_args" in config,
        stem_width=stem_width,
        channels=ours["image_shape"][0],
        shape=", ".join(map(str, ours["image_shape"])),
        features=config["num_features"],
        mean=ours["mean"][0],
        std=ours["std"][0],
    )
