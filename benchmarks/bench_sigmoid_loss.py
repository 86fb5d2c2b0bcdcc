"""SigLIP's loss, forward and backward, with the gradients of scale and bias; float32 on the CPU, rows of norm 1."""

import importlib
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Bar, Case, Floor, Implementation, Inputs, Outputs, Work, in_float64, value_and_gradients
from benchmarks.pairs import pairs, products
from fedkernels import sigmoid_loss

NAIVE = "naive logsigmoid"
NAIVE_NOTE = "F.logsigmoid of all logits times their signs"
OPEN_CLIP = "open_clip SigLipLoss"


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
            Implementation("fedkernels.sigmoid_loss", _ours),
            Implementation(NAIVE, _naive, note=NAIVE_NOTE),
            Implementation(OPEN_CLIP, _open_clip, package="open_clip_torch"),
        ),
        truth=lambda inputs: _naive(in_float64(inputs)),
        floor=Floor("3 x torch.mm of 2 B B d operations: the logits, both gradients", partial(products, 1)),
        bars=(Bar(faster_than=(NAIVE,), times=1.0), Bar(extra_mib=40.0)),
    )


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    rows, width = (32, 16) if quick else (8192, 512)
    return (
        Case(
            size=f"bfloat16, B = {rows}, d = {width}",
            inputs=partial(pairs, rows, width, dtype=torch.bfloat16),
            implementations=(
                Implementation(
                    "fedkernels.sigmoid_loss", _ours, note="the rows in 16 bits, scale and bias on the device"
                ),
                Implementation(NAIVE, _naive, note=NAIVE_NOTE),
                Implementation(OPEN_CLIP, _open_clip, package="open_clip_torch"),
            ),
            truth=lambda inputs: _naive(in_float64(inputs)),
            work=Work(3 * 2.0 * rows * rows * width, "bf16", "3 products of B x B x d"),
        ),
    )


def _of_all(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return inputs["image"], inputs["text"], inputs["logit_scale"], inputs["logit_bias"]


def _ours(inputs: Inputs) -> Outputs:
    return value_and_gradients(sigmoid_loss(*_of_all(inputs)), inputs)


def _naive(inputs: Inputs) -> Outputs:
    image, text, scale, bias = _of_all(inputs)
    logits = scale * (image @ text.T) + bias
    signs = 2 * torch.eye(len(image), dtype=logits.dtype, device=logits.device) - 1
    return value_and_gradients(-F.logsigmoid(signs * logits).sum() / len(image), inputs)


def _open_clip(inputs: Inputs) -> Outputs:
    loss = importlib.import_module("open_clip.loss").SigLipLoss()
    return value_and_gradients(loss(*_of_all(inputs)), inputs)
