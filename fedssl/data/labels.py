"""What is odd about the labels of a data set: told in a line each, as the run goes on."""

from .files import listed, notify
from .splits import Splits

_MISSING = ("nan", "na", "n/a", "<na>", "null", "none", "nil", "")  # what programs write for a missing value


def tell_of_labels(splits: Splits) -> None:
    """Tell of classes that may be no class, the same as another or without images, and of splits of one class."""
    names, targets = splits.class_names, [part.targets for part in (splits.train, splits.test)]
    missing = [name for name in names if name.strip().lower() in _MISSING]
    if missing:
        notify(f"{listed(missing)} counts as a class: leave such images out where it says that a label is missing")
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(" ".join(name.split()).casefold(), []).append(repr(name))
    twins = [" and ".join(same) for same in alike.values() if len(same) > 1]
    if twins:
        notify(f"{listed(twins)} differ in capitals or spaces alone and are several classes: write them alike if not")
    train, test = (set(part.labels.tolist()) for part in (splits.train, splits.test))
    empty = [name for number, name in enumerate(names) if train and number not in train]
    if empty:
        notify(f"no training image is of the class {listed(empty)}: number classes 0, 1, 2, ... if it is left out")
    single = [what for what, found in (("training", train), ("test", test)) if names and len(found) == 1]
    if single:
        notify(f"all {' and all '.join(single)} images are of one class, so that no accuracy and no AUROC is measured")
    if all(rows is not None and bool((rows.sum(1) == 1).all()) for rows in targets):
        notify("each image has exactly one of several labels: save labels.argmax(1) in their place if they are classes")
