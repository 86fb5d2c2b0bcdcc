"""``python -m benchmarks.search_presets TRIALS``: which figure without labels follows accuracy, over a sweep's trials.

    fedssl sweep benchmarks/search_presets.yaml data.path=cifar10_small.npz --jobs 2
    python -m benchmarks.search_presets runs/search_presets/trials

prints Spearman's rank correlation, over all finished trials of that folder, of what was measured without labels on the
validation images with kNN and linear accuracy there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy.stats import spearmanr

from fedkernels import ViewKey
from fedssl.augmentations.base import draw_views
from fedssl.augmentations.random_views import RandomViews
from fedssl.data.datasets import load_dataset
from fedssl.data.options import DataOptions
from fedssl.evaluation.features import extract_features
from fedssl.evaluation.metrics import view_retrieval
from fedssl.export.trained_encoder import encoder_of_run
from fedssl.run_folder.record import Run, read_run

_IMAGES, _VIEWS = 1000, 10  # LiDAR takes ten views of each of 1,000 images


def measured_without_labels(run: Run) -> dict[str, float]:
    """Return view retrieval, RankMe and LiDAR of a run's encoder, over views that are the same for all trials.

    RankMe is Garrido et al. 2023, equation 1: the effective rank, without centring. LiDAR is Thilak et al. 2024,
    equations 1 to 4, with each image as a class of ten views and delta 1e-4: the effective rank of
    Sw^(-1/2) Sb Sw^(-1/2), Sb and Sw the covariances between and within the images.
    """
    network = encoder_of_run(run.path, 0).encoder.network
    images = load_dataset(DataOptions.model_validate(run.recipe["data"]), run.seed).test_images[:_IMAGES]
    in_colour = {"saturation": 0.4, "hue": 0.1, "grayscale": 0.2} if images.shape[1] == 3 else {}
    views = RandomViews(flip=0.5, crop_scale=(0.2, 1.0), brightness=0.4, contrast=0.4, **in_colour)
    rows, drawn = torch.arange(len(images)), []
    for number in range(_VIEWS // 2):
        pair = draw_views(views, images, rows, ViewKey(number), torch.device("cpu"))
        drawn += [extract_features(network, view, prepare=lambda batch: batch).double() for view in pair]
    features = torch.stack(drawn, dim=1)  # [images, views, d]

    def rank(values: torch.Tensor) -> float:
        share = values / values.sum() + 1e-7
        return float((-share * share.log()).sum().exp())

    means = features.mean(dim=1)
    within = (features - means[:, None]).flatten(0, 1)
    centred = means - means.mean(dim=0)
    size = features.shape[2]
    of_within = within.T @ within / (len(within) - len(means)) + 1e-4 * torch.eye(size, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(of_within)
    whitened = centred @ (vectors * values.rsqrt()) @ vectors.T
    return {
        "view_retrieval, equal views": view_retrieval(drawn[:2]) or 0.0,
        "RankMe": rank(torch.linalg.svdvals(drawn[0])),
        "LiDAR": rank(torch.linalg.svdvals(whitened).square()),
    }


def figures_of(run: Run) -> dict[str, float]:
    """Return all figures of a finished run that no label has part in, by name."""
    own = {name: run.evaluated(name, "after") for name in ("view_retrieval", "effective_rank", "loss")}
    figures = {name: value for name, value in own.items() if value is not None}
    if of_pixels := run.evaluated("pixel_view_retrieval", "after"):
        figures["view_retrieval beside pixels"] = figures["view_retrieval"] / of_pixels
    return figures | measured_without_labels(run)


def correlations(runs: Sequence[Run]) -> str:
    """Return Spearman's rank correlation of each figure without labels with accuracy, over all runs."""
    rows = ["| trials | figure | with kNN | with linear |", "|---:|---|---:|---:|"]
    figures = [figures_of(run) for run in runs]
    accuracies = [[run.evaluated(name, "after") for run in runs] for name in ("knn", "linear")]
    for name in figures[0]:
        values = [of_run[name] for of_run in figures]
        cells = [f"{spearmanr(values, accuracy).statistic:.2f}" for accuracy in accuracies]
        rows.append(f"| {len(runs)} | {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of a folder of trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=Path, help="the folder of a sweep's trials")
    options = parser.parse_args(arguments)
    runs = [read_run(file.parent) for file in sorted(options.trials.rglob("recipe.yaml"))]
    finished = [run for run in runs if run.finished]
    if len(finished) < 3:
        parser.error(f"{options.trials} has {len(finished)} finished trials: a correlation takes at least three")
    print(correlations(finished))


if __name__ == "__main__":
    main()
