"""LightlyTrain's side of `python -m benchmarks.own_images`, for an environment in which fedssl need not be installed.

It is run as a file with one argument, a JSON mapping: `step` is `train` or `embed`, the rest is named in `main`.
"""

import json
import sys
from typing import Any

import lightly_train
from torch import Tensor, nn


class SmallConvNet(nn.Module):
    """fedssl's `small_convnet`, or `small_convnet_512`, as LightlyTrain takes a network of one's own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        blocks: list[nn.Module] = []
        for before, width in ((3, 32), (32, 64), (64, 128), (128, features)):
            blocks += [nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.blocks, self.pool = nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1)

    def feature_dim(self) -> int:
        return self.features

    def forward_features(self, images: Tensor) -> dict[str, Tensor]:
        return {"features": self.blocks(images)}

    def forward_pool(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"pooled_features": self.pool(outputs["features"])}

    def get_model(self) -> nn.Module:
        return self.blocks


def main(options: dict[str, Any]) -> None:
    size = (options["size"], options["size"])
    if options["step"] == "embed":
        lightly_train.embed(
            out=options["output"],
            data=options["images"],
            checkpoint=f"{options['run']}/checkpoints/last.ckpt",
            format="torch",
            image_size=size,
            overwrite=True,
        )
        return
    network, widths = options["architecture"], {"small_convnet": 128, "small_convnet_512": 512}
    lightly_train.pretrain(
        out=options["run"],
        data=options["images"],
        model=SmallConvNet(widths[network]) if network in widths else f"timm/{network}",
        method="simclr",
        epochs=options["epochs"],
        batch_size=options["batch_size"],
        precision={"float32": "32-true", "bfloat16": "bf16-mixed"}[options["precision"]],
        transform_args={"image_size": size},
        seed=options["seed"],
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
