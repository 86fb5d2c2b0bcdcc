"""The report's section about collapse: how the representations of each method's first finished run fill their space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from .collapse import Collapse, Geometry
from .collapse_plots import draw_log_singular_values, draw_spheres, draw_tsne
from .page import PageFigure, PageTable, page_figure

_HEADER = ("method", "model", "alignment", "uniformity", "effective rank", "sphere covered (%)")
_SINGULAR_VALUES_CAPTION = (
    "The 100 largest singular values of the covariance matrix, natural logarithm. A line that falls off early means "
    "dimensional collapse; the dashed one is what uniform points on the sphere have."
)
_SPHERE_CAPTION = (
    "Representations projected onto their three main directions and onto the sphere again, coloured by class; points "
    "on the far side are pale. The more of the sphere is blank, the worse the collapse. An encoder that ends in a ReLU "
    "has no negative outputs, so even without collapse its points keep to one side."
)
_TSNE_CAPTION = (
    "t-SNE of the same test images as the global model (circles) and one local model (crosses) represent them. Where "
    "both mix, the models share one representation space; distances between groups mean nothing."
)


@dataclass(frozen=True)
class CollapseSection:
    """What the section shows.

    Attributes:
        warnings: which methods have no analysis, and why.
        images: the number of test images; several numbers where methods differ.
        table: the measures of each method's models; None where no method has an analysis.
        figures: the charts.
    """

    warnings: Sequence[str]
    images: str
    table: PageTable | None
    figures: Sequence[PageFigure]


def collapse_section(analyses: Mapping[str, Collapse | str]) -> CollapseSection | None:
    """The section; None where there is no analysis.

    Args:
        analyses: by method, its analysis, or a text that says why there is none.
    """
    if not analyses:
        return None
    warnings = [
        f"{name}: no collapse analysis: {problem}" for name, problem in analyses.items() if isinstance(problem, str)
    ]
    shown = {name: analysis for name, analysis in analyses.items() if not isinstance(analysis, str)}
    if not shown:
        return CollapseSection(warnings, "", None, ())
    images = ", ".join(dict.fromkeys(str(len(analysis.labels)) for analysis in shown.values()))
    return CollapseSection(warnings, images, PageTable(_HEADER, _rows(shown), text_columns=2), _figures(shown))


def _rows(analyses: Mapping[str, Collapse]) -> list[tuple[str, ...]]:
    rows = []
    for name, analysis in analyses.items():
        if analysis.shared:
            rows.append((name, "global model", *_mean_measures([analysis.shared])))
        count = len(analysis.local)
        if count:
            model = f"mean of {count} local models" if count > 1 else "a local model"
            rows.append((name, model, *_mean_measures(analysis.local)))
    return rows


def _mean_measures(models: Sequence[Geometry]) -> list[str]:
    """The means over the models, as the cells below `_HEADER`."""
    return [
        f"{fmean(model.alignment for model in models):.3f}",
        f"{fmean(model.uniformity for model in models):.2f}",
        f"{fmean(model.effective_rank for model in models):.1f}",
        f"{fmean(100 * model.coverage for model in models):.0f}",
    ]


def _figures(analyses: Mapping[str, Collapse]) -> list[PageFigure]:
    singular_values, spheres = draw_log_singular_values(analyses), draw_spheres(analyses)
    figures = [
        page_figure(singular_values, "Log singular values of the covariance", _SINGULAR_VALUES_CAPTION),
        page_figure(spheres, "Representations on the sphere", _SPHERE_CAPTION, png=True),
    ]
    tsne = draw_tsne(analyses)
    if tsne is not None:
        figures.append(page_figure(tsne, "t-SNE of global and local representations", _TSNE_CAPTION, png=True))
    return figures
