"""A site of a federation across machines: one client with its own data, architecture and device."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from ...checking import explain_errors
from ...data.options import DataOptions
from ...errors import UserError
from ...federation import Federation, build_federation
from ...messages import Message
from ...options import Options
from ...recipe import Recipe
from ...rules import public_image_users
from ...run_directory import client_file
from ...storage import read_message, write_message


class SiteOptions(Options):
    """What a site says of itself, in a YAML file of its own that never leaves it."""

    client: int = Field(..., ge=0, description="the site's number, from 0; each client of the recipe is one site")
    data: DataOptions | None = Field(None, description="its own images; its share of the recipe's data where not given")
    architecture: str | None = Field(None, description="its own; the recipe's for this client where not given")
    device: str | None = Field(None, pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="the recipe's where not given")
    state: Path = Field(..., description="the folder that keeps the client's model between rounds")


def load_site(path: str | Path) -> SiteOptions:
    """Read a site's file.

    Raises:
        UserError: no such file; not YAML; a key or value that is not allowed.
    """
    path = Path(path).expanduser()
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the site's file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold keys such as client and state, it holds {type(values).__name__}")
    try:
        return SiteOptions.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {'; '.join(explain_errors(error, SiteOptions))}") from error


def site_federation(recipe: Recipe, site: SiteOptions) -> Federation:
    """The federation as a site sees it: its own client is whole, of the others it has no images.

    Raises:
        UserError: see `build_federation`; an unknown client; no data where each site brings its own.
    """
    clients = recipe.partition.clients
    if site.client >= clients:
        raise UserError(
            f"client is {site.client}, but the recipe has partition.clients {clients}: name 0 to {clients - 1}"
        )
    if site.data is None and recipe.partition.name == "sites":
        raise UserError("the recipe divides no data (partition sites): name the site's own images under data")
    architectures = [recipe.architecture_of(k) for k in range(clients)]
    if site.architecture is not None:
        architectures[site.client] = site.architecture
    changed = {
        "architectures": architectures,
        "data": site.data or recipe.data,
        "device": site.device or recipe.device,
    }
    return build_federation(recipe.model_copy(update=changed), owner=None if site.data is None else site.client)


def public_digest(federation: Federation) -> str:
    """A short text that two sites share only if their public images are the same; empty without such images."""
    images = federation.dataset.public_images
    if images is None:
        return ""
    digest = hashlib.sha256(str(list(images.shape)).encode())
    digest.update(images.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class DataForm:
    """What a site's images look like, as it tells the server before a run.

    Attributes:
        shape: channels, height and width.
        classes: the names of the classes in their order; empty where the run uses no labels of the sites.
        public: the digest of the public images; empty where the run uses none.
    """

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    public: str

    @classmethod
    def of(cls, federation: Federation) -> DataForm:
        """The form of a federation's images. Nothing is said that the run does not need."""
        recipe, dataset = federation.recipe, federation.dataset
        labels_used = recipe.objective.needs_labels or federation.method.personal  # a site evaluates its own model
        return cls(
            tuple(dataset.train_images.shape[1:]),
            dataset.class_names if labels_used else (),
            public_digest(federation) if public_image_users(recipe) else "",
        )

    def other_shape(self, other: DataForm) -> str | None:
        """How the images differ from another's in size or channels, for a sentence; None where they do not."""
        if self.shape == other.shape:
            return None
        mine, theirs = (" x ".join(map(str, form.shape)) for form in (self, other))
        return f"images of {mine} (channels, height, width), not {theirs}"

    def other_classes(self, other: DataForm) -> str | None:
        """How the classes differ from another's, for a sentence; None where they do not."""
        if self.classes == other.classes:
            return None
        found = []
        for what, mine, theirs in (("has", self, other), ("lacks", other, self)):
            known = set(theirs.classes)
            names = [name for name in mine.classes if name not in known]
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                found.append(f"{what} {', '.join(repr(name[:40]) for name in names[:3])}{more}")
        return " and ".join(found) or "has the same in another order"


class SiteStates:
    """A client's states on the site's disk: the one that the server's last commit counts on, and the newest."""

    def __init__(self, folder: Path, client: int, prune: bool):
        self._folder, self._client, self._prune = folder, client, prune

    @classmethod
    def of_run(cls, site: SiteOptions, run: str) -> SiteStates:
        """In a folder of the run's own below `site.state`; `run` is the name that the server gave it."""
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run):
            raise UserError(f"the server calls its run {run!r}, expected letters and digits")
        folder = site.state.expanduser() / run
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, site.client, prune=True)

    def load(self, round_number: int | None) -> Message:
        """The state after a round; empty for None: the client has not taken part yet.

        Raises:
            UserError: it is not here, or damaged.
        """
        return Message() if round_number is None else read_message(self._path(round_number))

    def store(self, round_number: int, state: Message, kept: int | None) -> None:
        """Keep a state, and drop all but it and that of the round `kept`, which may have to be trained from again."""
        path = self._path(round_number)
        write_message(path, state)
        if self._prune:
            needed = {path} if kept is None else {path, self._path(kept)}
            for other in self._folder.glob(f"client-{self._client:04d}.round-*"):
                if other not in needed:
                    other.unlink(missing_ok=True)

    def _path(self, round_number: int) -> Path:
        return self._folder / client_file(self._client, round_number)
