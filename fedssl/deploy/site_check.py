"""The checks that a site makes before a run: `fedssl doctor --consortium FOLDER`."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

from ..engines.flower.site_keys import key_fingerprint
from ..engines.flower.site_options import SiteOptions, load_site
from ..errors import UserError
from ..untrusted import quoted
from .certificates import certificate_fingerprint, read_certificate, require_authority
from .connected_sites import connected_sites
from .consortium import RENEWAL_DAYS, Member, load_member
from .keys import read_site_key

_CONNECT_SECONDS = 10.0
_LARGEST_CLOCK_DIFFERENCE = 5.0  # Flower refuses a request whose time is more than 5 s ahead, or 300 s behind
_LEAST_DISK = 2 * 2**30  # bytes: a few states of a large model


class Check(NamedTuple):
    """One thing that was checked."""

    what: str
    finding: str
    advice: str | None = None  # None if all is well


def check_site(folder: Path) -> list[Check]:
    """Check everything that a site's folder needs for a run, in the order in which problems should be corrected.

    Of the server's folder, the sites are checked: whether each is connected.

    Raises:
        UserError: the folder is not one that `provision` wrote; the server is not reached from its own folder.
    """
    member = load_member(folder)
    if member.name == "server":
        advice = "ask the site to start its SuperNode and to call fedssl doctor --consortium ."
        sites = connected_sites(member, folder)
        return [Check(site, finding, None if is_connected else advice) for site, finding, is_connected in sites]
    checks = [
        _guarded("authority", "ask the coordinator for ca.crt again", lambda: _authority(folder)),
        _guarded("site's key", "see STEPS.md; a key is made with fedssl provision request", lambda: _key(folder)),
        *_server(member, folder),
    ]
    try:
        site = load_site(folder / "site.yaml")
    except UserError as error:
        return [*checks, Check("site.yaml", str(error), "correct site.yaml")]
    if member.client not in (None, site.client):
        finding = f"client is {site.client}, but {member.name} is client {member.client} of {member.consortium}"
        checks.append(Check("site.yaml", finding, f"set client: {member.client}: the server refuses another number"))
    checks += [
        _guarded("device", "change device in site.yaml", lambda: _device(site)),
        _guarded(
            "data", "link your images (ln -s FOLDER images), or change data in site.yaml", lambda: _data(site, folder)
        ),
        _guarded("disk", "choose another state folder in site.yaml", lambda: _disk(site, folder)),
    ]
    if site.approved_apps is None:
        advice = "add approved_apps to site.yaml, so that a server that was taken over cannot send other code"
        return [*checks, Check("approved apps", "every app that the server sends runs here", advice)]
    finding = f"{len(site.approved_apps)} in site.yaml; others need --allow"
    return [*checks, Check("approved apps", finding)]


def _guarded(what: str, advice: str, check: Callable[[], tuple[str, str | None]]) -> Check:
    """Return what a check finds and advises; its error and `advice` if it fails."""
    try:
        return Check(what, *check())
    except (UserError, OSError) as error:
        return Check(what, str(error), advice)


def _authority(folder: Path) -> tuple[str, str | None]:
    path = folder / "ca.crt"
    require_authority(path)
    certificate = read_certificate(path)
    days = (certificate.not_valid_after_utc - datetime.now(timezone.utc)).days
    finding = f"valid for {days} days; fingerprint {certificate_fingerprint(certificate)}"
    return finding, "tell the coordinator" if days < RENEWAL_DAYS else None


def _key(folder: Path) -> tuple[str, str | None]:
    path = folder / "site.key"
    if not path.exists():
        return f"{path} is missing", f"make it: fedssl provision request {quoted(folder)}"
    key = read_site_key(path)
    if path.stat().st_mode & 0o077:
        return f"{path} can be read by other users", f"chmod 600 {quoted(path)}"
    return f"fingerprint {key_fingerprint(key.public_key())}", None


def _server(member: Member, folder: Path) -> Iterator[Check]:
    address, port = member.server.address, member.server.port
    try:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except OSError as error:
        advice = "check that the server runs, its name and port in member.yaml, and the firewalls in between"
        yield Check("server", f"{address}:{port} is not reached: {error.strerror or error}", advice)
        return
    yield Check("server", f"{address}:{port} is reached")
    yield Check("clock", *_clock(address, port))
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        with (
            socket.create_connection((address, port), _CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=address) as secured,
        ):
            certificate = secured.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        advice = "tell the coordinator, and start nothing: this may not be your server"
        yield Check("server's certificate", f"is refused: {error.verify_message}", advice)
    except OSError as error:
        yield Check("server's certificate", f"cannot be read: {error.strerror or error}", "ask the server's operator")
    else:
        end = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
        days = int((end - time.time()) // 86400)
        advice_or_none = "ask the coordinator to renew it" if days < RENEWAL_DAYS else None
        yield Check("server's certificate", f"issued by your authority; valid for {days} days", advice_or_none)


def _clock(address: str, port: int) -> tuple[str, str | None]:
    """Compare the clock with the server's. Its certificate is not checked, as a wrong clock may make it invalid."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(address, port, timeout=_CONNECT_SECONDS, context=context)
    try:
        connection.request("GET", "/")
        server = parsedate_to_datetime(connection.getresponse().getheader("Date") or "")
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
        return f"the server does not tell its time: {error}", "ask the server's operator"
    finally:
        connection.close()
    difference = (datetime.now(timezone.utc) - server).total_seconds() - 0.5  # the date has whole seconds
    advice = "set it with a time service (NTP) at both: the server refuses wrong times"
    finding = f"{abs(difference):.0f} s {'ahead of' if difference > 0 else 'behind'} the server's"
    return finding, advice if abs(difference) > _LARGEST_CLOCK_DIFFERENCE else None


def _device(site: SiteOptions) -> tuple[str, str | None]:
    import torch

    wanted = site.device or "the recipe's"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count)) or "no GPU"
    is_missing = wanted.startswith("cuda") and int(wanted.partition(":")[2] or 0) >= count
    advice = "install the GPU's driver and a PyTorch with CUDA, or change device in site.yaml"
    return f"{wanted}; this machine has {names}", advice if is_missing else None


def _data(site: SiteOptions, folder: Path) -> tuple[str, str | None]:
    from ..engines.flower.site import count_own_images

    before = Path.cwd()
    os.chdir(folder)  # where the start script runs, from which relative paths count
    try:
        count = count_own_images(site)
    finally:
        os.chdir(before)
    if count is None:
        return "no own images: the site takes its share of the recipe's data, which is meant for trials", None
    return f"{count:,} training images", None if count else "name a folder with images"


def _disk(site: SiteOptions, folder: Path) -> tuple[str, str | None]:
    state = folder / site.state.expanduser()
    existing = next(path for path in (state, *state.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    advice = "free some space, or choose another state folder" if free < _LEAST_DISK else None
    return f"{free / 2**30:.1f} GiB free for {state}", advice
