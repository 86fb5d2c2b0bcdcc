"""The text of an exported folder's load.py."""

from __future__ import annotations

from typing import Any

_HEAD = '''"""Load this encoder. It needs torch and timm (which brings safetensors), and nothing else."""

import json
from pathlib import Path
{imports}

FOLDER = Path(__file__).resolve().parent
CONFIG = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))


'''

_CONVNET = '''class SmallConvNet(torch.nn.Module):
    """Blocks of a 3x3 convolution, BatchNorm and ReLU, then the average over the spatial positions."""

    def __init__(self, channels, widths, strides):
        super().__init__()
        layers = []
        for width, stride in zip(widths, strides):
            convolution = torch.nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
            layers += [convolution, torch.nn.BatchNorm2d(width), torch.nn.ReLU()]
            channels = width
        self.blocks = torch.nn.Sequential(*layers)

    def forward(self, images):
        return self.blocks(images).mean(dim=(2, 3))


'''

_LOAD = '''def load_encoder():
    """The encoder in evaluation mode: normalised images [n, {shape}] to representations [n, {features}]."""
{build}
    encoder.load_state_dict(load_state_dict(FOLDER / "model.safetensors"), strict=True)
    return encoder.eval()


def normalize(pixels):
    """Pixels from 0 to 255, [n, {shape}], to what the encoder takes."""
    return (pixels.float() / 255 - {mean}) / {std}


if __name__ == "__main__":
    with torch.no_grad():
        print(load_encoder()(normalize(torch.zeros(1, {shape}, dtype=torch.uint8))).shape)
'''

_SMALL_STEM = """    # the stem for small images, which timm has no argument for
    encoder.conv1 = torch.nn.Conv2d({channels}, {width}, 3, stride=1, padding=1, bias=False)
    encoder.maxpool = torch.nn.Identity()"""


def load_script(config: dict[str, Any], stem_width: int | None = None) -> str:
    """Return the text of load.py, given config.json and the output channels of a ResNet's stem for small images."""
    ours = config["fedssl"]
    channels = ours["image_shape"][0]
    if "model_args" in config:
        imports, network = "\nimport timm", ""
        build = '    encoder = timm.create_model(CONFIG["architecture"], num_classes=0, **CONFIG["model_args"])'
        if stem_width is not None:
            build += "\n" + _SMALL_STEM.format(channels=channels, width=stem_width)
    else:
        imports, network = "", _CONVNET
        build = f'    encoder = SmallConvNet({channels}, CONFIG["fedssl"]["widths"], CONFIG["fedssl"]["strides"])'
    shape, mean, std = ", ".join(map(str, ours["image_shape"])), ours["mean"][0], ours["std"][0]
    load = _LOAD.format(shape=shape, features=config["num_features"], build=build, mean=mean, std=std)
    imports += "\nimport torch\nfrom timm.models import load_state_dict"
    return _HEAD.format(imports=imports) + network + load
