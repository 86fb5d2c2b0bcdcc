"""A step whose loss is not finite is named, kept, and run again: its images, terms, and the layer where it began."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import fedssl
from fedssl.client import LocalRound
from fedssl.engines.replay import replay
from fedssl.errors import UserError
from fedssl.run_folder.failed_step import read_failed_step
from tests.fedssl.conftest import AVERAGED
from tests.fedssl.engines.short_runs import SMALL

#: in client 1's second round a term of NaN in step 3, or a layer's gradients in step 2
PART = """
import itertools
from fedssl.regularizers.base import Regularizer

class Mine(Regularizer):
    spoils: str

    def start_round(self, local):
        numbers = itertools.count(1)

        def term(step):
            number = next(numbers) if (local.client.index, local.number) == (1, 2) else 0
            if number == 2 and self.spoils != "term":
                weight = local.client.model.online["projector"][3].weight
                weight.register_hook(lambda gradient: gradient * 0 + float(self.spoils))
            return step.loss.new_tensor(float("nan") if number == 3 and self.spoils == "term" else 0.5)

        return term
"""


def stopped(noisy, folder: Path, spoils: str, **changes: object) -> tuple[Path, str]:
    """A run that stopped at the spoilt step, and the message."""
    (folder / "mine.py").write_text(PART)
    changes |= {"regularizers": [{"name": str(folder / "mine.py"), "spoils": spoils}]}
    changes["training"] = {"local_epochs": 1, "batch_size": 8, "learning_rate": 1}
    with pytest.raises(UserError) as caught:
        fedssl.run(noisy(**AVERAGED, **changes, evaluation=SMALL["evaluation"]), folder / "run")
    return folder / "run", str(caught.value)


@pytest.mark.parametrize("parallel", [1, 2])
def test_a_spoilt_term_is_told_with_its_step_and_images(parallel, noisy, tmp_path, monkeypatch):
    path, message = stopped(noisy, tmp_path, "term", clients_parallel=parallel)
    assert re.match(r"client 1's loss became nan in round 2, step 3; .* fedssl run --replay RUN", message)
    seen: list[list[int]] = []
    real = LocalRound.views
    monkeypatch.setattr(LocalRound, "views", lambda *a: seen.append(a[2].tolist()) or real(*a))
    first, rows, objective, term, layer = replay(path, trust=True)
    assert (first, read_failed_step(path).rows) == ("client 1, round 2, step 3: the loss was nan", seen[2])
    assert rows.endswith(": " + ", ".join(map(str, seen[2])))
    assert re.match(r"objective byol: \d\.\d+ regularizer 0 .*: nan every layer's", f"{objective} {term} {layer}")


@pytest.mark.parametrize(
    ("gradient", "told"), [("inf", "weight is not finite: the update"), ("3e38", r"weights reach 3e\+38")]
)
def test_the_layer_is_told_where_it_began(gradient, told, noisy, tmp_path):
    *_, objective, _, layer = replay(stopped(noisy, tmp_path, gradient)[0], trust=True)
    assert objective == "objective byol: nan"
    assert re.match(rf"the first layer with a non-finite output is online\.projector\.3 \(Linear\); its {told}", layer)


STEP = '{"client": 1, "round": 9, "step": 1, "loss": "nan", "rows": []}'


@pytest.mark.parametrize("text", [STEP, STEP[:-1], STEP.replace("9", "0"), None])
def test_there_must_be_a_step_from_which_the_run_has_not_gone_on(text, finished, tiny, tmp_path):
    path = shutil.copytree(finished(tiny(**SMALL)), tmp_path / "run")
    (path / ("failed_step.json" if text else "none")).write_text(text or "")
    with pytest.raises(UserError, match="has gone on" if text == STEP else "cannot be read" if text else "no step to"):
        replay(path)
