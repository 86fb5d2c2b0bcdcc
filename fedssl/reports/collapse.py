"""Collapse analysis of a run: how the representations of its global and its local models fill their space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedkernels import ViewKey

from ..augmentations.base import draw_views
from ..engines.rounds import models_to_evaluate
from ..evaluation.features import extract_features, extract_view_features, require_measured_images
from ..evaluation.metrics import alignment, effective_rank, uniformity
from ..evaluation.projections import log_covariance_singular_values, sphere_coverage, sphere_points, tsne_together
from ..federation import Federation
from ..models.model import Model
from ..randomness import generator_for, seed_for
from ..run.directory import RunDirectory

GLOBAL = "global"


#: the version of the fields below, as stored
FORMAT = 1


#: at most so many test images are represented, of which so many are in the t-SNE: enough for a picture
_TEST_IMAGES, _TSNE_IMAGES = 1000, 300


_LOCAL_MODELS = 5


@dataclass(frozen=True)
class Geometry:
    """How one model's representations of the test images lie in their space.

    Attributes:
        dimension: the length of a representation.
        log_singular_values: see `log_covariance_singular_values`.
        alignment: see `alignment`, of two augmented views of each test image, by the recipe's augmentation.
        uniformity: see `uniformity`, of the test images as they are.
        effective_rank: see `effective_rank`, of the test images as they are.
        sphere: see `sphere_points`, [images, 3].
        coverage: see `sphere_coverage`, in [0, 1].
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
        format: `FORMAT` of the version that made the analysis.
        round: the last committed round, whose models these are.
        class_names: the classes' names; without labels one name for all images.
        labels: the class of each test image that was represented; without a test set they are training images.
        models: by `global` (where the method has a global model) and by client number. A local model is a client's
            own after its training in the last round that it took part in, before the server joins anything.
        tsne: points in the plane of the first test images, [images, 2] each, by `global` and the first client; empty
            where the method has no global model.
    """

    format: int
    round: int
    class_names: list[str]
    labels: list[int]
    models: dict[str, Geometry]
    tsne: dict[str, list[list[float]]] = field(default_factory=dict)

    @property
    def local(self) -> list[Geometry]:
        """The local models'."""
        return [geometry for who, geometry in self.models.items() if who != GLOBAL]

    @property
    def shared(self) -> Geometry | None:
        """The global model's; None where each client keeps a model of its own."""
        return self.models.get(GLOBAL)


def analyse_collapse(federation: Federation, directory: RunDirectory) -> Collapse:
    """Represent test images by the models of a run's last committed round, and measure how they fill their space.

    Args:
        federation: the run's, see `build_federation`.
        directory: the run's folder, with at least one finished round.

    Raises:
        UserError: there are no images, a state cannot be read, or representations are not finite.
    """
    recipe, data = federation.recipe, federation.dataset
    require_measured_images(data)
    generator = generator_for(recipe.seed, "collapse", "images")
    measured = data.measured_images
    order = torch.randperm(len(measured), generator=generator)[:_TEST_IMAGES]
    images = measured[order]
    key = ViewKey(seed_for(recipe.seed, "collapse", "views"))
    views = draw_views(recipe.augmentation, images, order, key, federation.device)
    features: dict[str, Tensor] = {}
    models: dict[str, Geometry] = {}
    for who, model in _models(federation, directory):
        features[who] = extract_features(model.encoder, images)
        first, second = (extract_view_features(model.encoder, view) for view in views)
        models[who] = _geometry(features[who], first, second)
    return Collapse(
        FORMAT,
        directory.checkpoint.round,
        list(data.counted_as),
        (data.test_labels[order] if data.labelled else torch.zeros_like(order)).tolist(),
        models,
        _tsne(features, seed_for(recipe.seed, "collapse", "tsne")),
    )


def _models(federation: Federation, directory: RunDirectory) -> Iterator[tuple[str, Model]]:
    """The global model, where there is one, and then some local ones, where their states are in the run's folder."""
    if not federation.method.personal:
        yield from models_to_evaluate(federation, directory.server_state(), directory.client_state)
    if federation.method.personal or not directory.clients_elsewhere:
        for index in _some_clients(federation, directory):
            yield str(index), federation.client(index, directory.client_state(index)).model


def _tsne(features: Mapping[str, Tensor], seed: int) -> dict[str, list[list[float]]]:
    """One embedding of the first images by the global model and the first local one, see `Collapse.tsne`."""
    local = next((who for who in features if who != GLOBAL), None)
    if GLOBAL not in features or local is None:
        return {}
    of_global, of_local = (features[who][:_TSNE_IMAGES] for who in (GLOBAL, local))
    if len(of_global) <= 3:  # too few for any perplexity
        return {}
    points = tsne_together(of_global, of_local, seed)
    return {who: _rounded(where) for who, where in zip((GLOBAL, local), points, strict=True)}


def _some_clients(federation: Federation, directory: RunDirectory) -> list[int]:
    """Up to five clients, drawn from those whose states hold their models, with the latest ones first.

    Where a client's round starts from the server's weights, only the states of the last round hold its model.
    """
    rounds = directory.client_rounds
    if federation.method.starts_from_server:
        rounds = {k: number for k, number in rounds.items() if number == federation.recipe.rounds}
    order = torch.randperm(
        max(rounds, default=-1) + 1, generator=generator_for(federation.recipe.seed, "collapse", "clients")
    ).tolist()
    drawn = sorted(
        (k for k in order if k in rounds), key=lambda k: -rounds[k]
    )  # a stable sort: equal rounds keep the drawn order
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
