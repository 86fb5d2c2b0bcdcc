"""Pairs of images and texts, for the benchmarks of clip_loss and sigmoid_loss."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Inputs

SCALE = 1 / 0.07  # with which CLIP starts


def pairs(rows: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Inputs:
    """Rows of norm 1 that share half of their variance with their partner, a scale and a bias; all want gradients."""
    draw = partial(torch.randn, rows, width, generator=torch.Generator(device).manual_seed(0), device=device)
    both = draw()
    image, text = (F.normalize(both + draw(), dim=1).to(dtype) for _ in range(2))
    scale, bias = (torch.tensor(value, device=device) for value in (SCALE, -10.0))
    inputs = {"image": image, "text": text, "logit_scale": scale, "logit_bias": bias}
    return {name: tensor.requires_grad_() for name, tensor in inputs.items()}


def products(logits: int, inputs: Inputs) -> Callable[[], None]:
    """Forms the logits so many times, and both gradients, with one buffer for the logits."""
    image, text = inputs["image"].detach(), inputs["text"].detach()
    square: Tensor = torch.empty(len(image), len(image))
    gradient = torch.empty_like(image)

    def call() -> None:
        for _ in range(logits):
            torch.mm(image, text.T, out=square)
        torch.mm(square, text, out=gradient)
        torch.mm(square.T, image, out=gradient)

    return call
