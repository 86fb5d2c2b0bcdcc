"""Flower's two processes with safe settings: `fedssl superlink` and `fedssl supernode`."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import sysconfig
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ..engines.flower.site_keys import MANIFEST, SITES, VARIABLE
from ..engines.flower.site_options import load_site
from ..errors import UserError
from ..run_folder.creation import alone_in, process_folder
from ..untrusted import expand_home, printable
from .certificates import require_authority, require_server
from .flower_commands import fork, run
from .keys import read_site_key, require_own
from .limits import limit_superlink
from .reverse_proxy import write_reverse_proxy

#: modules that a ServerApp or ClientApp needs; importing them starts no threads and looks for no CUDA device
_APP_MODULES: tuple[str, ...] = ("fedssl.engines.flower.server", "fedssl.engines.flower.client", "sklearn.datasets")
_APP_MODULES += ("timm", "torch._dynamo")  # the last is imported by the first optimizer that is made
_HOST = "127.0.0.1"  # where the SuperLink listens
_INSECURE = "warning: insecure: without TLS all messages can be read and changed on their way"
_PRIVATE_UMASK = 0o077  # the files of these processes, and of those that they start, are for their user alone


def superlink(folder: Path, port: int, insecure: bool, reverse_proxy: int | None = None) -> int:
    """Run Flower's SuperLink on 127.0.0.1 until it ends or this process is terminated; return its exit code.

    Other machines reach it through a reverse proxy alone.

    Args:
        folder: holds ca.crt, server.crt and server.key, and keeps the SuperLink's database.
        port: where it listens.
        insecure: without TLS and without authentication of the sites.
        reverse_proxy: the port of an nginx in front of the SuperLink, whose configuration is written; None for none.

    Raises:
        UserError: see `require_server` and `write_reverse_proxy`; a file is missing; the port is in use; another
            SuperLink keeps its database in the folder.
    """
    os.umask(_PRIVATE_UMASK)
    command = ["flower-superlink", "--host", _HOST, "--port", str(port)]
    command += ["--database", str(_existing(folder, "make the SuperLink's folder first") / "superlink.db")]
    command += ["--disable-runtime-dependency-installation"]  # it would call uv, which needs the network
    environment = _environment()
    if insecure:
        if reverse_proxy is not None:
            raise UserError("--reverse-proxy needs TLS: leave out --insecure or --reverse-proxy")
        _print_error(f"{_INSECURE}, and anyone can take part")
        command += ["--insecure"]
    else:
        files = {"--ssl-ca-certfile": "ca.crt", "--ssl-certfile": "server.crt", "--ssl-keyfile": "server.key"}
        for option, name in files.items():
            command += [option, str(_existing(folder / name, "TLS needs it, and docs/deploy.md says how to make it"))]
        if (folder / "superlink.db").exists():  # it also holds the registered keys
            require_own(folder / "superlink.db")
        require_server(folder / "server.crt", folder / "server.key", folder / "ca.crt")
        command += ["--enable-supernode-auth"]
        environment[VARIABLE] = str(folder.absolute() / SITES / MANIFEST)
    with alone_in(folder, "another SuperLink keeps its database in this folder: stop it, or name another folder"):
        _require_free_port(port)
        if reverse_proxy is not None:
            path = write_reverse_proxy(folder.absolute(), reverse_proxy, f"{_HOST}:{port}")
            print(f"fedssl: the reverse proxy's configuration is written; start it with: nginx -c {path}", flush=True)
        return run(command, environment, _APP_MODULES, limit_superlink)


def supernode(
    site_file: Path,
    address: str,
    certificate: Path | None,
    key: Path | None,
    insecure: bool,
    allowed_apps: Sequence[str] = (),
) -> int:
    """Run Flower's SuperNode for a site until it ends or this process is terminated; return its exit code.

    Args:
        site_file: is checked, and its data are loaded, before anything is started.
        address: of the SuperLink, as host:port.
        certificate: of the authority that has signed the SuperLink's certificate.
        key: the site's private key, whose public part the SuperLink knows.
        insecure: without TLS and without the site's authentication.
        allowed_apps: digests of apps that may run here besides those that the site's file approves. Any app may run
            if neither the file nor this approves one.

    Raises:
        UserError: see `require_authority` and `require_digest`; a file is missing or wrong.
    """
    os.umask(_PRIVATE_UMASK)
    command = ["flower-supernode", "--superlink", address, "--port", str(_free_port())]
    command += ["--node-config", f"site={json.dumps(str(site_file.absolute()))}"]
    if insecure:
        _print_error(f"{_INSECURE}, and any server can pretend to be yours")
        command += ["--insecure"]
    else:
        if certificate is None or key is None:
            raise UserError("give --root-certificates and --key, or --insecure for a test on one machine")
        command += ["--root-certificates", str(_existing(certificate, "name the authority's certificate"))]
        command += ["--auth-supernode-private-key", str(_existing(key, "name the site's private key"))]
        require_authority(certificate)
        read_site_key(key)
    # in a copy, because this process only waits for runs: what it has imported would stay in memory
    if os.waitpid(fork(lambda: _check_data(site_file)), 0)[1]:
        return 2
    # Flower looks for a new message's task every second; a round has several such steps one after another
    environment = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3"} | _environment()
    if load_site(site_file).approved_apps is None and not allowed_apps:
        advice = "approve single apps with --allow or approved_apps in the site's file"
        _print_error(f"every app that the server sends runs at this site; {advice}")
        return _explain_end(run(command, environment, _APP_MODULES))
    from .apps import refuse_other_apps, require_approved, require_digest

    approved = partial(require_approved, site_file.absolute(), [*map(require_digest, allowed_apps)])
    # Flower installs an app into a folder whose name has 8 digits of the digest, and trusts a folder that is there
    # already: so only apps that this process has approved may be there.
    with process_folder() as home:
        environment |= {"FLWR_HOME": str(home)}
        return _explain_end(run(command, environment, _APP_MODULES, lambda: refuse_other_apps(approved)))


def _explain_end(code: int) -> int:
    """Return a SuperNode's exit code; print a message and return 1 in place of 0.

    Flower's SuperNode ends with 0 and no message if the SuperLink no longer accepts its signed requests.
    """
    if code:
        return code
    now = datetime.now(timezone.utc)
    _print_error(
        f"the server does not accept this site: its key is not registered or was revoked, or this machine's clock "
        f"({now:%Y-%m-%d %H:%M:%S} UTC) differs from the server's by more than a few seconds; `fedssl doctor "
        "--consortium FOLDER` compares the clocks, and the server's operator knows which keys are registered"
    )
    return 1


def _check_data(site_file: Path) -> int:
    """Load the site's data and make its state folder, as its apps will; return an exit code."""
    from ..engines.flower.site import count_own_images

    try:
        site = load_site(site_file)
        if (count := count_own_images(site)) is not None:
            print(f"fedssl: this site has {count:,} training images; it waits for runs", flush=True)
        expand_home(site.state).mkdir(parents=True, exist_ok=True)
    except (UserError, OSError) as error:
        _print_error(str(error))
        return 2
    return 0


def _environment() -> dict[str, str]:
    """Return this process's environment, with Flower's commands of the same installation first in the path."""
    return os.environ | {"PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def _require_free_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Flower does: ending connections do not matter
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            place = f"port {port} of {_HOST}"
            problem = f"cannot listen on {place}: {error.strerror or error}; check --port"
            if error.errno == errno.EADDRINUSE:
                problem = f"{place} is in use, perhaps by another SuperLink: stop it, or give another --port"
            raise UserError(problem) from error


def _existing(path: Path, purpose: str) -> Path:
    if not path.exists():
        raise UserError(f"{path} does not exist: {purpose}")
    return path.absolute()


def _free_port() -> int:
    """Return a port for the SuperNode's own processes, on this machine alone; several nodes may share a machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _print_error(text: str) -> None:
    print(f"fedssl: {printable(text)}", file=sys.stderr, flush=True)
