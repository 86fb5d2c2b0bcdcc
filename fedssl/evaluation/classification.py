"""Scores of a classification in which every class has the same weight, for data with rare classes."""

from torch import Tensor


def classification_scores(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, and per-class scores averaged over the classes (macro), by scikit-learn; all in percent.

    Args:
        predicted: integer [m].
        labels: integer [m], m at least 1.

    Returns:
        Five percentages by name. `accuracy` is that of correct predictions. `per_class_accuracy` is the mean of the
        classes' own accuracies, the LW-FedSSL paper's figure for Caltech-101 and MedMNIST. `precision`, `recall` and
        `f1` are the means of the classes' own values. By definition mean per-class accuracy and macro recall are the
        same number; both names are in use. Means are over the classes that have test images. A class that is never
        predicted has precision 0.
    """
    from sklearn.metrics import precision_recall_fscore_support  # here, as importing it takes a second

    true_classes, predicted_classes = labels.cpu().numpy(), predicted.cpu().numpy()
    precision, recall, f1, _ = precision_recall_fscore_support(
        true_classes,
        predicted_classes,
        labels=sorted(set(true_classes.tolist())),
        average="macro",
        zero_division=0.0,
    )
    accuracy = float((true_classes == predicted_classes).mean())
    scores = {"accuracy": accuracy, "per_class_accuracy": recall, "precision": precision, "recall": recall, "f1": f1}
    return {name: 100.0 * float(value) for name, value in scores.items()}
