"""What a site's images look like: what the site tells the server before a run, and how two of them differ."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord

from ...federation import Federation
from ...rules import public_image_users

_MOST_CLASSES = 100_000
_MOST_IMAGES = 10**9  # of one site; its weights count by them


@dataclass(frozen=True)
class DataForm:
    """What a site's images look like.

    Attributes:
        shape: channels, height and width.
        classes: the names of the classes in their order; empty where the run uses no labels of the sites.
        public_digest: the digest of the public images; empty where the run uses none.
        images: how many training images the client has; 0 where that is not told.
    """

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    public_digest: str
    images: int = 0

    @classmethod
    def of(cls, federation: Federation, client: int | None = None) -> DataForm:
        """The form of a federation's images, and of a client's. It holds nothing that the run does not need.

        Under differential privacy or secure aggregation the number of a client's images is its own.
        """
        recipe, dataset = federation.recipe, federation.dataset
        private = recipe.flower.differential_privacy is not None or recipe.flower.secure_aggregation is not None
        labels_used = recipe.objective.needs_labels or federation.method.personal  # a site evaluates its own model
        return cls(
            tuple(dataset.train_images.shape[1:]),
            dataset.class_names if labels_used else (),
            digest_of_public_images(federation) if public_image_users(recipe) else "",
            0 if client is None or private else len(federation.client_rows[client]),
        )

    def to_record(self) -> ConfigRecord:
        """The form as a record of a Flower message."""
        values: dict[str, Any] = {"shape": list(self.shape), "classes": list(self.classes), "images": self.images}
        return ConfigRecord(values | {"public": self.public_digest})

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> DataForm | None:
        """The form in a record of `to_record`; None where the record holds none."""
        values: list[Any] = [record.get(name) for name in ("shape", "classes", "public", "images")]
        shape, classes, public_digest, images = values
        valid = (
            isinstance(shape, list)
            and len(shape) == 3
            and all(type(size) is int for size in shape)
            and isinstance(classes, list)
            and len(classes) <= _MOST_CLASSES
            and all(isinstance(name, str) for name in classes)
            and isinstance(public_digest, str)
            and type(images) is int
            and 0 <= images <= _MOST_IMAGES
        )
        return cls(tuple(shape), tuple(classes), public_digest, images) if valid else None

    def size_difference(self, server: DataForm) -> str | None:
        """How the images differ from the server's in size or channels, as a sentence; None where they do not."""
        if self.shape == server.shape:
            return None
        own, expected = (" x ".join(map(str, form.shape)) for form in (self, server))
        return f"its images are {own} (channels x height x width), but the server's are {expected}"

    def class_difference(self, other: DataForm) -> str | None:
        """How the classes differ from another's, to follow "it"; None where they do not."""
        if self.classes == other.classes:
            return None
        differences = []
        for verb, some, rest in (("has", self, other), ("lacks", other, self)):
            known = set(rest.classes)
            names = [name for name in some.classes if name not in known]
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                differences.append(f"{verb} {', '.join(repr(name[:40]) for name in names[:3])}{more}")
        return " and ".join(differences) or "has the same classes in another order"


def digest_of_public_images(federation: Federation) -> str:
    """A short text that two sites share only if their public images are the same; empty without such images."""
    images = federation.dataset.public_images
    if images is None:
        return ""
    digest = hashlib.sha256(str(list(images.shape)).encode())
    digest.update(images.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]
