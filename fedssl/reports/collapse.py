"""Collapse analysis of a finished run: how its global and its local models' representations fill their space.

RUN/collapse.json    what was found, see `Collapse`
RUN/figures/*.png    the pictures of FedU2's Figures 3, 4 and 5
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..data.augmentation import two_views
from ..engines.rounds import models_to_evaluate
from ..evaluation.alignment import alignment
from ..evaluation.features import extract_features, extract_view_features
from ..evaluation.spectrum import effective_rank, log_covariance_singular_values
from ..evaluation.sphere import sphere_coverage, sphere_points
from ..evaluation.tsne import tsne_together
from ..evaluation.uniformity import uniformity
from ..federation import Federation, build_federation
from ..models.model import Model
from ..randomness import generator_for, seed_for
from ..reading import load_recipe
from ..run_directory import RunDirectory
from ..storage import cannot_write, write_atomically

GLOBAL = "global"
#: test images that are looked at, of these those in the t-SNE, and local models: enough for a picture
_IMAGES, _TSNE_IMAGES, _LOCAL_MODELS = 1000, 300, 5
_FILE, _FORMAT = "collapse.json", 1


@dataclass(frozen=True)
class Geometry:
    """How one model's representations of the test images lie.

    Attributes:
        dimension: of a representation.
        log_singular_values: see `log_covariance_singular_values`.
        alignment: of two augmented views of each test image, by the recipe's augmentation.
        uniformity, effective_rank: of the images as they are.
        sphere: see `sphere_points`; a point an image.
        coverage: see `sphere_coverage`.
    """

    dimension: int
    log_singular_values: list[float]
    alignment: float
    uniformity: float
    effective_rank: float
    sphere: list[list[float]]
    coverage: float


@dataclass(frozen=True)
class Collapse:
    """A run's collapse analysis.

    Attributes:
        format, round: of the file, and the last round, whose models these are.
        class_names, labels: the classes, and that of each test image looked at.
        models: by `global` (where the method has a global model) and by client number. A local model is a client's
            own after its training in the last round that it took part in, before the server joins anything.
        tsne: points in the plane of the first images, by `global` and the first client; empty without a global model.
    """

    format: int
    round: int
    class_names: list[str]
    labels: list[int]
    models: dict[str, Geometry]
    tsne: dict[str, list[list[float]]] = field(default_factory=dict)

    @property
    def local(self) -> list[Geometry]:
        return [geometry for who, geometry in self.models.items() if who != GLOBAL]

    @property
    def shared(self) -> Geometry | None:
        """The global model's; None where each client has a model of its own."""
        return self.models.get(GLOBAL)


def collapse_of_run(path: Path) -> Collapse | None:
    """The stored analysis of a run's last round; done now, and stored, where there is none. None before any training.

    Raises:
        UserError: data that are no longer there, a state that cannot be read, representations that are not finite.
    """
    directory = RunDirectory.open(path)
    checkpoint = directory.checkpoint
    if checkpoint.round < 1 or not checkpoint.files:
        return None
    stored = _read(path / _FILE)
    if stored is not None and stored.round == checkpoint.round:
        return stored
    found = _analyse(build_federation(load_recipe(path / "recipe.yaml")), directory)
    _write(found, path)
    return found


def _analyse(federation: Federation, directory: RunDirectory) -> Collapse:
    recipe, data = federation.recipe, federation.dataset
    order = torch.randperm(len(data.test_images), generator=generator_for(recipe.seed, "collapse", "images"))[:_IMAGES]
    images = data.test_images[order]
    views = two_views(images, recipe.augmentation, generator_for(recipe.seed, "collapse", "views"))
    features: dict[str, Tensor] = {}
    models: dict[str, Geometry] = {}

    def look(who: str, model: Model) -> None:
        encoder, device = model.encoder, model.device
        features[who] = extract_features(encoder, images, device=device)
        pair = [extract_view_features(encoder, view, device=device) for view in views]
        models[who] = _geometry(features[who], pair[0], pair[1])

    if not federation.method.personal:
        for who, model in models_to_evaluate(federation, directory.server_state(), directory.client_state):
            look(who, model)
    if federation.method.personal or not directory.clients_elsewhere:
        for k in _some_clients(directory, recipe.seed):
            look(str(k), federation.client(k, directory.client_state(k)).model)
    labels = data.test_labels[order].tolist()
    local = next((who for who in models if who != GLOBAL), None)
    tsne: dict[str, list[list[float]]] = {}
    if GLOBAL in features and local is not None:
        both = [features[who][:_TSNE_IMAGES] for who in (GLOBAL, local)]
        if len(both[0]) > 3:
            points = tsne_together(both[0], both[1], seed_for(recipe.seed, "collapse", "tsne"))
            tsne = {who: _rounded(where) for who, where in zip((GLOBAL, local), points, strict=True)}
    return Collapse(_FORMAT, directory.checkpoint.round, list(data.class_names), labels, models, tsne)


def _some_clients(directory: RunDirectory, seed: int) -> list[int]:
    """Up to five clients, drawn from those with the latest states, so from the last round where that has enough."""
    rounds = {
        int(owner.removeprefix("client-")): int(name.split(".round-")[1].partition(".")[0])
        for owner, name in directory.checkpoint.files.items()
        if owner.startswith("client-")
    }
    order = torch.randperm(max(rounds, default=-1) + 1, generator=generator_for(seed, "collapse", "clients")).tolist()
    drawn = sorted((k for k in order if k in rounds), key=lambda k: -rounds[k])  # stable: ties keep the drawn order
    return drawn[:_LOCAL_MODELS]


def _geometry(features: Tensor, first: Tensor, second: Tensor) -> Geometry:
    points = sphere_points(features)
    return Geometry(
        dimension=features.shape[1],
        log_singular_values=[round(value, 4) for value in log_covariance_singular_values(features).tolist()],
        alignment=alignment(first, second),
        uniformity=uniformity(features),
        effective_rank=effective_rank(features),
        sphere=_rounded(points),
        coverage=sphere_coverage(points),
    )


def _rounded(points: Tensor) -> list[list[float]]:
    return [[round(value, 3) for value in point] for point in points.tolist()]


def _read(path: Path) -> Collapse | None:
    """A stored analysis; None where there is none of this format."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.get("format") != _FORMAT:
            return None
        models = {who: Geometry(**geometry) for who, geometry in values.pop("models").items()}
        return Collapse(models=models, **values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(found: Collapse, path: Path) -> None:
    from .collapse_plots import draw_log_singular_values, draw_spheres, draw_tsne

    folder = path / "figures"
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    one = {path.name: found}
    for name, figure in (
        ("log_singular_values", draw_log_singular_values(one)),
        ("sphere", draw_spheres(one)),
        ("tsne", draw_tsne(one)),
    ):
        if figure is not None:
            data = io.BytesIO()
            figure.savefig(data, format="png", dpi=150)
            write_atomically(folder / f"{name}.png", data.getvalue())
    write_atomically(path / _FILE, json.dumps(asdict(found)).encode())  # last: the figures are there where it is
