"""Self-supervised training never looks at labels: with other labels on the same images it ends bit for bit alike."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedssl.data.datasets import Dataset
from fedssl.engines.in_process import run
from fedssl.parts import part_class, part_names
from fedssl.recipe.reading import parse_recipe
from tests.fedssl.conftest import tiny_values
from tests.fedssl.engines.every_tensor import assert_same
from tests.fedssl.killed_runs import contents
from tests.fedssl.rounds_in_memory import Rounds, train_rounds
from tests.fedssl.test_combinations import federation_of, noise, with_options

pytestmark = pytest.mark.usefixtures("teacher")
CLIENTS, IMAGES, CLASSES = 2, 24, 3


def labels(seed: int, count: int = IMAGES) -> Tensor:
    """Random labels; those of two seeds are no renaming of each other, so that balanced batches would differ too."""
    return torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def trained(seed: int, objective: str = "fedx", **parts: Any) -> Rounds:
    """Two rounds of two clients whose images have the labels of a seed; which images they hold does not depend on it.

    `fedx` is the objective that every regularizer works with.
    """
    names = tuple(f"class {i}" for i in range(CLASSES))
    federation = federation_of(
        objective,
        parts.get("regularizers", []),
        parts.get("aggregators", ["weighted_mean"]) + ["orchestra_clusters"] * (objective == "orchestra"),
        parts.get("local_update", "replace"),
        Dataset("noise", noise(IMAGES), labels(seed), noise(8), labels(seed, 8), names, noise(9)),
        schedule=with_options([parts.get("schedule", "end_to_end")])[0],
        partition={"name": "iid", "clients": CLIENTS},
        training={"local_epochs": 1, "batch_size": 4},
    )
    rows = torch.arange(IMAGES).chunk(CLIENTS)
    return train_rounds(dataclasses.replace(federation, client_rows=list(rows)), rounds=2)


def assert_labels_do_not_matter(**parts: Any) -> None:
    one, other = trained(0, **parts), trained(1, **parts)
    pairs = [(one.server, other.server), *((state, other.clients[k]) for k, state in one.clients.items())]
    for number, replies in one.replies.items():
        pairs += [(reply, other.replies[number][k]) for k, reply in replies.items()]
    for mine, theirs in pairs:
        assert_same(mine, theirs)


def test_a_supervised_objective_does_look_at_labels():
    with pytest.raises(AssertionError):
        assert_labels_do_not_matter(objective="supervised")


def classes(folder: str) -> dict[str, Any]:
    return {name: part_class(folder, name) for name in part_names(folder)}


def parts() -> list[dict[str, Any]]:
    """Each part in a run at least: all regularizers, and all that does not exchange weights, train together."""
    found: list[dict[str, Any]] = [
        {"objective": name} for name, part in classes("objectives").items() if not part.needs_labels
    ]
    exchanging = [name for name, part in classes("aggregators").items() if part.exchanges_weights]
    others = set(part_names("aggregators")) - {*exchanging, "orchestra_clusters"}  # which is that objective's
    found.append({"regularizers": part_names("regularizers"), "aggregators": ["weighted_mean", *sorted(others)]})
    updates = classes("local_updates")
    alone = [name for name, part in updates.items() if part.personal and not part.trains_global_copy]
    found += [{"local_update": name, "aggregators": ["representation_mean"]} for name in alone]
    joined = [name for name in updates if name not in alone]
    for i in range(max(len(joined), len(exchanging))):
        found.append({"local_update": joined[i % len(joined)], "aggregators": [exchanging[i % len(exchanging)]]})
    return found + [{"schedule": name} for name in part_names("schedules") if name != "end_to_end"]


@pytest.mark.parametrize("part", sorted(parts(), key=str), ids=str)
def test_a_part_does_not_look_at_labels(part):
    assert_labels_do_not_matter(**part)


def test_a_whole_run_with_evaluation_leaves_the_same_models_whatever_the_labels(tmp_path):
    """Sampling, drop-outs, evaluation and fine-tuning are the engine's; none of them may carry labels to the models."""
    left = []
    for seed in (0, 1):
        images = {"x_train": noise(48)[:, 0].numpy(), "x_test": noise(30)[:, 0].numpy()}
        classes = {"y_train": labels(seed, 48).numpy(), "y_test": labels(seed, 30).numpy()}
        np.savez(tmp_path / f"{seed}.npz", **images, **classes)
        recipe = parse_recipe(
            tiny_values(
                data={"name": "npz", "path": str(tmp_path / f"{seed}.npz")},
                partition={"name": "iid", "clients": 4},
                training={"local_epochs": 1, "batch_size": 4},
                aggregators=["weighted_mean"],
                local_update="replace",
                clients_per_round=3,
                client_dropout=0.3,
                evaluation={"every": 1, "neighbors": 3, "linear": {"epochs": 1}, "semi_supervised": [1]},
            )
        )
        left.append(run(recipe, tmp_path / str(seed)))
    measured = {number for number, _, name, _ in left[0].read_metrics() if name == "semi_supervised_1"}
    assert measured == {recipe.rounds}
    assert (left[0].path / "partition.csv").read_bytes() != (left[1].path / "partition.csv").read_bytes()
    one, other = (contents(directory.path) for directory in left)
    assert one.pop("metrics.csv") != other.pop("metrics.csv")
    assert one == other
    assert len(one) > 4
