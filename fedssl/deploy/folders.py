"""The folders of a consortium: one for the authority, one for the server, one for each site.

Everything can be written again at any time: what is missing is added, and what is there stays.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from cryptography.hazmat.primitives.serialization import Encoding

from ..errors import UserError
from ..run.storage import cannot_write, write_atomically
from ..untrusted import read_regular_file
from . import pages
from .authority import (
    Authority,
    PublicKey,
    certificate_fingerprint,
    certified_key,
    key_fingerprint,
    needs_renewal,
    public_text,
    read_certificate,
    read_public,
    server_key,
    site_key,
)
from .consortium import MEMBER_FILE, Consortium, Member

#: in the server's folder, the public keys of the sites that may take part, and those that may no longer
SITES, REVOKED = "sites", "revoked"


def provision(consortium: Consortium, folder: Path, keys_at_sites: bool) -> list[str]:
    """Write the folders of a consortium, or add what is missing in them.

    Args:
        consortium: as its file describes it, perhaps with more sites or another address than before.
        folder: the folder of the folders; it is made where it is missing.
        keys_at_sites: leave the private keys of new folders to the sites and the server (requests.py).

    Returns:
        One line for each thing that was done.

    Raises:
        UserError: the sites' order has changed; the authority is missing or damaged; a file cannot be written.
    """
    done: list[str] = []
    _require_known_order(consortium, folder)
    authority_folder, server = folder / "authority", folder / "server"
    if (server / "ca.crt").exists() and not (authority_folder / "ca.crt").exists():
        raise UserError(
            f"{authority_folder} is missing: bring the authority's folder back from where it is kept; a new authority "
            "would lock out the sites, which trust the old one"
        )
    for one in (folder, authority_folder, server, server / SITES):
        make_private_folder(one)
    authority = Authority(authority_folder, consortium.name)
    write_text(authority_folder / "README.md", pages.authority_page(consortium.name))
    _prepare_server(consortium, server, authority, keys_at_sites, done)
    for client in range(len(consortium.sites)):
        _prepare_site(consortium, client, folder, authority, keys_at_sites, done)
    write_text(authority_folder / "sites.txt", "".join(f"{site}\n" for site in consortium.sites))
    write_fingerprints(folder)
    return done


def known_sites(folder: Path) -> list[str]:
    """The sites of a provisioned folder in the order of their client numbers; none where there is no such folder.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / "authority" / "sites.txt"
    try:
        return read_regular_file(path, 2**20).decode().split()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def write_fingerprints(folder: Path) -> None:
    """Write the fingerprints of the authority and of all registered keys into `fingerprints.md`."""
    certificate = read_certificate(folder / "authority" / "ca.crt")
    keys = {p.stem: key_fingerprint(read_public(p)) for p in sorted((folder / "server" / SITES).glob("*.pub"))}
    name = certificate.subject.rfc4514_string().removeprefix("CN=")
    write_text(folder / "fingerprints.md", pages.fingerprints_page(name, certificate_fingerprint(certificate), keys))


def write_text(path: Path, text: str, executable: bool = False) -> None:
    """Write a text file that only its user can read; a start script can also be executed."""
    try:
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return
        write_atomically(path, text.encode())
        path.chmod(0o700 if executable else 0o600)
    except OSError as error:
        raise cannot_write(path, error) from error


def make_private_folder(path: Path) -> None:
    """Make a folder that only its user can enter, with those above it.

    Raises:
        UserError: the folder cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def _require_known_order(consortium: Consortium, folder: Path) -> None:
    """Refuse a list of sites in which a site would get another client number than it has."""
    before = known_sites(folder)
    if consortium.sites[: len(before)] != before:
        raise UserError(
            f"sites: the list must begin with the sites of {folder} in their order ({', '.join(before)}), because the "
            "order gives the client numbers; add new sites at the end, leave a site that left in the list and call "
            "fedssl provision revoke"
        )


def _prepare_server(
    consortium: Consortium, folder: Path, authority: Authority, keys_at_sites: bool, done: list[str]
) -> None:
    is_new = not (folder / "start.sh").exists()
    address, days = consortium.server.address, consortium.valid_days
    _write_certificate(folder / "ca.crt", authority)
    if (is_new and not keys_at_sites) or (folder / "server.key").exists():
        public: PublicKey | None = server_key(folder / "server.key").public_key()
    elif (folder / "server.crt").exists():  # whose key is at the server
        public = certified_key(folder / "server.crt")
    else:
        public = None
    if public is None:
        done.append("server: its key is made at the server: fedssl provision request SERVER-FOLDER, then answer")
    elif reason := _reason_to_issue(folder / "server.crt", address):
        issued = authority.issue(public, address, days)
        write_atomically(folder / "server.crt", issued.public_bytes(Encoding.PEM))
        done.append(
            f"server: wrote server.crt, valid until {issued.not_valid_after_utc:%Y-%m-%d} ({reason}); "
            "copy it to the server and restart the server"
        )
    unit = f"fedssl-{consortium.name}-server.service"
    _write_member(folder, consortium, "server")
    write_text(folder / "STEPS.md", pages.server_page(consortium, unit, public is not None))
    write_text(folder / unit, pages.systemd_unit(f"Server of {consortium.name} (fedssl)", "server"))
    write_text(folder / "start.sh", pages.server_start(consortium), executable=True)


def _reason_to_issue(certificate: Path, address: str) -> str | None:
    return needs_renewal(read_certificate(certificate), address) if certificate.exists() else "there was none"


def _prepare_site(
    consortium: Consortium,
    client: int,
    folder: Path,
    authority: Authority,
    keys_at_sites: bool,
    done: list[str],
) -> None:
    name = consortium.sites[client]
    site, public = folder / name, folder / "server" / SITES / f"{name}.pub"
    if list((folder / "server").glob(f"{REVOKED}/{name}-*.pub")) and not public.exists():
        done.append(f"{name}: its key is revoked; for a new one: fedssl provision request, then answer")
        return
    is_new = not site.exists() and not public.exists()
    if not is_new and not site.exists():
        return  # it was given to the site and deleted here
    make_private_folder(site)
    has_key = (is_new and not keys_at_sites) or (site / "site.key").exists()
    _write_certificate(site / "ca.crt", authority)
    if not (site / "site.yaml").exists():  # the site may have changed it
        write_text(site / "site.yaml", pages.site_file(name, client))
    unit = f"fedssl-{consortium.name}-{name}.service"
    _write_member(site, consortium, name)
    write_text(site / "STEPS.md", pages.site_page(consortium.name, name, unit, has_key or public.exists()))
    write_text(site / unit, pages.systemd_unit(f"{name} in {consortium.name} (fedssl)", name))
    if has_key:
        key = site_key(site / "site.key").public_key()
        if not public.exists():
            write_text(public, public_text(key))
        done.append(f"{name}: client {client}, key {key_fingerprint(key)}")
    elif not public.exists():
        done.append(f"{name}: client {client}; its key is made at the site: fedssl provision request, then answer")
    write_text(site / "start.sh", pages.site_start(consortium.name, name, consortium.server), executable=True)


def _write_member(folder: Path, consortium: Consortium, name: str) -> None:
    member = Member(consortium=consortium.name, name=name, server=consortium.server)
    write_text(folder / MEMBER_FILE, yaml.safe_dump(member.model_dump(), sort_keys=False))


def _write_certificate(path: Path, authority: Authority) -> None:
    data = authority.certificate.public_bytes(Encoding.PEM)
    if path.exists() and path.read_bytes() != data:
        raise UserError(f"{path} is the certificate of another authority: provision into another folder")
    write_text(path, data.decode())
