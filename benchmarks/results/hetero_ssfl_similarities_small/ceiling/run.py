"""Train both architectures on all images, with the public images and targets of the best control, and write table.csv.

    OMP_NUM_THREADS=1 python run.py cifar10_small.npz public_tinyimagenet32_5k.npz RUNS

Of five clients the first two have all images. The other three have 50 each, and are there for their untrained
networks, which are in the targets. RUNS is a new folder for the three runs.
"""

import csv
import sys
from pathlib import Path
from unittest.mock import patch

import torch

import fedssl
from fedssl import federation
from fedssl.data.datasets import Dataset
from fedssl.data.partitions import PartitionOptions
from fedssl.tables.table import cell_recipe, load_table

METRICS = ("knn", "linear", "effective_rank")
deal = federation.deal


def all_images_twice(dataset: Dataset, options: PartitionOptions, seed: int) -> list[torch.Tensor]:
    shares = deal(dataset, options, seed)
    every = torch.arange(sum(map(len, shares)))
    return [every, every, *(share[:50] for share in shares[2:])]


def main(data: str, public: str, output: Path) -> None:
    table = load_table("hetero_ssfl_similarities_small")
    row = next(row for row in table.rows if row.label == "similarities, of untrained networks")
    lines = []
    for seed in table.seeds:
        recipe = cell_recipe(
            table, row, seed, [f"data.path={data}", f"data.public_path={public}", "evaluation.every=30"]
        )
        with patch.object(federation, "deal", all_images_twice):
            run = fedssl.run(recipe, output / str(seed))
        with open(run.path / "metrics.csv", newline="") as file:
            last = [line for line in csv.DictReader(file) if int(line["round"]) == recipe.rounds]
        reached = {(line["client"], line["metric"]): float(line["value"]) for line in last}
        for metric in METRICS:
            small, wide = reached["0", metric], reached["1", metric]
            lines += [("small_convnet", seed, metric, small), ("small_convnet_wide", seed, metric, wide)]
            lines.append(("by the clients' architectures", seed, metric, 0.6 * small + 0.4 * wide))
    with open(Path(__file__).with_name("table.csv"), "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("row", "role", "seed", "metric", "value"))
        writer.writerows((row, "row", seed, metric, value) for row, seed, metric, value in lines)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
