"""Batches of features, as sentence-transformers' models take them: parts of one, and several joined."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Features = dict[str, Any]


def ranges(features: Features, size: int, tokens: int | None) -> list[tuple[int, int]]:
    """Splits the samples of `features` into mini-batches, each given by its first sample and the one after its last.

    Args:
        features: what the model takes.
        size: the number of samples of a mini-batch.
        tokens: if not None, the most tokens of a mini-batch instead; a longer sample is one of its own.

    Raises:
        ValueError: there is no tensor in `features`, or nothing tells the numbers of tokens.
    """
    samples = _number_of_samples(features)
    if tokens is None:
        return [(begin, min(begin + size, samples)) for begin in range(0, max(samples, 1), size)]
    if "cu_seq_lens_q" in features:
        lengths = features["cu_seq_lens_q"].diff().tolist()
    elif "attention_mask" in features:
        lengths = features["attention_mask"].sum(dim=1).tolist()
    else:
        raise ValueError(
            "mini_batch_num_tokens needs attention_mask or cu_seq_lens_q among the features: leave it None"
        )
    begins, total = [0], 0
    for sample, length in enumerate(lengths):
        if sample > begins[-1] and total + length > tokens:
            begins.append(sample)
            total = 0
        total += length
    return list(zip(begins, [*begins[1:], samples], strict=True))


def mini_batch(features: Features, begin: int, end: int) -> Features:
    """Copies samples `begin` to `end`: a new dict of new tensors, so that nothing a model writes stays in `features`.

    Tensors that have a row for each sample are cut. Padding that no sample of the mini-batch needs is left out. Tokens
    without padding (``cu_seq_lens_q``), bags of tokens (``offsets``) and images or videos of which a sample has several
    or none (``num_images_per_sample``, ``image_grid_thw``) are cut where the samples' own parts begin and end.
    """
    if "cu_seq_lens_q" in features:
        part = _of_flattened(features, begin, end)
    elif "offsets" in features:
        bounds = [*features["offsets"].tolist(), len(features["input_ids"])]
        offsets = features["offsets"][begin:end] - bounds[begin]
        part = features | {"input_ids": features["input_ids"][bounds[begin] : bounds[end]], "offsets": offsets}
    else:
        part = _of_padded(features, begin, end)
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in part.items()}


def joined(columns: list[Features]) -> Features | None:
    """Joins the samples of all columns, one column after the other, padded to the longest.

    Returns None where sentence-transformers 6 does not join them either: flattened tokens or none, features of other
    names, shapes or values, tensors that have no row for each sample.
    """
    first = columns[0]
    if "cu_seq_lens_q" in first or any(column.keys() != first.keys() for column in columns):
        return None
    if not any(
        isinstance(first.get(name), Tensor) and first[name].ndim > 1 for name in ("input_ids", "attention_mask")
    ):
        return None
    whole = {}
    for name in first:
        values = [column[name] for column in columns]
        whole[name] = _common(values) if name == "prompt_length" else _stacked(values, _number_of_samples(first))
        if whole[name] is None:
            return None
    return whole


def _stacked(values: list[Any], samples: int) -> Any:
    """The tensors' rows with zeros at their ends, or what is no tensor; None if they do not fit."""
    first = values[0]
    if not isinstance(first, Tensor):
        return _common(values)
    if any(not isinstance(value, Tensor) or value.ndim != first.ndim or value.ndim == 0 for value in values):
        return None
    if any(len(value) != samples or value.shape[2:] != first.shape[2:] for value in values):
        return None
    if first.ndim == 1 or len({value.shape[1] for value in values}) == 1:
        return torch.cat(values)
    if first.is_floating_point():
        return None
    longest = max(value.shape[1] for value in values)
    return torch.cat([F.pad(value, [0, 0] * (value.ndim - 2) + [0, longest - value.shape[1]]) for value in values])


