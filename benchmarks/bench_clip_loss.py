"""CLIP's loss, forward and backward, with the gradient of the scale; float32 on the CPU, rows of norm 1."""

import importlib
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, Work, in_float64, value_and_gradients
from benchmarks.pairs import pairs, products
from fedkernels import clip_loss

NAIVE = "naive cross-entropy"
NAIVE_NOTE = "the logits once; F.cross_entropy of them and of their transpose"
OPEN_CLIP = "open_clip ClipLoss"


def cases(quick: bool) -> tuple[Case, ...]:
    return (_case(*((64, 16) if quick else (4096, 512))),)


CURVE = "pairs of image and text"


def curve_cases(quick: bool) -> dict[int, Case]:
    """By the number of pairs."""
    width, sizes = (16, (32, 64)) if quick else (512, (256, 1024, 4096))
    return {rows: _case(rows, width) for rows in sizes}


def _case(rows: int, width: int) -> Case:
    return Case(
        size=f"B = {rows}, d = {width}",
        inputs=partial(pairs, rows, width),
        tiny=partial(pairs, 32, 16),
        implementations=(
            Implementation("fedkernels.clip_loss", _ours),
            Implementation(NAIVE, _naive, note=NAIVE_NOTE),
            Implementation(OPEN_CLIP, _open_clip, package="open_clip_torch", note="the logits twice"),
        ),
        truth=lambda inputs: _naive(in_float64(inputs)),
        floor=Floor("4 x torch.mm of 2 B B d operations: the logits twice, both gradients", partial(products, 2)),
        bars=(Bar(faster_than=(OPEN_CLIP,), times=2.0), Bar(extra_mib=40.0)),
    )


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    rows, width = (32, 16) if quick else (8192, 512)
    return (
        Case(
            size=f"bfloat16, B = {rows}, d = {width}",
            inputs=partial(pairs, rows, width, dtype=torch.bfloat16),
            implementations=(
                Implementation("fedkernels.clip_loss", _ours, note="the rows in 16 bits, the scale on the device"),
                Implementation(NAIVE, _naive, note=NAIVE_NOTE),
                Implementation(OPEN_CLIP, _open_clip, package="open_clip_torch", note="the logits twice"),
            ),
            truth=lambda inputs: _naive(in_float64(inputs)),
            work=Work(3 * 2.0 * rows * rows * width, "bf16", "3 products of B x B x d"),
        ),
    )


def _gradients(loss: Tensor, inputs: Inputs) -> Outputs:
    return value_and_gradients(loss, {name: inputs[name] for name in ("image", "text", "logit_scale")})


def _ours(inputs: Inputs) -> Outputs:
    return _gradients(clip_loss(inputs["image"], inputs["text"], inputs["logit_scale"]), inputs)


def _naive(inputs: Inputs) -> Outputs:
    logits = inputs["logit_scale"] * (inputs["image"] @ inputs["text"].T)
    numbers = torch.arange(len(logits), device=logits.device)
    return _gradients((F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)) / 2, inputs)


def _open_clip(inputs: Inputs) -> Outputs:
    loss = importlib.import_module("open_clip.loss").ClipLoss()
    return _gradients(loss(inputs["image"], inputs["text"], inputs["logit_scale"]), inputs)
