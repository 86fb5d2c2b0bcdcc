"""The mean area under the ROC curve over several labels an image."""

import torch

from fedssl.evaluation.linear import LinearOptions, linear_auroc

QUICK = LinearOptions(epochs=40, batch_size=50, learning_rate=0.05)


def features(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


def test_labels_that_the_features_hold_are_ordered():
    train, test = features(400, 0), features(200, 1)

    def held(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values[:, 0] > 0, values[:, 1] - values[:, 2] > 1.5], dim=1).to(torch.uint8)

    assert linear_auroc(train, held(train), test, held(test), QUICK, 0) > 98
    shuffled = held(test)[torch.randperm(200, generator=torch.Generator().manual_seed(2))]
    assert 35 < linear_auroc(train, held(train), test, shuffled, QUICK, 0) < 65
    # One label in the wrong order and one in the right order have the mean of chance.
    half = held(test)
    half[:, 0] = 1 - half[:, 0]
    assert 45 < linear_auroc(train, held(train), test, half, QUICK, 0) < 55


def test_labels_without_both_values_do_not_count():
    train, test = features(60, 0), features(40, 1)
    targets, truth = (torch.stack([x[:, 0] > 0, x[:, 0] > 99], dim=1).to(torch.uint8) for x in (train, test))
    assert linear_auroc(train, targets, test, truth, QUICK, 0) > 95
    assert linear_auroc(train, targets[:, 1:], test, truth[:, 1:], QUICK, 0) is None


def test_the_seed_decides():
    train, test = features(60, 0), features(40, 1)
    targets, truth = ((x[:, :3] > 0).to(torch.uint8) for x in (train, test))
    options = QUICK.model_copy(update={"epochs": 1})
    first, again, other = (linear_auroc(train, targets, test, truth, options, seed) for seed in (0, 0, 1))
    assert first == again != other