def _common(values: list[Any]) -> Any:
    """The value that all are equal to, or None."""
    first = values[0]
    equal = torch.equal if isinstance(first, Tensor) else lambda one, other: bool(one == other)
    try:
        return first if all(equal(value, first) for value in values) else None
    except (RuntimeError, TypeError, ValueError):  # arrays, for example, or tensors on two devices
        return None


def _number_of_samples(features: Features) -> int:
    if "cu_seq_lens_q" in features:
        return len(features["cu_seq_lens_q"]) - 1
    first = ("offsets", "input_ids", "attention_mask")  # some models have images in one row after another
    for name in (*first, *features):
        value = features.get(name)
        if isinstance(value, Tensor) and value.ndim > 0:
            return len(value)
    raise ValueError(f"each column of sentence_features must hold a tensor, got {sorted(features)}")


def _of_padded(features: Features, begin: int, end: int) -> Features:
    samples, visual, mask = _number_of_samples(features), _visual(features, begin, end), features.get("attention_mask")
    width = longest = 0
    if isinstance(mask, Tensor) and mask.ndim == 2:
        used = mask[begin:end].any(dim=0).nonzero()
        width = mask.shape[1]
        longest = int(used[-1]) + 1 if len(used) else width
    part = {}
    for name, value in features.items():
        if name in visual:
            if visual[name].stop > visual[name].start:  # a mini-batch without images is one of text alone
                part[name] = value[visual[name]]
        elif not isinstance(value, Tensor) or value.ndim == 0 or len(value) != samples:
            part[name] = value
        elif value.ndim > 1 and value.shape[1] == width and not name.startswith("pixel_"):
            part[name] = value[begin:end, :longest]
        else:
            part[name] = value[begin:end]
    return part


def _visual(features: Features, begin: int, end: int) -> dict[str, slice]:
    """The rows of those tensors that have a row for each image or video, or for each of their patches."""
    rows: dict[str, slice] = {}
    # Models that pad the images of each sample have one of these masks, and a row for each sample.
    padded = {"pixel_attention_mask", "aspect_ratio_ids"} & features.keys()
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        grid, counts = features.get(f"{kind}_grid_thw"), features.get(f"num_{kind}s_per_sample")
        if pixels not in features:
            continue
        if grid is not None and (counts is not None or len(grid) == _number_of_samples(features)):
            items = slice(begin, end) if counts is None else _between(counts, begin, end)
            rows[f"{kind}_grid_thw"] = items
            rows[pixels] = _between(grid.prod(dim=1), items.start, items.stop)
        elif kind == "image" and counts is not None and not padded and len(features[pixels]) == int(counts.sum()):
            names = {pixels, "image_position_ids", "image_sizes"} & features.keys()
            rows |= dict.fromkeys(names, _between(counts, begin, end))
    return rows


def _between(lengths: Tensor, begin: int, end: int) -> slice:
    """The rows of items `begin` to `end`, of which item i has ``lengths[i]``."""
    bounds = [0, *lengths.cumsum(dim=0).tolist()]
    return slice(bounds[begin], bounds[end])


def _of_flattened(features: Features, begin: int, end: int) -> Features:
    """Of samples whose tokens are one sequence, [..., tokens], from ``cu_seq_lens_q[i]`` on for sample i."""
    bounds = features["cu_seq_lens_q"]
    first, last, total = bounds[[begin, end, -1]].tolist()
    own_bounds = bounds[begin : end + 1] - first
    part = {}
    for name, value in features.items():
        if name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            part[name] = own_bounds
        elif name in ("max_length_q", "max_length_k"):
            part[name] = int(own_bounds.diff().max())
        elif isinstance(value, Tensor) and value.ndim > 0 and value.shape[-1] == total:
            part[name] = value[..., first:last]
        else:
            part[name] = value
    if "seq_idx" in part:
        part["seq_idx"] = part["seq_idx"] - begin
    return part
