"""``python -m benchmarks.search_presets``: the same number of random trials for each objective, for the presets.

    python -m benchmarks.search_presets --data FOLDER --sets cifar10 --trials 12 --jobs 2

A trial draws optimiser, rate, weight decay, batch, head, views and the objective's own options from `RANGES` by its
number, trains without labels on training images alone, and is measured on other training images; test images are never
read. It also writes what can be measured without labels, so that `correlations` can tell which of these follows
accuracy: what a run measures before and after (`view_retrieval` with the trial's own views), and three figures of the
trained encoder with views that are the same in all trials. Each finished trial is a line of OUTPUT/trials.csv; the same
command goes on with those that are missing. FOLDER has the .npz files of `SETS`.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.measure import ROOT
from benchmarks.write import replace

#: file, training images and validation images that are drawn from its training images
SETS = {
    "cifar10": ("cifar10_small.npz", 8000, 2000),
    "fashion_mnist": ("fashion_mnist_full.npz", 8000, 2000),
    "mednist": ("mednist28_full.npz", 8000, 2000),
    "breastmnist": ("breastmnist28_full.npz", 426, 120),
}
#: what a trial draws, whatever the objective
RANGES: dict[str, Sequence[Any]] = {
    "training.optimizer": ["adamw", "adamw", "adamw", "sgd"],
    "training.learning_rate": [5e-4, 1e-3, 2e-3, 4e-3],  # of adamw; sgd takes 30 times as much
    "training.weight_decay": [1e-6, 1e-4, 1e-2],
    "training.batch_size": [32, 64, 128, 256],
    "augmentation.crop_scale": [[0.08, 1.0], [0.2, 1.0], [0.35, 1.0]],
    "jitter": [0.5, 1.0, 2.0],  # times the preset's
    "objective.hidden_features": [256, 512, 1024],
}
_SGD = 30
_HALF_LIVES = [10, 40, 160]  # of a target network, in steps
#: what a trial draws beside, by objective
OWN_RANGES: dict[str, dict[str, Sequence[Any]]] = {
    "simclr": {"temperature": [0.1, 0.2, 0.5]},
    "moco_v3": {"temperature": [0.1, 0.2, 0.5], "half_life": _HALF_LIVES},
    "byol": {"half_life": _HALF_LIVES, "symmetric": [True, False]},
    "simsiam": {"bottleneck_features": [64, 128]},
    "lejepa": {"weight": [0.02, 0.05, 0.2], "output_features": [32, 64, 128]},
    "vicreg": {"covariance_weight": [0.5, 1.0, 2.0], "output_features": [256, 512]},
    "barlow_twins": {"off_diagonal_weight": [2e-3, 5e-3, 2e-2], "output_features": [256, 512]},
    "dino": {"half_life": _HALF_LIVES, "teacher_temperature": [0.04, 0.06]},
}
#: measured without labels
UNLABELLED = ("view_retrieval", "effective_rank", "loss")
#: measured without labels after training, with the views of `measured_without_labels`
OF_ENCODER = ("equal_view_retrieval", "rankme", "lidar")
_IMAGES, _VIEWS = 1000, 10  # LiDAR takes ten views of each of 1,000 images


def trial(objective: str, number: int) -> dict[str, Any]:
    """Return what a trial draws; its number and the objective decide it."""
    generator = np.random.default_rng([number, *objective.encode()])
    ranges = RANGES | {f"objective.{key}": values for key, values in OWN_RANGES[objective].items()}
    if objective == "simsiam":
        del ranges["objective.hidden_features"]  # it has none
    return {key: values[int(generator.integers(len(values)))] for key, values in ranges.items()}


def overrides(drawn: Mapping[str, Any], objective: str, seen: int, images: int) -> list[str]:
    """Return a trial's settings as overrides of the recipe."""
    settings = dict(drawn)
    if settings["training.optimizer"] == "sgd":
        settings["training.learning_rate"] *= _SGD
    strength = settings.pop("jitter")
    for key, usual in (("brightness", 0.4), ("contrast", 0.4), ("saturation", 0.4), ("hue", 0.1)):
        settings[f"augmentation.{key}"] = usual * strength
    if half_life := settings.pop("objective.half_life", None):
        settings["objective.target_momentum"] = round(0.5 ** (1 / half_life), 5)
    settings["training.batch_size"] = min(settings["training.batch_size"], images // 4)
    steps = seen // settings["training.batch_size"]
    settings |= {"rounds": 10, "training.local_steps": max(1, steps // 10), "checkpoints": 1}
    settings |= {"training.learning_rate_schedule": "warmup_cosine", "evaluation.images": "null"}
    return [f"{key}={value}" for key, value in settings.items()]


def split(file: Path, train: int, validation: int, output: Path) -> None:
    """Write training and validation images, both drawn from the training images of a file."""
    with np.load(file) as arrays:
        images, labels = arrays["x_train"], arrays["y_train"].reshape(-1)
    order = np.random.default_rng(0).permutation(len(images))
    held, kept = order[:validation], order[validation : validation + train]
    np.savez(output, x_train=images[kept], y_train=labels[kept], x_test=images[held], y_test=labels[held])


def run_trial(file: Path, of_set: str, objective: str, number: int, network: str, seen: int, images: int) -> dict:
    """Train one trial in a temporary folder, and return its line of trials.csv."""
    import torch

    import fedssl

    torch.set_num_threads(1)
    drawn = trial(objective, number)
    line: dict[str, Any] = {"set": of_set, "objective": objective, "trial": number, "network": network, "seen": seen}
    line |= {key: drawn.get(key, "") for key in columns() if "." in key or key == "jitter"}
    folder = Path(tempfile.mkdtemp())
    try:
        settings = overrides(drawn, objective, seen, images)
        data = [f"data={{name: npz, path: {file}}}", f"architectures=[{network}]", f"objective.name={objective}"]
        recipe = fedssl.load_recipe("centralised_simclr", [*data, *settings])
        run = fedssl.run(recipe, folder / "run")
        line |= measured_without_labels(folder / "run", file)
        for name in ("knn", "linear", *UNLABELLED, "pixel_view_retrieval"):
            for when, at in (("before", 0), ("after", run.rounds)):
                value = run.overall(name).get(at)
                line[f"{name}_{when}"] = "" if value is None else f"{value:.4g}"
    except fedssl.UserError as error:  # diverged
        line["knn_after"] = line["linear_after"] = "nan"
        line["problem"] = str(error)[:120]
    finally:
        shutil.rmtree(folder)
    return line


def measured_without_labels(run: Path, file: Path) -> dict[str, str]:
    """Return view retrieval, RankMe and LiDAR of a run's encoder, over views that are the same for all trials.

    RankMe is Garrido et al. 2023, equation 1: the effective rank, without centring. LiDAR is Thilak et al. 2024,
    equations 1 to 4, with each image as a class of ten views and delta 1e-4: the effective rank of
    Sw^(-1/2) Sb Sw^(-1/2), Sb and Sw the covariances between and within the images.
    """
    import torch

    from fedkernels import ViewKey
    from fedssl.augmentations.base import draw_views
    from fedssl.augmentations.random_views import RandomViews
    from fedssl.evaluation.features import extract_features
    from fedssl.evaluation.metrics import view_retrieval
    from fedssl.export.trained_encoder import encoder_of_run

    network = encoder_of_run(run, 0).encoder.network
    with np.load(file) as arrays:
        pixels = torch.from_numpy(arrays["x_test"][:_IMAGES])
    images = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
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
    measured = {
        "equal_view_retrieval": view_retrieval(drawn[:2]) or 0.0,
        "rankme": rank(torch.linalg.svdvals(drawn[0])),
        "lidar": rank(torch.linalg.svdvals(whitened).square()),
    }
    return {name: f"{value:.4g}" for name, value in measured.items()}


def columns() -> list[str]:
    """Return the columns of trials.csv."""
    own = dict.fromkeys(f"objective.{key}" for ranges in OWN_RANGES.values() for key in ranges)
    measured = ("knn", "linear", *UNLABELLED, "pixel_view_retrieval")
    figures = [f"{name}_{when}" for name in measured for when in ("before", "after")]
    return ["set", "objective", "trial", "network", "seen", *RANGES, *own, *figures, *OF_ENCODER, "problem"]


def correlations(lines: Sequence[Mapping[str, str]]) -> str:
    """Return Spearman's rank correlation of each figure without labels with accuracy, by set, over all trials."""
    rows = ["| set | trials | figure | with kNN | with linear |", "|---|---:|---|---:|---:|"]
    for name in dict.fromkeys(line["set"] for line in lines):
        for figure in (*UNLABELLED, "view_retrieval beside pixels", *OF_ENCODER):
            values, accuracies = [], []
            for line in lines:
                value = line.get(figure) or line.get(f"{figure}_after")
                if figure.endswith("pixels") and line["view_retrieval_after"]:
                    value = str(float(line["view_retrieval_after"]) / float(line["pixel_view_retrieval_after"]))
                if line["set"] == name and value:
                    values.append(float(value))
                    accuracies.append([float(line[f"{accuracy}_after"]) for accuracy in ("knn", "linear")])
            cells = [f"{spearmanr(values, each).statistic:.2f}" for each in zip(*accuracies, strict=True)]
            rows.append(f"| {name} | {len(values)} | {figure} | {' | '.join(cells)} |")
    return "\n".join(rows)


def best(lines: Sequence[Mapping[str, str]]) -> str:
    """Return the best and the median trial of each set and objective by the mean of kNN and linear accuracy."""
    rows = ["| set | objective | trials | best kNN / linear | median | by |", "|---|---|---:|---:|---:|---|"]
    for key in dict.fromkeys((line["set"], line["objective"], line["network"]) for line in lines):
        chosen = [line for line in lines if (line["set"], line["objective"], line["network"]) == key]
        score = {id(line): float(line["knn_after"]) + float(line["linear_after"]) for line in chosen}
        ordered = sorted(chosen, key=lambda line: np.nan_to_num(score[id(line)], nan=-1.0), reverse=True)
        first, middle = ordered[0], ordered[len(ordered) // 2]
        settings = ", ".join(
            f"{k.split('.')[-1]} {first[k]}" for k in columns() if ("." in k or k == "jitter") and first[k]
        )
        figures = " | ".join(f"{line['knn_after']} / {line['linear_after']}" for line in (first, middle))
        rows.append(f"| {key[0]}, {key[2]} | {key[1]} | {len(chosen)} | {figures} | {settings} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trials that are missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the .npz files")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--objectives", nargs="+", choices=OWN_RANGES, default=list(OWN_RANGES))
    parser.add_argument("--trials", type=int, default=12, help="of each objective on each set")
    parser.add_argument("--network", default="small_convnet")
    parser.add_argument("--seen", type=int, default=120_000, help="images that a trial trains on")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "search_presets")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "trials.csv"
    lines = list(csv.DictReader(file.open())) if file.is_file() else []
    done = {tuple(line[key] for key in ("set", "objective", "trial", "network", "seen")) for line in lines}
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        waiting = []
        for number in range(options.trials):  # so that an interrupted search has as many trials of each objective
            for name in options.sets:
                source, train, validation = SETS[name]
                data = Path(folder) / f"{name}.npz"
                if not data.is_file():
                    split(options.data / source, train, validation, data)
                for objective in options.objectives:
                    if (name, objective, str(number), options.network, str(options.seen)) not in done:
                        arguments_of = (data, name, objective, number, options.network, options.seen, train)
                        waiting.append(pool.submit(run_trial, *arguments_of))
        for future in as_completed(waiting):
            lines.append({key: str(future.result().get(key, "")) for key in columns()})
            text = io.StringIO()
            writer = csv.DictWriter(text, columns(), extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(sorted(lines, key=lambda line: (line["set"], line["objective"], int(line["trial"]))))
            replace(file, text.getvalue())
            print(f"{len(lines)} trials", flush=True)
    (options.output / "tables.md").write_text(f"{best(lines)}\n\n{correlations(lines)}\n")


if __name__ == "__main__":
    main()
