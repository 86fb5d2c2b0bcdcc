"""Scores of a classification in which every class counts alike, as for medical images with a rare class."""

from torch import Tensor


def classification_scores(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, and per-class scores averaged over the classes (macro), by scikit-learn; all in percent.

    Args:
        predicted: integer [m].
        labels: integer [m], m at least 1.

    Returns:
        `accuracy`: the share that is right. `per_class_accuracy`: the mean over the classes of the share of each that
        is right, the LW-FedSSL paper's figure for Caltech-101 and MedMNIST. `precision`, `recall`, `f1`: the means of
        each class's. By definition mean per-class accuracy and macro recall are the same number; both names are in use.
        Averaged is over the classes that have test images. A class that is never predicted has precision 0.
    """
    from sklearn.metrics import precision_recall_fscore_support  # here, as importing it takes a second

    truth, guess = labels.cpu().numpy(), predicted.cpu().numpy()
    precision, recall, f1, _ = precision_recall_fscore_support(
        truth, guess, labels=sorted(set(truth.tolist())), average="macro", zero_division=0.0
    )
    accuracy = float((truth == guess).mean())
    scores = {"accuracy": accuracy, "per_class_accuracy": recall, "precision": precision, "recall": recall, "f1": f1}
    return {name: 100.0 * float(value) for name, value in scores.items()}
