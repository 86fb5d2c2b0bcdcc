"""A site of a federation across machines: one client with its own data, architecture and device."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError
from torch import Tensor

from ...data.options import DataOptions
from ...errors import UserError
from ...evaluation.metrics import METRICS, is_measure, split_metric
from ...federation import Federation, build_federation
from ...messages import Message
from ...models.weights import ModelOptions
from ...options import Options, explain_errors
from ...recipe.recipe import Recipe
from ...run.directory import client_file
from ...run.storage import read_message, write_message
from ...untrusted import MOST_BYTES, expand_home, parse_yaml, read_regular_file

#: the SHA-256 of an app, which `fedssl app` prints
AppDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class SiteOptions(Options):
    """What a site's own YAML file holds. The file never leaves the site."""

    client: int = Field(..., ge=0, description="the site's number, from 0; each client of the recipe is one site")
    data: DataOptions | None = Field(None, description="its own images; its share of the recipe's data where not given")
    architecture: str | None = Field(None, description="its own; the recipe's for this client where not given")
    device: str | None = Field(None, pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="the recipe's where not given")
    state: Path = Field(..., description="the folder that keeps the client's model between rounds")
    approved_apps: list[AppDigest] | None = Field(
        None, max_length=1000, description="digests of the apps that may run at the site; any app where not given"
    )


def load_site(path: str | Path) -> SiteOptions:
    """Read a site's file.

    Raises:
        UserError: no such file; not YAML; a key or value that is not allowed.
    """
    path = expand_home(path)
    try:
        text = read_regular_file(path, MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the site's file {path} cannot be read: {error}") from error
    values = parse_yaml(text, f"the site's file {path}")
    if not isinstance(values, dict):
        raise UserError(
            f"the site's file {path} must hold keys with values, such as client: 0 and state: FOLDER; "
            f"got {type(values).__name__}"
        )
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
            f"the site's client is {site.client}, but the recipe has partition.clients={clients}: "
            f"expected 0 to {clients - 1}"
        )
    if site.data is None and recipe.partition.name == "sites":
        raise UserError(
            "the site's data is missing: the recipe has partition.name=sites, so each site's file must name its own "
            "images under data"
        )
    architectures = [recipe.architecture_of(k) for k in range(clients)]
    if site.architecture is not None:
        architectures[site.client] = site.architecture
    changed = {
        "architectures": architectures,
        "data": _own_data(recipe, site) or recipe.data,
        "device": site.device or recipe.device,
    }
    if not recipe.local_update.personal:
        # The weights to start from come with the server's first message, and the server evaluates the global model.
        changed["model"] = ModelOptions()
        changed["evaluation"] = recipe.evaluation.model_copy(update={"downstream": None})
    return build_federation(recipe.model_copy(update=changed), owner=None if site.data is None else site.client)


def _own_data(recipe: Recipe, site: SiteOptions) -> DataOptions | None:
    """The site's data. Image files are brought to the size that a recipe without data tells, if to no other."""
    data, shape = site.data, recipe.data.image_shape
    if data is None or shape is None or data.image_size is not None or shape[1] != shape[2]:
        return data
    return data.model_copy(update={"image_size": shape[1]})


class SiteStates:
    """A client's states by round: the one that the server's last commit counts on, and the newest."""

    def __init__(self, folder: Path, client: int, prune: bool):
        """Keep states in a folder; with `prune` those that are no longer needed are removed."""
        self._folder, self._client, self._prune = folder, client, prune

    @classmethod
    def of_run(cls, site: SiteOptions, run: str) -> SiteStates:
        """The states of one run, in a folder of its own below `site.state`.

        Args:
            site: the site's options.
            run: the name that the server gave the run.

        Raises:
            UserError: the name is none that a folder may have.
        """
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", run):
            raise UserError(
                f"the server's name of the run is invalid: expected 1 to 64 letters, digits, - or _, got {run[:100]!r}"
            )
        folder = expand_home(site.state) / run
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, site.client, prune=True)

    def load(self, round_number: int | None) -> Message:
        """The state after a round; empty for None: the client has not taken part yet.

        Raises:
            UserError: the state is missing or damaged.
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


_MEASURE = "evaluation/"


_SPECTRUM = "evaluation.spectrum"


_LONGEST_SPECTRUM = 2**16  # singular values: at most one for each feature of an encoder


_MOST_MEASURES = 100  # each is a line of metrics.csv


_LONGEST_NAME = 100  # characters in the name of a measure


@dataclasses.dataclass
class OwnEvaluation:
    """What a client says of its own model; not checked yet.

    Attributes:
        measures: by name, such as knn.
        spectrum: the singular values of the test representations [n]; None where there are none.
    """

    measures: dict[str, float]
    spectrum: Tensor | None


def add_evaluation(reply: Message, measures: dict[str, float], spectrum: Tensor) -> None:
    """Put an evaluation into a client's answer."""
    reply.numbers.update({_MEASURE + name: value for name, value in measures.items()})
    reply.tensors[_SPECTRUM] = spectrum


def split_evaluation(reply: Message) -> tuple[Message, OwnEvaluation]:
    """A client's answer to the round, and its evaluation."""
    measures = {name: value for name, value in reply.numbers.items() if name.startswith(_MEASURE)}
    numbers = {name: value for name, value in reply.numbers.items() if name not in measures}
    tensors = dict(reply.tensors)
    spectrum = tensors.pop(_SPECTRUM, None)
    evaluation = OwnEvaluation({name.removeprefix(_MEASURE): v for name, v in measures.items()}, spectrum)
    return dataclasses.replace(reply, tensors=tensors, numbers=numbers), evaluation


def evaluation_fault(evaluation: OwnEvaluation) -> str | None:
    """Why an evaluation cannot be used; None where it can."""
    spectrum = evaluation.spectrum
    if spectrum is None or spectrum.dim() != 1 or not spectrum.is_floating_point():
        return "its evaluation has no valid spectrum: expected one dimension of floating-point numbers"
    if len(spectrum) > _LONGEST_SPECTRUM:
        return f"its evaluation's spectrum has {len(spectrum)} values, more than {_LONGEST_SPECTRUM}"
    if not ((spectrum >= 0) & spectrum.isfinite()).all():
        return "its evaluation's spectrum is invalid: expected finite values that are not negative"
    if len(evaluation.measures) > _MOST_MEASURES:
        return f"its evaluation has {len(evaluation.measures)} measures, more than {_MOST_MEASURES}"
    for name, value in evaluation.measures.items():
        if not is_measure(name) or len(name) > _LONGEST_NAME:
            return f"its evaluation holds {name[:100]!r}, which is not a measure of a model"
        least, most = _bounds(name, len(spectrum))
        if not least <= value <= most:  # NaN compares false
            return f"its evaluation has an invalid {name}: expected {least:g} to {most:g}, got {value}"
    return None


def _bounds(measure: str, spectrum: int) -> tuple[float, float]:
    """The smallest and largest value of a measure; a little more than what rounding may add."""
    label, name = split_metric(measure)
    bounds = METRICS[name].bounds if name in METRICS else (0.0, 100.0)
    # the singular values on other data are not sent
    return bounds or (0.0, (_LONGEST_SPECTRUM if label else spectrum) + 1.0)
