"""A step whose loss is not finite is named, kept, and run again: its images, terms, and the layer where it began."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import fedssl
from fedssl.client import LocalRound
from fedssl.engines.replay import replay
from fedssl.errors import UserError
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.short_runs import SMALL, everything

#: in client 1's second round: a term of NaN in step 3, or weights that are NaN after step 2
PART = """
import itertools
from fedssl.regularizers.base import Regularizer

class Mine(Regularizer):
    spoils: str

    def start_round(self, local):
        numbers = itertools.count(1)
        there = local.client.index == 1 and local.number == 2

        def term(step):
            number = next(numbers)
            if there and self.spoils == "term" and number == 3:
                return step.loss.new_tensor(float("nan"))
            if there and self.spoils == "weights" and number == 2:
                weight = local.client.model.online["projector"][3].weight
                weight.register_hook(lambda gradient: gradient * float("inf"))
            return step.loss.new_tensor(0.5)

        return term
"""


@pytest.fixture
def stopped(noisy, tmp_path):
    """Let a run stop at the spoilt step; gives its folder and the message."""

    def stop(spoils: str, parallel: int = 1) -> tuple[Path, str]:
        (tmp_path / "mine.py").write_text(PART)
        part = {"name": str(tmp_path / "mine.py"), "spoils": spoils}
        partition = {"name": "iid", "clients": 3}
        recipe = noisy(
            **AVERAGED,
            regularizers=[part],
            clients_parallel=parallel,
            evaluation=SMALL["evaluation"],
            partition=partition,
        )
        with pytest.raises(UserError) as caught:
            fedssl.run(recipe, tmp_path / "run")
        return tmp_path / "run", str(caught.value)

    return stop


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_spoilt_term_is_told_with_its_step_and_images(parallel, stopped, monkeypatch):
    path, message = stopped("term", parallel)
    assert message.startswith("client 1's loss became nan in round 2, step 3; lower training.learning_rate")
    assert "fedssl run --replay RUN" in message
    seen: list[list[int]] = []
    real = LocalRound.views

    def views(local, images, samples, *arguments):
        seen.append(samples.tolist())
        return real(local, images, samples, *arguments)

    before = everything(path)
    monkeypatch.setattr(LocalRound, "views", views)
    first, rows, objective, term, layer = replay(path, trust=True)
    assert everything(path) == before
    assert first == "client 1, round 2, step 3: the loss was nan"
    assert json.loads((path / "failed_step.json").read_text())["rows"] == seen[2]
    assert rows.endswith(": " + ", ".join(map(str, seen[2])))
    assert re.fullmatch(r"objective byol: \d\.\d+", objective)
    assert (term.split()[:2], term[-5:]) == (["regularizer", "0"], ": nan")
    assert layer.startswith("every layer's output is finite")


def test_the_layer_is_told_whose_weights_are_not_finite(stopped):
    path, _ = stopped("weights")
    *_, objective, _, layer = replay(path, trust=True)
    assert objective == "objective byol: nan"
    expected = "the first layer with a non-finite output is online.projector.3 (Linear); its weight is not finite"
    assert layer.startswith(expected)


def test_an_input_that_overflows_is_told_with_its_size(noisy, tmp_path):
    recipe = noisy(**AVERAGED, training={"local_epochs": 1, "batch_size": 8, "learning_rate": 1e20})
    with pytest.raises(UserError, match=r"became (nan|inf) in round 1"):
        fedssl.run(recipe, tmp_path / "run")
    layer = replay(tmp_path / "run")[-1]
    found = re.search(r"output is (\S+) .* its weights reach (\S+) and its input (\S+)$", layer)
    assert found is not None
    assert float(found[2]) * float(found[3]) > 1e36  # their sums exceed float32's largest number
    assert torch.isfinite(torch.tensor([float(found[2]), float(found[3])])).all()


def test_there_must_be_a_step_from_which_the_run_has_not_gone_on(stopped):
    path, _ = stopped("term")
    file = path / "failed_step.json"
    of_round_9 = file.read_text().replace('"round": 2', '"round": 9')
    for text, problem in (("{", "cannot be read"), ('{"client": 1}', "cannot be read"), (of_round_9, "has gone on")):
        file.write_text(text)
        with pytest.raises(UserError, match=problem):
            replay(path, trust=True)
    file.unlink()
    with pytest.raises(UserError, match="there is no step to replay"):
        replay(path)
