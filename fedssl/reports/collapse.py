"""Collapse analysis of a run: how the representations of its global and local models fill their space.

`analyse_collapse` analyses a run's last round, and `collapse_section` puts the analyses of several methods on a page.
The chart is that of FedU2's Figure 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from matplotlib.figure import Figure

from fedkernels import ViewKey

from ..augmentations.base import draw_views
from ..engines.rounds import models_to_evaluate
from ..evaluation.evaluate import measured_sample
from ..evaluation.features import extract_features, require_measured_images
from ..evaluation.metrics import alignment, effective_rank, uniformity
from ..evaluation.projections import log_covariance_singular_values
from ..federation import Federation
from ..models.model import Model
from ..randomness import generator_for, seed_for
from ..run_folder.directory import RunDirectory
from .page import PageSection, PageTable, page_figure
from .plots import MUTED, TEXT, draw_line, method_styles, name_lines, tidy

GLOBAL = "global"
_TEST_IMAGES = 1000  # that are represented at most: enough for a picture
_LOCAL_MODELS = 5
_SINGULAR_VALUES_CAPTION = (
    "The 100 largest singular values of the covariance matrix, natural logarithm. A line that falls off early means "
    "dimensional collapse; the dashed one is what uniform points on the sphere have."
)


@dataclass(frozen=True)
class Geometry:
    """Measures of one model's representations of the test images, by the functions of these names."""

    dimension: int  # of a representation
    log_singular_values: list[float]  # of their covariance
    alignment: float  # of two views of each image by the recipe's augmentation; all others without augmentation
    uniformity: float
    effective_rank: float


@dataclass(frozen=True)
class Collapse:
    """A run's collapse analysis.

    `models` has the geometries by `global` (if the method has a global model) and by client number. A local model is a
    client's own after its training in its last round, before the server aggregates.
    """

    images: int  # the number of represented images
    models: dict[str, Geometry]
    source: str = "test"  # of the images; "training" if there is no test set

    @property
    def local(self) -> list[Geometry]:
        return [geometry for who, geometry in self.models.items() if who != GLOBAL]

    @property
    def shared(self) -> Geometry | None:
        return self.models.get(GLOBAL)


def analyse_collapse(federation: Federation, directory: RunDirectory) -> Collapse:
    """Represent images with the models of a run's last committed round, and measure how they fill their space.

    They are those that the run's models are measured on, or a part of them: then one model has one effective rank.

    Raises:
        UserError: a state cannot be read, or representations are not finite.
    """
    recipe = federation.recipe
    require_measured_images(federation.dataset)
    data = measured_sample(federation.dataset, recipe.evaluation.images, seed_for(recipe.seed, "evaluation"))
    generator = generator_for(recipe.seed, "collapse", "images")
    order = torch.randperm(len(data.measured_images), generator=generator)[:_TEST_IMAGES]
    images = data.measured_images[order]
    key = ViewKey(seed_for(recipe.seed, "collapse", "views"))
    views = draw_views(recipe.augmentation, images, order, key, federation.device)
    models: dict[str, Geometry] = {}
    for who, model in _models(federation, directory):
        features = extract_features(model.encoder, images)
        first, second = (extract_features(model.encoder, view, lambda batch: batch) for view in views)
        models[who] = Geometry(
            dimension=features.shape[1],
            log_singular_values=log_covariance_singular_values(features).tolist(),
            alignment=alignment(first, second),
            uniformity=uniformity(features),
            effective_rank=effective_rank(features),
        )
    return Collapse(len(images), models, "test" if len(federation.dataset.test_images) else "training")


