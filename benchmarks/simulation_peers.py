"""Local training by fedssl, by lightly's own loop and with kornia's views: one network, one batch, the same images.

All of them use the same operations in their views with the same probabilities (BYOL's colour jitter, crops from a fifth
of the image, a blur in half of the views), symmetric losses, SGD with momentum, and heads of the same sizes.

- fedssl: a client's local training as a run calls it, on noise.
- lightly: its transform image by image in a DataLoader with two workers that stay, its heads, loss and update of the
  target network, as in its tutorials.
- kornia: its augmentation of whole batches, in a plain loop around fedssl's objective.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.bench_two_views import kornia_transform
from fedkernels import ViewOptions
from fedssl.client import Client, LocalRound
from fedssl.data.datasets import Dataset as Images
from fedssl.federation import Federation, build_federation
from fedssl.messages import Message
from fedssl.models.encoders import build_encoder
from fedssl.recipe.reading import load_recipe
from fedssl.training import train_locally

LOOPS = ("fedssl", "lightly", "kornia")
RECIPES = {"byol": "fedbyol", "simsiam": "fedsimsiam", "simclr": "fedsimclr"}
SIDE = 32
HIDDEN, FEATURES, BOTTLENECK = 512, 128, 64  # of the heads
TEMPERATURE, MOMENTUM = 0.5, 0.99  # of SimCLR's loss, of BYOL's target network
VIEWS = ViewOptions()  # also the defaults of fedssl's recipes
WORKERS = 2


@dataclass(frozen=True)
class LocalTraining:
    """What everyone trains.

    Attributes:
        objective: a key of `RECIPES`.
        architecture: an encoder's name.
        batch_size: images a step.
        steps: of one pass over the images.
        device: where the network is.
    """

    objective: str
    architecture: str
    batch_size: int
    steps: int
    device: str

    @property
    def title(self) -> str:
        return f"{self.objective}, {self.architecture}, batch {self.batch_size}"

    @property
    def images(self) -> int:
        return self.batch_size * self.steps


def _nothing_to_close() -> None:
    return None


@dataclass(frozen=True)
class Loop:
    """One implementation: `run` trains once on all images; `parameters` is how many numbers it trains.

    `close` ends what it has started.
    """

    run: Callable[[], object]
    parameters: int
    close: Callable[[], None] = _nothing_to_close


def missing_package(name: str) -> str | None:
    """Why an implementation cannot run, or None."""
    return None if name == "fedssl" or find_spec(name) else "not installed"


def make_loop(name: str, training: LocalTraining, overrides: list[str], loader_workers: int = WORKERS) -> Loop:
    """The loop of `fedssl`, `lightly` or `kornia`.

    Args:
        name: whose.
        training: what it trains.
        overrides: settings of the recipe, for fedssl alone.
        loader_workers: of the DataLoader, for lightly alone.
    """
    if name == "lightly":
        return _lightly(training, loader_workers)
    return _fedssl(training, overrides) if name == "fedssl" else _kornia(training)


# fedssl


def training_federation(training: LocalTraining, overrides: list[str]) -> Federation:
    """One client with all images, without a preset."""
    heads = {
        "byol": [f"objective.hidden_features={HIDDEN}", "objective.symmetric=true"],
        "simsiam": [f"objective.bottleneck_features={BOTTLENECK}"],
        "simclr": [f"objective.hidden_features={HIDDEN}", f"objective.temperature={TEMPERATURE}"],
    }
    settings = [
        f"device={training.device}",
        "preset=none",
        "rounds=1",
        f"architectures=[{training.architecture}]",
        "partition={name: iid, clients: 1}",
        f"objective.output_features={FEATURES}",
        f"training={{local_epochs: 1, batch_size: {training.batch_size}, learning_rate: 0.032}}",
    ]
    recipe = load_recipe(RECIPES[training.objective], [*settings, *heads[training.objective], *overrides])
    labels = torch.arange(training.images) % 10
    images = noise(training.images)
    names = tuple(map(str, range(10)))
    return build_federation(recipe, Images("noise", images, labels, images[:10], labels[:10], names, None))


def _fedssl(training: LocalTraining, overrides: list[str]) -> Loop:
    federation = training_federation(training, overrides)
    method, client = federation.method, federation.client(0, Message())

    def train() -> None:
        local = LocalRound(client, Message(), 1, 0, method.objective, method.augmentation)
        train_locally(local, method.training, (), rounds=1)
        local.logged()  # the losses are read from the device

    return Loop(train, _trained(client.model))


# kornia


def _kornia(training: LocalTraining) -> Loop:
    federation = training_federation(training, [])
    objective, device = federation.method.objective, federation.device
    client: Client = federation.client(0, Message())
    model, images, views = client.model, client.images, kornia_transform(SIDE, SIDE)
    optimizer = _sgd(model)

    def train() -> Tensor:
        total = torch.zeros((), device=device)
        for rows in torch.randperm(len(images)).split(training.batch_size):
            batch = images[rows].to(device).float() / 255
            step = objective.step(model, (views(batch), views(batch)), client.labels[rows].to(device))
            optimizer.zero_grad()
            step.loss.backward()
            optimizer.step()
            objective.after_step(model)
            total += step.loss.detach()
        return total.cpu()

    return Loop(train, _trained(model))


# lightly


class _Pairs(Dataset[list[Tensor]]):
    """Two views of each image, one image at a time."""

    def __init__(self, images: Tensor):
        functional = importlib.import_module("torchvision.transforms.functional")
        module = importlib.import_module("lightly.transforms.byol_transform")
        settings = {
            "input_size": SIDE,
            "cj_prob": VIEWS.jitter_probability,
            "cj_bright": VIEWS.brightness,
            "cj_contrast": VIEWS.contrast,
            "cj_sat": VIEWS.saturation,
            "cj_hue": VIEWS.hue,
            "min_scale": VIEWS.crop_scale[0],
            "random_gray_scale": VIEWS.grayscale,
            "gaussian_blur": VIEWS.blur,
            "solarization_prob": VIEWS.solarize,
            "sigmas": VIEWS.blur_sigma,
            "hf_prob": VIEWS.flip,
            "normalize": {"mean": [0.5] * 3, "std": [0.25] * 3},
        }
        first, second = module.BYOLView1Transform(**settings), module.BYOLView2Transform(**settings)
        self.transform: Any = module.BYOLTransform(first, second)
        self.images = [functional.to_pil_image(image) for image in images]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> list[Tensor]:
        views: list[Tensor] = self.transform(self.images[index])
        return views


def _lightly(training: LocalTraining, workers: int) -> Loop:
    device = torch.device(training.device)
    loader = DataLoader(
        _Pairs(noise(training.images)),
        batch_size=training.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )
    encoder = build_encoder(training.architecture, 3, SIDE)
    model, loss_of, after_step = _LIGHTLY[training.objective](encoder, device)
    optimizer = _sgd(model)

    def batches() -> Iterator[list[Tensor]]:
        for views in loader:
            yield [view.to(device, non_blocking=True) for view in views]

    def train() -> Tensor:
        total = torch.zeros((), device=device)
        for first, second in batches():
            loss = loss_of(first, second)
            total += loss.detach()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step()
        return total.cpu()

    return Loop(train, _trained(model))


Losses = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], Callable[[], None]]


def _lightly_byol(encoder: nn.Module, device: torch.device) -> Losses:
    heads = importlib.import_module("lightly.models.modules")
    update_momentum = importlib.import_module("lightly.models.utils").update_momentum
    criterion = importlib.import_module("lightly.loss").NegativeCosineSimilarity()
    width = encoder.num_features
    below = nn.Sequential(encoder, heads.BYOLProjectionHead(width, HIDDEN, FEATURES)).to(device)
    predictor = heads.BYOLPredictionHead(FEATURES, HIDDEN, FEATURES).to(device)
    target = copy.deepcopy(below).requires_grad_(False)

    def loss_of(first: Tensor, second: Tensor) -> Tensor:
        predictions = [predictor(below(view)) for view in (first, second)]
        with torch.no_grad():
            targets = [target(view) for view in (first, second)]
        loss: Tensor = 0.5 * (criterion(predictions[0], targets[1]) + criterion(predictions[1], targets[0]))
        return loss

    return nn.Sequential(below, predictor), loss_of, lambda: update_momentum(below, target, MOMENTUM)


def _lightly_simsiam(encoder: nn.Module, device: torch.device) -> Losses:
    heads = importlib.import_module("lightly.models.modules")
    criterion = importlib.import_module("lightly.loss").NegativeCosineSimilarity()
    width = encoder.num_features
    below = nn.Sequential(encoder, heads.SimSiamProjectionHead(width, FEATURES, FEATURES)).to(device)
    predictor = heads.SimSiamPredictionHead(FEATURES, BOTTLENECK, FEATURES).to(device)

    def loss_of(first: Tensor, second: Tensor) -> Tensor:
        z0, z1 = below(first), below(second)
        loss: Tensor = 0.5 * (criterion(predictor(z0), z1.detach()) + criterion(predictor(z1), z0.detach()))
        return loss

    return nn.Sequential(below, predictor), loss_of, lambda: None


def _lightly_simclr(encoder: nn.Module, device: torch.device) -> Losses:
    heads = importlib.import_module("lightly.models.modules")
    criterion = importlib.import_module("lightly.loss").NTXentLoss(temperature=TEMPERATURE)
    # BYOL's projector is that of fedssl's SimCLR: lightly's own for SimCLR ends in another BatchNorm
    model = nn.Sequential(encoder, heads.BYOLProjectionHead(encoder.num_features, HIDDEN, FEATURES)).to(device)

    def loss_of(first: Tensor, second: Tensor) -> Tensor:
        loss: Tensor = criterion(model(first), model(second))
        return loss

    return model, loss_of, lambda: None


_LIGHTLY: dict[str, Callable[[nn.Module, torch.device], Losses]] = {
    "byol": _lightly_byol,
    "simsiam": _lightly_simsiam,
    "simclr": _lightly_simclr,
}


def noise(count: int) -> Tensor:
    """Images of noise, uint8 [count, 3, 32, 32]."""
    return torch.randint(0, 256, (count, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def _sgd(model: nn.Module) -> torch.optim.SGD:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.032, momentum=0.9, weight_decay=5e-4)


def _trained(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
