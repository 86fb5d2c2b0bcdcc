"""Run a recipe from a script: three clients learn without labels.

The images are scikit-learn's digits. Each client holds four of the ten classes and trains BYOL; after each round the
server averages their weights.
"""

import tempfile
from pathlib import Path

import fedssl

PARTITION = "partition={name: disjoint_classes, clients: 3, classes_per_client: 4}"
OVERRIDES = ["rounds=2", PARTITION, "architectures=[small_convnet]"]


def main() -> None:
    """Run the recipe into a temporary folder and print its figures."""
    recipe = fedssl.load_recipe("fedbyol", OVERRIDES)
    print(f"{recipe.name}: {recipe.rounds} rounds, {recipe.partition.clients} clients")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        run = fedssl.run(recipe, path)
        before, after = run.evaluated("knn", "before"), run.evaluated("knn", "after")
        print(f"kNN accuracy: {before:.1f}% before, {after:.1f}% after")
        for number, loss in sorted(run.overall("loss").items()):
            print(f"round {number}: loss {loss:.3f}")
        print(f"traffic: {run.total('bytes_up') / 2**20:.1f} MiB from the clients")
        print(f"report: {fedssl.write_report(path).name}")


if __name__ == "__main__":
    main()
