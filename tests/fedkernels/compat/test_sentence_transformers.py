"""The cached drop-ins beside the plain ones: any features, little memory, one exchange of gradients, the Trainer.

Their two passes are those of GradientCache: test_gradient_cache.py has dropout, autocast and several ranks.
"""

import itertools
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedkernels.compat import sentence_transformers
from tests.fedkernels.compat.losses import CLOSE, SENTENCES
from tests.fedkernels.test_gradient_cache import counted

Features = dict[str, Any]
LENGTHS = [3, 1, 4, 1, 5, 2, 6]


class Reader(nn.Module):
    """A model of tokens and images; it writes into its features what it computes, as a SentenceTransformer does."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.patches = nn.Embedding(30, 8), nn.Linear(5, 8)
        self.documents, self.head = nn.Linear(8, 6).requires_grad_(trained), nn.Linear(8, 6)
        self.dropout = 0.0
        self.written: list[weakref.ref[Tensor]] = []

    def __getitem__(self, index: int) -> nn.Module:
        return self  # the originals look at a model's first module

    def get_embedding_dimension(self) -> int:
        return 6

    def lengths(self, features: Features) -> Tensor:
        if "cu_seq_lens_q" in features:
            lengths = features["cu_seq_lens_q"].diff()
            assert int(lengths.max()) == features["max_length_q"]
            assert torch.equal(features["seq_idx"][0].long(), torch.arange(len(lengths)).repeat_interleave(lengths))
            return lengths
        return torch.cat([features["offsets"], torch.tensor([len(features["input_ids"])])]).diff()

    def forward(self, features: Features) -> Features:
        if "attention_mask" in features:
            features["token_embeddings"] = self.tokens(features["input_ids"]) * features["attention_mask"][..., None]
            hidden = features["token_embeddings"].sum(dim=1)
        else:
            samples = torch.arange(len(lengths := self.lengths(features))).repeat_interleave(lengths)
            features["token_embeddings"] = self.tokens(features["input_ids"].flatten())
            hidden = torch.zeros(len(lengths), 8).index_add(0, samples, features["token_embeddings"])
        if "pixel_values" in features:
            images = features["num_images_per_sample"]
            grid = features.get("image_grid_thw", torch.ones(int(images.sum()), 1, dtype=torch.int64))
            samples = torch.arange(len(images)).repeat_interleave(images).repeat_interleave(grid.prod(dim=1))
            hidden = hidden.index_add(0, samples, self.patches(features["pixel_values"]))
        head = self.documents if features.get("task") == "document" else self.head
        features["sentence_embedding"] = nn.functional.dropout(head(hidden.tanh()), self.dropout)
        self.written += [weakref.ref(features[name]) for name in ("token_embeddings", "sentence_embedding")]
        return features


def the_originals() -> Any:
    return pytest.importorskip(SENTENCES, reason="sentence-transformers is not installed")


def padded(seed: int) -> Features:
    generator, mask = torch.Generator().manual_seed(seed), torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": torch.randint(30, (7, 9), generator=generator), "attention_mask": mask.long(), "task": "query"}


def flattened(seed: int) -> Features:
    lengths = torch.tensor(LENGTHS)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    return {
        "input_ids": bag(seed)["input_ids"][None],
        "seq_idx": torch.arange(7).repeat_interleave(lengths)[None].int(),
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds),
        **dict.fromkeys(("max_length_q", "max_length_k"), 6),
    }


def bag(seed: int) -> Features:
    lengths = torch.tensor(LENGTHS)
    tokens = torch.randint(30, (sum(LENGTHS),), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "offsets": lengths.cumsum(0) - lengths}


def with_images(seed: int, patches: bool) -> Features:
    """Samples with 0 to 2 images, each of one row or of several patches."""
    images = torch.tensor([0, 2, 1, 0, 0, 0, 1])
    grid = torch.tensor([[1, 2, 1], [1, 1, 3], [1, 1, 1], [1, 2, 2]])
    rows = int(grid.prod(dim=1).sum()) if patches else 4
    pixels = torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))
    own = {"image_grid_thw": grid} if patches else {}
    return padded(seed) | own | {"num_images_per_sample": images, "pixel_values": pixels}


FEATURES = {
    "padded": padded,
    "with scalars": lambda seed: padded(seed) | {"prompt_length": torch.tensor([1]), "weight": torch.tensor(2.0)},
    "flattened": flattened,
    "bags of tokens": bag,
    "images": lambda seed: with_images(seed, patches=False),
    "patches of images": lambda seed: with_images(seed, patches=True),
}


def wider(seed: int) -> Features:
    """As padded, but with `seed` columns more."""
    return {name: nn.functional.pad(padded(seed)[name], [0, seed]) for name in ("input_ids", "attention_mask")}


# Three columns of features, and how often the plain loss runs the model.
COLUMNS = {
    "other widths": ([wider(seed) for seed in range(3)], 2),
    "another task for the last": ([padded(0), padded(1), padded(2) | {"task": "document"}], 3),
    "an array": ([padded(seed) | {"array": np.arange(2)} for seed in range(3)], 3),
    "other features for the last": ([padded(0), padded(1), padded(2) | {"prompt_length": 1}], 3),
    "weights of the tokens": (
        [column | {"weights": torch.ones(column["input_ids"].shape)} for column in map(wider, range(3))],
        3,
    ),
} | {name: ([make(seed) for seed in range(3)], 2 if name == "padded" else 3) for name, make in FEATURES.items()}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns_after_the_first_share_a_forward_pass_where_they_can(case):
    features, calls = COLUMNS[case]
    loss = sentence_transformers.MultipleNegativesRankingLoss(Reader())
    columns = [loss.model(dict(column))["sentence_embedding"] for column in features]
    loss.model.written.clear()
    torch.testing.assert_close(loss(features), loss.compute_loss_from_embeddings(columns), **CLOSE)
    assert len(loss.model.written) == 2 * calls


@pytest.mark.parametrize("case", COLUMNS)
def test_the_original_shares_the_same_forward_passes(case):
    found = []
    for losses in (sentence_transformers, the_originals()):
        model = Reader()
        model.dropout = 0.3
        found.append(gradients(losses.MultipleNegativesRankingLoss(model), COLUMNS[case][0]))
    torch.testing.assert_close(*found, **CLOSE)


def gradients(loss: nn.Module, features: list[Features], factor: float = 2.0) -> list[Tensor]:
    """The loss and the gradients of all weights; each call has features of its own, as models write into them."""
    loss.zero_grad()
    torch.manual_seed(1)
    value = loss([dict(column) for column in features], None)
    (factor * value).backward()
    trained = [parameter for parameter in loss.parameters() if parameter.requires_grad]
    return [value.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *itertools.product(FEATURES, [{"mini_batch_size": 3}, {"mini_batch_size": 100}]),
        *((kind, {"mini_batch_num_tokens": 6}) for kind in FEATURES if kind != "bags of tokens"),
    ],
    ids=str,
)
def test_the_cached_loss_is_the_plain_one(kind, options):
    features = [FEATURES[kind](seed) for seed in range(3)]
    for name in ("MultipleNegativesRankingLoss", "MultipleNegativesSymmetricRankingLoss"):
        cached = getattr(sentence_transformers, f"Cached{name}")(Reader(), **options)
        plain = getattr(sentence_transformers, name)(Reader())
        found = gradients(cached, features)
        torch.testing.assert_close(found, gradients(plain, features), **CLOSE)
        with torch.no_grad():
            torch.testing.assert_close(cached([dict(column) for column in features]), found[0])


def test_half_precision_under_autocast_to_another_is_joined():
    columns = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).half() for seed in range(3)]
    loss = sentence_transformers.CachedMultipleNegativesRankingLoss(Reader())
    with torch.autocast("cpu", torch.bfloat16):
        found = loss.calculate_loss([[*column.split(2)] for column in columns])
    torch.testing.assert_close(found, loss.compute_loss_from_embeddings(columns), **CLOSE)


def test_between_the_passes_nothing_that_the_model_wrote_is_alive():
    model = Reader()
    loss = sentence_transformers.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2)
    features = [padded(seed) for seed in range(2)]
    value = loss(features)
    assert len(model.written) == 2 * 2 * 4
    assert not any(written() is not None for written in model.written)
    assert set(features[0]) == {"input_ids", "attention_mask", "task"}
    value.backward()
    assert len(model.written) == 2 * 2 * 2 * 4


def test_a_second_loss_before_the_first_backward_pass_keeps_its_own_gradients():
    loss = sentence_transformers.CachedMultipleNegativesRankingLoss(Reader(), mini_batch_size=2)
    first, second = [padded(0), padded(1)], [padded(2), padded(3)]
    separate = [gradients(loss, first, 1.0)[1:], gradients(loss, second, 1.0)[1:]]
    loss.zero_grad()
    values = loss(first), loss(second)
    sum(values).backward()
    together = [parameter.grad for parameter in loss.parameters() if parameter.grad is not None]
    sums = [one + two for one, two in zip(*separate, strict=True) if (one + two).any()]
    torch.testing.assert_close([grad for grad in together if grad.any()], sums, **CLOSE)


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified in DDP constructor, but did not find any")
@pytest.mark.parametrize("frozen", [False, True], ids=["one tower", "frozen documents"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_the_ranks_exchange_each_gradient_once(one_rank, options, frozen):
    features = [padded(0), padded(1) | {"task": "document" if frozen else "query"}]
    cached = sentence_transformers.CachedMultipleNegativesRankingLoss(Reader(trained=False), mini_batch_size=3)
    plain = sentence_transformers.MultipleNegativesRankingLoss(Reader(trained=False))
    for model in (cached.model, plain.model):
        model.patches.requires_grad_(False)
        model.tokens.requires_grad_(not frozen)
    weights = sum(parameter.numel() for parameter in cached.parameters() if parameter.requires_grad)
    cached.model, sizes = counted(cached.model, bucket_cap_mb=1e-4, **options)
    for _ in range(3):
        exchanged = sum(sizes)
        torch.testing.assert_close(gradients(cached, features), gradients(plain, features), **CLOSE)
    assert sum(sizes) - exchanged == weights
    with cached.model.no_sync():
        gradients(cached, features)
    assert sum(sizes) - exchanged == weights


class ForwardDecorator:
    """sentence-transformers' wrappers give a model an object of this name as its forward function."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, features: Features) -> Features:
        return self.function(features)


