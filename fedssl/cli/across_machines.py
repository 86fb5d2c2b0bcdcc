"""Commands of engine flower, which runs a recipe across machines."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from .console import Overrides, RecipeName, print_text

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Connect without TLS and without authentication; for tests only.")
]


def app(
    recipe: RecipeName,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write the app into.")],
    overrides: Overrides = None,
    output: Annotated[
        str | None, typer.Option(help="Folder of the run on the SuperLink's machine; runs/NAME-seedN by default.")
    ] = None,
) -> None:
    """Write a recipe's Flower app, which `flwr run` starts across machines."""
    from ..reading import load_recipe

    loaded = load_recipe(recipe, [*(overrides or ()), "engine=flower"])
    _flower("folder").write_app(loaded, folder, output)
    print_text(f"The app is in {folder}; start it with: flwr run {folder} NAME-OF-THE-SUPERLINK")
    digest = _flower("approved_apps").digest_of_app(folder)
    print_text(f"Sites that approve apps need its digest (fedssl supernode --allow): {digest}")


def superlink(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder with ca.crt, server.crt and server.key; the database is kept there."
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    wall: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535, help="Port of an nginx in front of the SuperLink: its nginx.conf is written into FOLDER."
        ),
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Start Flower's SuperLink, the server that the sites connect to.

    It uses TLS and accepts only sites that authenticate themselves.
    """
    raise typer.Exit(_flower("nodes").superlink(folder, host, port, insecure, wall))


def supernode(
    site: Annotated[
        Path,
        typer.Argument(
            metavar="SITE", help="YAML file of the site, with the keys client, data, architecture, device and state."
        ),
    ],
    superlink: Annotated[str, typer.Option(help="Address of the SuperLink, as host:port.")],
    root_certificates: Annotated[
        Path | None, typer.Option(help="Certificate (ca.crt) of the SuperLink's authority.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of the site.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIGEST", help="Run the app with this digest besides those in the site's file; may be repeated."
        ),
    ] = None,
    ask: Annotated[
        bool, typer.Option("--ask", help="Show an app that is not approved on the terminal, and ask.")
    ] = False,
    insecure: Insecure = False,
) -> None:
    """Start Flower's SuperNode for this site. It takes part in runs until it is stopped.

    With --allow, --ask or approved_apps in the site's file, it runs approved apps alone.
    """
    nodes = _flower("nodes")
    raise typer.Exit(nodes.supernode(site, superlink, root_certificates, key, insecure, allow or (), ask))


def _flower(module: str) -> ModuleType:
    from ..engines import flower_module

    return flower_module(module)