def _models(federation: Federation, directory: RunDirectory) -> Iterator[tuple[str, Model]]:
    """Yield the global model, if there is one, and up to five local ones, if the run's folder has their states.

    The local ones are drawn at random, those of the latest rounds first.
    """
    method, recipe = federation.method, federation.recipe
    if not method.personal:
        yield from models_to_evaluate(federation, directory.server_state(), directory.client_state)
        if directory.clients_elsewhere:
            return
    rounds = directory.client_rounds
    if method.starts_from_server:  # only the states of the last round hold the clients' models
        rounds = {k: number for k, number in rounds.items() if number == recipe.rounds}
    generator = generator_for(recipe.seed, "collapse", "clients")
    drawn = torch.randperm(max(rounds, default=-1) + 1, generator=generator).tolist()
    # a stable sort: clients of the same round keep the drawn order
    for index in sorted((k for k in drawn if k in rounds), key=lambda k: -rounds[k])[:_LOCAL_MODELS]:
        yield str(index), federation.client(index, directory.client_state(index)).model


def draw_log_singular_values(analyses: Mapping[str, Collapse]) -> Figure:
    """Draw the largest singular values of the covariance of the global and of the local models (FedU2, Figure 3).

    The dashed line is that of as many points drawn uniformly from the sphere of the first method's dimension.
    """
    styles = method_styles(list(analyses))
    shared = any(analysis.shared for analysis in analyses.values())
    titles = ("global model", "local models, mean") if shared else ("local models, mean",)
    figure = Figure(figsize=(5.0 * len(titles) + 0.6, 3.7 + 0.1 * len(analyses)), layout="constrained")
    grid = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    first = next(iter(analyses.values()))
    dimension = next(iter(first.models.values())).dimension
    uniform = torch.randn(first.images, dimension, generator=torch.Generator().manual_seed(0))
    reference = log_covariance_singular_values(uniform).numpy()
    for axes, title in zip(grid, titles, strict=True):
        for label, analysis in analyses.items():
            is_global = title == "global model"
            lines = [one.log_singular_values for who, one in analysis.models.items() if (who == GLOBAL) == is_global]
            if lines:
                fewest = min(map(len, lines))
                mean = np.mean([line[:fewest] for line in lines], axis=0)
                draw_line(axes, np.arange(1, fewest + 1), mean, label, styles[label])
        axes.plot(np.arange(1, len(reference) + 1), reference, color=MUTED, ls=(0, (4, 3)), lw=1.2)
        axes.set_title(title, fontsize=12, loc="left", color=TEXT)
        axes.set_xlabel("index of the singular value", fontsize=11)
        tidy(axes)
    grid[0].set_ylabel("log of the singular value", fontsize=11)
    look = {"textcoords": "offset points", "ha": "right", "va": "bottom", "size": 9.5, "color": MUTED}
    grid[0].annotate("uniform on the sphere", (len(reference), reference[len(reference) // 2]), (0, 4), **look)
    name_lines(figure, grid[-1], len(styles))
    return figure


def collapse_section(analyses: Mapping[str, Collapse | str]) -> PageSection | None:
    """Return the report's section about the methods' analyses, or the reasons why there are none; None without any."""
    if not analyses:
        return None
    shown = {name: analysis for name, analysis in analyses.items() if not isinstance(analysis, str)}
    warnings = [f"{name}: no collapse analysis: {why}" for name, why in analyses.items() if isinstance(why, str)]
    if not shown:
        return PageSection(warnings)
    singular_values = draw_log_singular_values(shown)
    figure = page_figure(singular_values, "Log singular values of the covariance", _SINGULAR_VALUES_CAPTION)
    images = ", ".join(dict.fromkeys(f"{analysis.images} {analysis.source} images" for analysis in shown.values()))
    return PageSection(warnings, [figure], _table(shown), images)


def _table(analyses: Mapping[str, Collapse]) -> PageTable:
    rows = []
    for name, analysis in analyses.items():
        local = f"mean of {len(analysis.local)} local models" if len(analysis.local) > 1 else "a local model"
        shared = [analysis.shared] if analysis.shared else []
        for model, geometries in (("global model", shared), (local, analysis.local)):
            if geometries:
                cells = (
                    f"{fmean(one.alignment for one in geometries):.3f}",
                    f"{fmean(one.uniformity for one in geometries):.2f}",
                    f"{fmean(one.effective_rank for one in geometries):.1f}",
                )
                rows.append((name, model, *cells))
    header = ("method", "model", "alignment", "uniformity", "effective rank")
    return PageTable(header, rows, text_columns=2)
