"""The sigmoid loss in plain PyTorch (Zhai et al. 2023, SigLIP, Algorithm 1)."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fedkernels.reference._precision import no_autocast
from fedkernels.reference._reduce import reduce
from fedkernels.reference.similarity_logsumexp import similarities


def sigmoid_loss(
    image: Tensor, text: Tensor, logit_scale: Tensor | float, logit_bias: Tensor | float, reduction: str = "mean"
) -> Tensor:
    """loss_i = -sum_j log sigmoid(z_ij (s x_i . y_j + b)), z_ij 1 for i = j and else -1; image and text [B, d]."""
    logits = similarities(image, text)
    with no_autocast(image):
        signs = 2 * torch.eye(image.shape[0], dtype=logits.dtype, device=logits.device) - 1
        return reduce(-logsigmoid(signs * (logits * logit_scale + logit_bias)).sum(dim=1), reduction)
