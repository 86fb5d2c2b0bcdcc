"""A site of a federation across machines: one client with its own data, architecture and device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from ...data.options import DataOptions
from ...errors import UserError
from ...federation import Federation, build_federation
from ...models.options import ModelOptions
from ...options import Options
from ...recipe import Recipe
from ...recipe_text import explain_errors
from ...untrusted.files import expand_home, read_regular_file
from ...untrusted.strict_yaml import MOST_BYTES, parse_yaml

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