class TransformerDecorator(ForwardDecorator):
    pass


@pytest.mark.parametrize("decorator", [ForwardDecorator, TransformerDecorator])
def test_wrappers_that_change_the_model_for_one_pass(decorator):
    """The cached loss refuses them; for the layers' wrapper the plain one keeps the columns' own features."""
    model, features = Reader(), [padded(seed) for seed in range(3)]
    model.forward = decorator(model.forward)
    with pytest.raises(ValueError, match=r"loss must not be a cached one inside AdaptiveLayerLoss"):
        sentence_transformers.CachedMultipleNegativesRankingLoss(model)(features)
    assert model.written == []
    sentence_transformers.MultipleNegativesRankingLoss(model)(features)
    assert len(model.written) == (4 if decorator is ForwardDecorator else 6)


def test_matryoshka_can_exchange_calculate_loss():
    """MatryoshkaLoss asks for this attribute and gives this method shorter embeddings that are leaves."""
    loss = sentence_transformers.CachedMultipleNegativesRankingLoss(Reader(), mini_batch_size=3)
    inner = loss.calculate_loss

    def shorter(reps: list[list[Tensor]], *rest: Any, **options: Any) -> Tensor:
        short = [[part[:, :4] for part in column] for column in reps]
        leaves = [[part.detach().requires_grad_() for part in column] for column in short]
        value = inner(leaves, *rest, **options)
        for parts, part_leaves in zip(short, leaves, strict=True):
            torch.autograd.backward(parts, [leaf.grad for leaf in part_leaves])
        return value

    assert loss.uses_gradient_cache
    loss.calculate_loss = shorter
    plain = sentence_transformers.MultipleNegativesRankingLoss(Reader())
    plain.model.register_forward_hook(lambda *given: {"sentence_embedding": given[-1]["sentence_embedding"][:, :4]})
    features = [padded(seed) for seed in range(2)]
    torch.testing.assert_close(gradients(loss, features), gradients(plain, features), **CLOSE)


