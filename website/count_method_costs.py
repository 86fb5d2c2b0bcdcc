"""Counts what a client needs under each method: `python -m website.count_method_costs`, after a recipe has changed.

It writes `benchmarks/results/method_costs/table.csv`: the memory of the step that takes most, in MB (10^6 bytes), and
the mean FLOPs and traffic of a client's round, on scikit-learn's digits with the options of each recipe.
"""

from fedssl.federation import build_federation
from fedssl.recipe.reading import load_recipe
from fedssl.reports.cost import estimate, totals
from fedssl.run_folder.storage import csv_text
from website.methods import COSTS, RECIPES
from website.repository_files import ROOT


def main() -> None:
    rows: list[list[object]] = [["recipe", "memory_mb", "gflops_a_round", "up_mb", "down_mb"]]
    for recipe in RECIPES:
        costs = estimate(build_federation(load_recipe(recipe)))
        total, rounds = totals(costs), sum(len(cost.step) for cost in costs)
        traffic = [f"{total[way] / rounds / 1e6:.2f}" for way in ("bytes_up", "bytes_down")]
        rows.append([recipe, f"{total['memory'] / 1e6:.1f}", f"{total['flops'] / rounds / 1e9:.1f}", *traffic])
        print(*rows[-1])
    (ROOT / COSTS).write_text(csv_text(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
