"""Commands for runs across machines: `provision` with its own commands, `app`, `superlink` and `supernode`."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated

import click
from typer import Argument, Exit, Option, Typer
from typer.core import TyperGroup

from ..engines import flower_module
from ..errors import UserError, install_command
from ..untrusted import quoted
from .console import Overrides, RecipeName, Trust, print_text


class _FoldersByDefault(TyperGroup):
    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        if arguments and arguments[0] not in self.commands and arguments[0] != "--help":
            arguments = ["folders", *arguments]
        return super().parse_args(context, arguments)


app = Typer(
    cls=_FoldersByDefault,
    no_args_is_help=True,
    help="Make a consortium's keys, certificates and folders: fedssl provision consortium.yaml (docs/deploy.md).",
)

_Folder = Annotated[Path, Option(metavar="FOLDER", help="The coordinator's folder, which fedssl provision wrote.")]


@app.command()
def folders(
    consortium: Annotated[
        Path | None, Argument(metavar="FILE", help="YAML file with the consortium's name, server and sites.")
    ] = None,
    output: Annotated[Path, Option(metavar="FOLDER", help="Folder to write to.")] = Path("consortium"),
    keys_at_sites: Annotated[
        bool, Option("--keys-at-sites", help="Make no private keys of the sites here: each site makes its own.")
    ] = False,
    example: Annotated[bool, Option("--example", help="Print an example of the file.")] = False,
) -> None:
    """Write a folder for the authority, one for the server and one for each site, or add what is missing in them.

    `folders` may be left out: fedssl provision FILE. Call it again after a change of the file, and to renew the
    server's certificate. It overwrites no key.
    """
    provision = _deploy_folders().provision
    from ..deploy.consortium import EXAMPLE, FIRST_RUN, load_consortium

    if example:
        print_text(EXAMPLE.rstrip("\n"))
        return
    if consortium is None:
        raise UserError("name the consortium's file; fedssl provision --example prints an example")
    for line in provision(load_consortium(consortium), output, keys_at_sites):
        print_text(line)
    print_text(
        f"Give each site its folder of {output}, and the server the folder server; each has a page STEPS.md. Keep "
        f"{output / 'authority'} apart. Compare {output / 'fingerprints.md'} by telephone.\n"
        f"Next: at the server, in its folder: {FIRST_RUN}"
    )


@app.command()
def answer(
    requests: Annotated[list[Path], Argument(metavar="PUBLIC-KEY...", help="Files .pub that sites sent.")],
    output: _Folder = Path("consortium"),
) -> None:
    """Accept public keys that sites made."""
    for path in requests:
        for line in _deploy_folders().answer_request(path, output):
            print_text(line)


@app.command()
def revoke(
    site: Annotated[str, Argument(metavar="SITE", help="The site's name.")], output: _Folder = Path("consortium")
) -> None:
    """Remove a site's key from those that the server accepts."""
    for line in _deploy_folders().revoke(site, output):
        print_text(line)


@app.command()
def register(
    folder: Annotated[Path, Argument(metavar="FOLDER", help="The server's folder.")],
    wait: Annotated[float, Option(metavar="SECONDS", help="Wait so long for the server; its start script does.")] = 0.0,
) -> None:
    """At the running server: accept the keys in FOLDER/sites and no others.

    It prints who is in and connected, who is new, who is out and which keys it refuses, by site.
    """
    from ..deploy.consortium import load_server
    from ..engines.flower.site_files import SITES

    keys = flower_module("deploy.registered_keys")
    address = load_server(folder).superlink
    for line in keys.register_keys(folder / SITES, address, folder / "ca.crt", wait):
        print_text(line)


def flower_app(
    recipe: RecipeName,
    folder: Annotated[Path, Argument(metavar="FOLDER", help="Folder to write the app into.")],
    overrides: Overrides = None,
    output: Annotated[
        str | None, Option(help="Folder of the run on the SuperLink's machine; runs/NAME-seedN by default.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Write a recipe's Flower app, which `flwr run` starts across machines."""
    from ..recipe.reading import load_recipe

    loaded = load_recipe(recipe, [*(overrides or ()), "engine=flower"], trust=trust)
    apps = flower_module("deploy.apps")
    apps.write_app(loaded, folder, output)
    print_text(f"The app is in {folder}; flwr run {quoted(folder)} NAME-OF-THE-SUPERLINK starts it")
    print_text(f"Next: at each site, with the digest of the app: ./start.sh --allow {apps.digest_of_app(folder)}")


def superlink(
    folder: Annotated[
        Path,
        Argument(metavar="FOLDER", help="Folder with ca.crt, server.crt and server.key; the database is kept there."),
    ],
    port: Annotated[int, Option(min=1, max=65535, help="Port of 127.0.0.1 to listen on.")] = 8000,
) -> None:
    """Start Flower's SuperLink, the server that the sites connect to.

    It uses TLS and accepts only sites that authenticate themselves.
    """
    raise Exit(flower_module("deploy.nodes").superlink(folder, port))


def supernode(
    site: Annotated[
        Path,
        Argument(
            metavar="SITE",
            help="YAML file of the site: state, data, architecture, device, approved_apps.",
        ),
    ],
    superlink: Annotated[str, Option(help="Address of the SuperLink, as host:port.")],
    root_certificates: Annotated[Path, Option(help="Certificate (ca.crt) of the SuperLink's authority.")],
    key: Annotated[Path, Option(help="Private key of the site.")],
    allow: Annotated[
        list[str] | None,
        Option(
            metavar="DIGEST", help="Run the app with this digest besides those in the site's file; may be repeated."
        ),
    ] = None,
) -> None:
    """Start Flower's SuperNode for this site. It takes part in runs until it is stopped.

    With --allow or approved_apps in the site's file, it runs approved apps alone.
    """
    raise Exit(flower_module("deploy.nodes").supernode(site, superlink, root_certificates, key, allow or ()))


def _deploy_folders() -> ModuleType:
    if find_spec("cryptography") is None:
        raise UserError(f"fedssl provision needs cryptography: {install_command('flower')}")
    return import_module("fedssl.deploy.folders")
