"""The file of a site: which client it is, its data, its device, and the apps that it runs. It imports no torch."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from ...data.options import DataOptions
from ...options import Options, read_options

#: the SHA-256 of an app, which `fedssl app` prints
AppDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class SiteOptions(Options):
    """The keys of a site's own YAML file. The file never leaves the site."""

    client: int = Field(..., ge=0, description="the site's number, from 0; each client of the recipe is one site")
    data: DataOptions | None = Field(None, description="its own images; its share of the recipe's data where not given")
    architecture: str | None = Field(None, description="its own; the recipe's for this client where not given")
    device: str | None = Field(None, pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="the recipe's where not given")
    state: Path = Field(..., description="the folder that keeps the client's model between rounds")
    approved_apps: list[AppDigest] | None = Field(
        None, max_length=1000, description="digests of the apps that may run at the site; any app where not given"
    )


def load_site(path: str | Path) -> SiteOptions:
    """Return the options in a site's file."""
    hint = "it holds keys with values, such as client: 0 and state: FOLDER"
    return read_options(path, SiteOptions, "the site's file", hint)
