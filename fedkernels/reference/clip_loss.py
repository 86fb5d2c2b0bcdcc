"""CLIP's loss in plain PyTorch (Radford et al. 2021, Figure 3)."""

from torch import Tensor

from fedkernels.reference._precision import no_autocast
from fedkernels.reference._reduce import reduce
from fedkernels.reference.similarity_logsumexp import similarities


def clip_loss(image: Tensor, text: Tensor, logit_scale: Tensor | float, reduction: str = "mean") -> Tensor:
    """The cross-entropies of images against texts and of texts against images, halved; image and text [B, d]."""
    logits = similarities(image, text)
    with no_autocast(image):
        logits = logits * logit_scale
        # log_softmax subtracts the largest before anything is rounded, which logsumexp - positive does not.
        of_texts, of_images = (reduce(-logits.log_softmax(dim).diagonal(), reduction) for dim in (0, 1))
        return (of_images + of_texts) / 2
