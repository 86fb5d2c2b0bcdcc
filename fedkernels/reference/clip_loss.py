"""CLIP's loss in plain PyTorch (Radford et al. 2021, Figure 3)."""

from torch import Tensor

from fedkernels.reference._precision import no_autocast
from fedkernels.reference.similarity_logsumexp import similarities


def clip_loss(image: Tensor, text: Tensor, logit_scale: Tensor | float) -> Tensor:
    """The mean cross-entropy of images against texts and of texts against images, halved; image and text [B, d]."""
    logits = similarities(image, text)
    with no_autocast(image):
        logits = logits * logit_scale
        # log_softmax subtracts the largest before anything is rounded, which logsumexp - positive does not.
        of_texts, of_images = (-logits.log_softmax(dim).diagonal().mean() for dim in (0, 1))
        return (of_images + of_texts) / 2
