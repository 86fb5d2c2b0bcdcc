"""The arguments of the originals, in their order and with their defaults, and the attributes that scripts read."""

import importlib
import inspect
import re
from typing import Any

import pytest
from torch import nn

from tests.fedkernels.compat.losses import SENTENCES

ORIGINALS = {"lightly": "lightly.loss", "open_clip": "open_clip.loss", "sentence_transformers": SENTENCES}
RANKING = {"scale": 20.0, "similarity_fct": "cos_sim"}
HARDNESS = {"hardness_mode": None, "hardness_strength": 0.0}
DIRECTIONS = {"directions": ("query_to_doc",), "partition_mode": "joint"}
BATCHES = {"mini_batch_size": 32, "mini_batch_num_tokens": None, "gather_across_devices": False}
PAIRS = ["image_features", "text_features", "logit_scale", "logit_bias", "output_dict"]
# For each class the defaults of its arguments (those of a model are given), and the arguments of a call.
SIGNATURES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "lightly.NTXentLoss": ({"temperature": 0.5, "memory_bank_size": 0, "gather_distributed": False}, ["out0", "out1"]),
    "open_clip.ClipLoss": (
        dict.fromkeys(("local_loss", "gather_with_grad", "cache_labels"), False)
        | {"rank": 0, "world_size": 1, "use_horovod": False},
        PAIRS,
    ),
    "open_clip.SigLipLoss": ({"cache_labels": False, "rank": 0, "world_size": 1, "dist_impl": None}, PAIRS),
} | {
    f"sentence_transformers.{name}RankingLoss": (defaults, ["sentence_features", "labels"])
    for name, defaults in {
        "MultipleNegatives": RANKING | {"gather_across_devices": False} | DIRECTIONS | HARDNESS,
        "MultipleNegativesSymmetric": RANKING | {"gather_across_devices": False},
        "CachedMultipleNegatives": RANKING | BATCHES | DIRECTIONS | {"show_progress_bar": False} | HARDNESS,
        "CachedMultipleNegativesSymmetric": RANKING | BATCHES | {"show_progress_bar": False},
    }.items()
}


def original(name: str) -> Any:
    library, _, loss = name.partition(".")
    return getattr(pytest.importorskip(ORIGINALS[library], reason=f"{library} is not installed"), loss)


def drop_in(name: str) -> Any:
    library, _, loss = name.partition(".")
    return getattr(importlib.import_module(f"fedkernels.compat.{library}"), loss)


def model_of(name: str) -> list[nn.Module]:
    return [nn.Sequential(nn.Identity())] if name.startswith("sentence_transformers") else []


@pytest.mark.filterwarnings("ignore:The .*SymmetricRankingLoss is deprecated")
@pytest.mark.parametrize("library", [drop_in, original])
@pytest.mark.parametrize("name", SIGNATURES)
def test_the_arguments_are_these(name, library):
    """Each default may be given and is an attribute."""
    loss, (defaults, call) = library(name), SIGNATURES[name]
    arguments = [p for p in inspect.signature(loss.__init__).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    found = [(p.name, getattr(p.default, "__name__", p.default)) for p in arguments if p.name not in ("self", "model")]
    assert found == list(defaults.items())
    assert list(inspect.signature(loss.forward).parameters)[1:] == call
    if library is drop_in:
        made = loss(*model_of(name), **defaults)
        expected = defaults | ({"dist_impl": "bidir"} if "dist_impl" in defaults else {})
        assert all(getattr(made, key) == value for key, value in expected.items() if key != "memory_bank_size")
        assert list(made.state_dict()) == []
        if "gather_across_devices" in defaults:
            assert loss(*model_of(name), gather_across_devices=True).gather_across_devices is True


@pytest.mark.filterwarnings("ignore:The .*SymmetricRankingLoss is deprecated")
@pytest.mark.parametrize("name", SIGNATURES)
def test_the_originals_defaults_are_accepted_as_they_are(name):
    """Also as functions: sentence_transformers.util.cos_sim is the default there."""
    parameters = inspect.signature(original(name).__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    ours, theirs = (library(name)(*model_of(name), **defaults) for library in (drop_in, original))
    for key in (*defaults, "temperature", "eps"):
        if hasattr(theirs, key):
            assert getattr(ours, key) == getattr(theirs, key), key
    if model_of(name):
        assert ours.get_config_dict() == theirs.get_config_dict()
        numbers = [re.findall(r"\d{4}\.\d{5}", loss.citation) for loss in (ours, theirs)]
        assert set(numbers[0]) == set(numbers[1])


RANKING_LOSS = "sentence_transformers.MultipleNegativesRankingLoss"
CACHED = "sentence_transformers.CachedMultipleNegativesRankingLoss"


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("lightly.NTXentLoss", {"memory_bank_size": 10}, r"memory_bank_size must be 0, or \(rows, dim\).*got 10"),
        ("lightly.NTXentLoss", {"memory_bank_size": (4, -1)}, r"memory_bank_size must be 0.*got \(4, -1\)"),
        ("lightly.NTXentLoss", {"temperature": 0.0}, "temperature must be at least 1e-08, got 0.0"),
        ("open_clip.ClipLoss", {"use_horovod": True}, r"use_horovod must be False.*use open_clip.ClipLoss"),
        ("open_clip.SigLipLoss", {"dist_impl": "ring"}, "dist_impl must be None or one of bidir, shift, reduce, gat"),
        (RANKING_LOSS, {"partition_mode": "x"}, "partition_mode must be one of"),
        (RANKING_LOSS, {"directions": ("query_to_doc", "query_to_query")}, "directions must be"),
        (RANKING_LOSS, {"scale": 0.0}, "scale must be positive, got 0.0"),
        (CACHED, {"show_progress_bar": True}, "show_progress_bar must be False"),
        (CACHED, {"mini_batch_size": 0}, "mini_batch_size must be at least 1, got 0"),
        (CACHED, {"mini_batch_size": 2.5}, "mini_batch_size must be an integer, got float"),
        (CACHED, {"mini_batch_num_tokens": 0}, "mini_batch_num_tokens must be at least 1, got 0"),
    ],
)
def test_what_only_the_original_has_is_refused(name, options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        drop_in(name)(*model_of(name), **options)