def test_options_may_be_set_later_and_are_checked_again():
    loss = sentence_transformers.MultipleNegativesRankingLoss(nn.Identity())
    columns = [torch.randn(5, 4), torch.randn(5, 4)]
    loss.scale, loss.similarity_fct, loss.directions = 1.5, "dot_score", ["query_to_doc"]
    other = sentence_transformers.MultipleNegativesRankingLoss(nn.Identity(), scale=1.5, similarity_fct="dot_score")
    assert torch.equal(loss.compute_loss_from_embeddings(columns), other.compute_loss_from_embeddings(columns))
    assert loss.citation == other.citation
    loss.similarity_fct = cos_sim
    with pytest.raises(ValueError, match=r"similarity_fct must be cos_sim or dot_score of sentence_transformers.util"):
        loss.compute_loss_from_embeddings(columns)
    loss.hardness_mode = "all_negatives"
    with pytest.raises(ValueError, match="hardness_mode must be None"):
        loss.compute_loss_from_embeddings(columns)


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Another function of that name."""
    return a @ b.T / 7


@pytest.mark.parametrize(
    ("features", "options", "match"),
    [
        ([{"input_ids": torch.ones(2, 3)}], {}, "sentence_features must hold anchors and positives at least, got 1"),
        ([{"task": "query"}] * 2, {}, "each column of sentence_features must hold a tensor"),
        ([dict.fromkeys(("input_ids", "attention_mask"), torch.ones(0, 3).long())] * 2, {}, "query must not be empty"),
        ([bag(0), bag(1)], {"mini_batch_num_tokens": 5}, "mini_batch_num_tokens needs attention_mask or cu_seq_lens_q"),
    ],
)
def test_features_that_cannot_be_cut_are_refused(features, options, match):
    loss = sentence_transformers.CachedMultipleNegativesRankingLoss(Reader(), **options)
    with pytest.raises(ValueError, match=match):
        loss(features)


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


def train(losses: Any, folder: Path, name: str, wrap: bool) -> tuple[dict[str, Tensor], str]:
    """The weights after two epochs with `name` for one data set and the plain loss for another, and the model card."""
    import datasets
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    rows = [{f"column{number}": sentences(number) for number in range(columns)} for columns in (2, 3)]
    data = datasets.DatasetDict(zip(("first", "second"), map(datasets.Dataset.from_dict, rows), strict=True))
    model = new_model()
    options = {"mini_batch_size": 3} if name.startswith("Cached") else {}
    loss = getattr(losses, name)(model, **options)
    if wrap:
        loss = the_originals().MatryoshkaLoss(model, loss, [6, 4])
    arguments = SentenceTransformerTrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=10, learning_rate=0.05, report_to=[], seed=1
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
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
    for library in ("accelerate", "datasets"):
        pytest.importorskip(library, reason="sentence-transformers[train] is not installed")
    (ours, card), (theirs, _) = (
        train(losses, tmp_path / library, name, wrap)
        for losses, library in ((sentence_transformers, "fedkernels"), (the_originals(), "sentence-transformers"))
    )
    before = new_model().state_dict()
    assert any(not torch.equal(before[key], ours[key]) for key in before)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert f"loss:{name}" in card
    assert "1807.03748" in card
