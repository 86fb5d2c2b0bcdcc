"""Supervised training with labels, the usual task of federated averaging."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..augmentations.base import Augmentation
from ..augmentations.random_views import CROP_AND_FLIP, RandomViews
from ..models.model import CLASSIFIER, Model
from .base import Objective, Step


class Supervised(Objective):
    """Cross-entropy of a linear classifier on the encoder, on one augmented view.

    The views of self-supervised methods are harder than supervised training uses. Images are therefore only
    cropped a little and mirrored with the recipe's probability `augmentation.flip`. The crop has 0.64 to 1 of the area,
    so at least 0.8 of each side, as in FedU2's released code for labels (semi_eval.py). It stands for the usual crop of
    a padded image, which moves a 32x32 image by up to 4 pixels. Hetero-SSFL does not say how its supervised FedAvg
    augments. An augmentation of your own is used as it is. Evaluation logs its accuracy as `classifier`.
    """

    needs_labels = True
    views: ClassVar[int] = 1

    def training_augmentation(self, augmentation: Augmentation) -> Augmentation:
        if type(augmentation) is not RandomViews:
            return augmentation
        return RandomViews(**CROP_AND_FLIP.model_dump() | {"name": augmentation.name, "flip": augmentation.flip})

    def build(self, encoder: nn.Module, classes: int) -> Model:
        return Model({"encoder": encoder, CLASSIFIER: nn.Linear(encoder.num_features, classes)})  # type: ignore[arg-type]

    def step(self, model: Model, views: tuple[Tensor, ...], labels: Tensor) -> Step:
        representations = model.encoder(views[0])
        return Step(F.cross_entropy(model.online[CLASSIFIER](representations), labels), (representations,))
