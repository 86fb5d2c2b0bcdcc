"""SentenceTransformerTrainer with the drop-ins trains the weights that it trains with the originals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkernels.compat import sentence_transformers

pytest.importorskip("accelerate", reason="sentence-transformers[train] is not installed")
datasets = pytest.importorskip("datasets", reason="sentence-transformers[train] is not installed")
originals = pytest.importorskip(
    "sentence_transformers.sentence_transformer.losses", reason="sentence-transformers is not installed"
)
WORDS = [f"w{number}" for number in range(40)]


def new_model() -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense
    from sentence_transformers.sentence_transformer.modules import Pooling, WordEmbeddings
    from sentence_transformers.sentence_transformer.modules.tokenizer import WhitespaceTokenizer

    torch.manual_seed(0)
    words = WordEmbeddings(WhitespaceTokenizer(WORDS, do_lower_case=False), torch.randn(41, 8), True)
    return SentenceTransformer(modules=[words, Pooling(8), Dense(8, 6)], device="cpu")


def sentences(seed: int, rows: int = 20) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (rows,), generator=generator).tolist()
    return [" ".join(WORDS[int(i)] for i in torch.randint(40, (n,), generator=generator)) for n in lengths]


def dataset(columns: int) -> Any:
    return datasets.Dataset.from_dict({f"column{number}": sentences(number) for number in range(columns)})


def train(losses: Any, folder: Path, name: str, wrap: bool) -> tuple[dict[str, Tensor], str]:
    """The weights after two epochs with `name` for one data set and the plain loss for another, and the model card."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    model = new_model()
    options = {"mini_batch_size": 3} if name.startswith("Cached") else {}
    loss = getattr(losses, name)(model, **options)
    if wrap:
        loss = originals.MatryoshkaLoss(model, loss, [6, 4])
    arguments = SentenceTransformerTrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=10, learning_rate=0.05, report_to=[], seed=1
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.DatasetDict(first=dataset(2), second=dataset(3)),
        eval_dataset=datasets.DatasetDict(first=dataset(2), second=dataset(3)),
        loss={"first": loss, "second": losses.MultipleNegativesRankingLoss(model, scale=5.0)},
    )
    trainer.train()
    evaluated = {key: value for key, value in trainer.evaluate().items() if key.endswith("_loss")}
    weights = {key: torch.tensor(value) for key, value in evaluated.items()} | model.state_dict()
    model.save(str(folder))
    return weights, (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", [False, True], ids=["alone", "in MatryoshkaLoss"])
@pytest.mark.parametrize("name", ["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"])
def test_the_trainer_trains_the_same_weights(tmp_path, name, wrap):
    (ours, card), (theirs, _) = (
        train(losses, tmp_path / library, name, wrap)
        for losses, library in ((sentence_transformers, "fedkernels"), (originals, "sentence-transformers"))
    )
    before = new_model().state_dict()
    assert any(not torch.equal(before[key], ours[key]) for key in before)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert f"loss:{name}" in card
    assert "1807.03748" in card
