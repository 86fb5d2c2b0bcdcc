"""Counts what a client needs under each method: `python -m website.count_method_costs`, after a recipe has changed.

It writes `benchmarks/results/method_costs/table.csv`: the memory of the step that takes most, in MB (10^6 bytes), and
the mean FLOPs and traffic of a client's round, on scikit-learn's digits with the options of each recipe.
"""

from __future__ import annotations

from fedssl.federation import build_federation
from fedssl.recipe.reading import load_recipe
from fedssl.reports.cost import estimate, totals
from fedssl.run_folder.storage import csv_text, write_atomically
from website.methods import COSTS, PAGES
from website.repository_files import ROOT


def main() -> None:
    rows: list[list[object]] = [["recipe", "memory_mb", "gflops_a_round", "up_mb", "down_mb"]]
    for recipe in PAGES:
        costs = estimate(build_federation(load_recipe(recipe)))
        total, rounds = totals(costs), sum(len(cost.step) for cost in costs)
        rows.append(
            [
                recipe,
                f"{total['memory'] / 1e6:.1f}",
                f"{total['flops'] / rounds / 1e9:.1f}",
                f"{total['bytes_up'] / rounds / 1e6:.2f}",
                f"{total['bytes_down'] / rounds / 1e6:.2f}",
            ]
        )
        print(*rows[-1])
    path = ROOT / COSTS
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, csv_text(rows).encode())


if __name__ == "__main__":
    main()
