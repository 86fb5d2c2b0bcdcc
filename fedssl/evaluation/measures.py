"""Weighted k-nearest-neighbour accuracy: how near samples of one class lie to each other, without any training."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UserError
from .features import require_finite

# Similarities held at a time: 64 MiB in float32, whatever the size of the test set.
_SIMILARITIES_AT_A_TIME = 16 * 2**20


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    neighbors: int = 20,
    temperature: float = 0.1,
) -> float:
    """Accuracy of the weighted nearest-neighbour classifier of Wu et al. 2018 (section 3.4), in percent.

    Each of the `neighbors` training samples of highest cosine similarity s to a test sample votes for its
    class with weight exp(s / temperature). The class with the highest sum wins, and of equal ones that with the
    lowest index. With fewer training samples than `neighbors`, all of them vote. A zero vector has similarity 0 to
    everything.

    Wu et al. use 200 neighbours and temperature 0.07 on ImageNet; the defaults here suit small training sets.

    Args:
        train_features: floating point [n, d], finite.
        train_labels: integer [n], at least 0.
        test_features: floating point [m, d], finite.
        test_labels: integer [m], at least 0.
        neighbors: number of voters, at least 1.
        temperature: above 0; a lower one gives the nearest samples more weight.

    Returns:
        Percentage of the m test samples that are classified correctly, 0 to 100.

    Raises:
        UserError: a feature is not finite, or an option is out of range.
    """
    require_finite("train_features", train_features)
    require_finite("test_features", test_features)
    if neighbors < 1:
        raise UserError(f"neighbors: expected at least 1, got {neighbors}")
    if not temperature > 0:
        raise UserError(f"temperature: expected above 0, got {temperature}")

    dtype = torch.promote_types(torch.promote_types(train_features.dtype, test_features.dtype), torch.float32)
    device = train_features.device
    keys = F.normalize(train_features.to(dtype), dim=1)
    queries = F.normalize(test_features.to(device, dtype), dim=1)
    key_labels = train_labels.to(device, torch.int64)
    classes = int(key_labels.max()) + 1
    voters = min(neighbors, len(keys))
    chunk = max(1, _SIMILARITIES_AT_A_TIME // len(keys))

    correct = 0
    for query, label in zip(queries.split(chunk), test_labels.to(device).split(chunk), strict=True):
        similarity, index = (query @ keys.T).topk(voters, dim=1)
        # The first is the highest; relative to it the weights cannot overflow, and the winner is the same.
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        votes = torch.zeros(len(query), classes, dtype=dtype, device=device)
        votes.scatter_add_(1, key_labels[index], weight)
        correct += int((votes.argmax(dim=1) == label).sum())
    return 100.0 * correct / len(queries)


def singular_values(features: Tensor) -> Tensor:
    """Singular values of the column-centred representation matrix divided by sqrt(n).

    They are the standard deviations of the representation along its principal axes, so they do not grow with
    the number of samples: their squares are the eigenvalues of the covariance matrix (with divisor n).

    Args:
        features: floating point [n, d], finite, one representation a row.

    Returns:
        float64 [min(n, d)], descending, on the device of `features`.

    Raises:
        UserError: a feature is not finite.
    """
    require_finite("features", features)
    matrix = features.detach().to(torch.float64)
    return torch.linalg.svdvals((matrix - matrix.mean(dim=0)) / len(matrix) ** 0.5)


def log_covariance_singular_values(features: Tensor, top: int = 100) -> Tensor:
    """Natural logarithms of the largest singular values of the covariance matrix, for FedU2's Figure 3.

    The covariance (divisor n) is that of the l2-normalised representations, which the paper works with. Its singular
    values sum to at most 1, so models of different scales compare. Values below 1e-12, which float32 cannot resolve,
    are set to that.

    Args:
        features: floating point [n, d], finite, one representation a row.
        top: the most values to return.

    Returns:
        float64 [min(n, d, top)], descending, between log(1e-12) = -27.6 and 0.

    Raises:
        UserError: a feature is not finite.
    """
    values = singular_values(F.normalize(features.detach().to(torch.float64), dim=1))[:top]
    return values.square().log().clamp(min=math.log(1e-12))


def effective_rank(features: Tensor) -> float:
    """Effective rank of Roy & Vetterli 2007: exp of the entropy of the singular values normalised to sum one.

    effective rank = exp(-sum_i p_i log p_i) with p_i = s_i / sum_j s_j, s = `singular_values(features)`. It
    lies between 1 (all variation along one axis) and min(n - 1, d) (all axes vary alike), and does not change
    when the representation is scaled, shifted or rotated.

    Roy & Vetterli leave it undefined where nothing varies. Here it is then 1.0, the lowest value, as the
    representation has fully collapsed. That includes one sample, and representations that differ by no more
    than the rounding of their dtype, whose directions would be noise.

    Args:
        features: floating point [n, d], finite, one representation a row.

    Raises:
        UserError: a feature is not finite.
    """
    values = singular_values(features)
    root_mean_square_norm = features.detach().to(torch.float64).norm() / len(features) ** 0.5
    rounding = 16 * torch.finfo(features.dtype).eps * root_mean_square_norm
    if values.norm() <= rounding:  # the norm of the spectrum is the root mean square distance from the mean
        return 1.0
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())


def sphere_points(features: Tensor) -> Tensor:
    """The l2-normalised representations, projected onto their three main directions and normalised again.

    This is for FedU2's Figure 4, whose text does not say how 512 dimensions become three. Here they are the first right
    singular vectors of the normalised representations, without centring, as the sphere has its centre at 0. A
    representation that collapses to a point stays a point, and one that varies along one direction becomes an arc. The
    sign of each direction is that of the mean, so the first axis points at the middle of the cloud.

    Args:
        features: floating point [n, d], finite.

    Returns:
        float64 [n, 3] of norm 1. Where d < 3 the last coordinates are 0. A row orthogonal to the three directions is 0.
    """
    rows = F.normalize(features.detach().double(), dim=1)
    directions = torch.linalg.svd(rows, full_matrices=False).Vh[:3]
    points = rows @ directions.T
    points = points * torch.where(points.mean(dim=0) < 0, -1.0, 1.0)
    return F.normalize(F.pad(points, (0, 3 - points.shape[1])), dim=1)


def sphere_coverage(points: Tensor, cells: int = 200) -> float:
    """Share of the sphere's cells that hold a point, 0 to 1; a low share means that much of the sphere is blank.

    Each cell has the positions nearest to one point of a Fibonacci lattice; the cells' areas are equal to a few
    percent. n points drawn uniformly reach about 1 - (1 - 1/cells)^n, so compare only figures with the same n.

    Args:
        points: floating point [n, 3], of norm 1.
        cells: number of cells.
    """
    index = torch.arange(cells, dtype=torch.float64)
    height = 1 - (2 * index + 1) / cells
    angle = index * math.pi * (3 - math.sqrt(5))
    radius = (1 - height.square()).sqrt()
    lattice = torch.stack([radius * angle.cos(), radius * angle.sin(), height], dim=1)
    nearest = (points.detach().cpu().double() @ lattice.T).argmax(dim=1)
    return len(nearest.unique()) / cells


def uniformity(features: Tensor) -> float:
    """log of the mean over pairs i < j of exp(-2 |z_i - z_j|^2), z the l2-normalised representations.

    Wang & Isola 2020, section 4.1.2, with t = 2. The lower, the more uniform: 0 where all representations are one
    point, about -4 for uniform ones in many dimensions, where squared distances are near 2. A zero vector stays zero.

    Args:
        features: floating point [n, d], finite, n at least 2.

    Raises:
        UserError: fewer than two representations.
    """
    if len(features) < 2:
        raise UserError(f"features: expected at least two representations, got {len(features)}; raise data.test_limit")
    distances = torch.pdist(F.normalize(features.detach().double(), dim=1))
    return float((-2 * distances.square()).logsumexp(dim=0)) - math.log(len(distances))


def alignment(first: Tensor, second: Tensor) -> float:
    """Mean over images of |z - z'|^2, z and z' the l2-normalised representations of two views of an image.

    Wang & Isola 2020, section 4.1.1, with alpha = 2. The value is between 0 (both
    views have the same representation) and 4. A collapsed representation is perfectly aligned, so read it beside
    `uniformity`. A zero vector stays zero.

    Args:
        first: floating point [n, d], finite; one view of each image.
        second: floating point [n, d], finite; another view of the same images in the same order.
    """
    difference = F.normalize(first.detach().double(), dim=1) - F.normalize(second.detach().double(), dim=1)
    return float(difference.square().sum(dim=1).mean())


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
