"""The folders of a consortium: one for the authority, one for the server, one for each site.

Everything can be written again at any time: what is missing is added, and what is there stays. A site may make its
private key itself, by ssh-keygen: it then sends the public key, which the coordinator answers.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import yaml
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from ..engines.flower.site_files import MANIFEST, SITES, key_fingerprint, read_manifest
from ..errors import UserError
from ..run_folder.storage import write_atomically, writing
from ..templates import fill_template
from ..untrusted import quoted
from . import certificates, keys
from .certificates import Authority
from .consortium import RENEWAL_DAYS, SERVER_FILE, Consortium
from .keys import PublicKey

#: in the coordinator's copy of the server's folder, the public keys of sites that may no longer take part
REVOKED = "revoked"


def provision(consortium: Consortium, folder: Path, keys_at_sites: bool) -> list[str]:
    """Write the folders of a consortium into a folder, or add what is missing; return a line for each thing done.

    The consortium may have more sites or another address than before. With `keys_at_sites` the private keys of new
    folders are left to the sites (STEPS.md says how).

    Raises:
        UserError: the sites' order has changed; the authority is missing, damaged or another consortium's; a file
            cannot be written.
    """
    known_sites = _known_sites(folder)
    if consortium.sites[: len(known_sites)] != known_sites:  # a site would get another client number than it has
        raise UserError(
            f"sites: the list must begin with the sites of {folder} in their order ({', '.join(known_sites)}), because "
            "the order gives the client numbers; add new sites at the end, leave a site that left in the list and call "
            "fedssl provision revoke"
        )
    authority_folder, server = folder / "authority", folder / "server"
    for path in (folder, authority_folder, server, server / SITES):
        _make_private_folder(path)
    authority = Authority(authority_folder, consortium.name)  # which refuses another consortium's before all else
    _fill(authority_folder / "README.md", "authority.md", consortium=consortium.name)
    done = _prepare_server(consortium, server, authority)
    for client in range(len(consortium.sites)):
        done += _prepare_site(consortium, client, folder, authority, keys_at_sites)
    _write_lists(folder, consortium.sites)
    return done


def answer_request(request: Path, folder: Path) -> list[str]:
    """Register a public key that a site has sent, whose comment is its name, in the coordinator's folder.

    Return a line for each thing done, with the fingerprint.

    Raises:
        UserError: the request is damaged or not of this consortium; the site has another key, another site has this
            one, or it was revoked.
    """
    key = keys.read_public(request, own=False)
    words = keys.read_file(request, "the request", own=False).decode(errors="replace").split()
    name = words[-1] if len(words) > 2 else ""  # without a comment the last one is the key itself
    if not isinstance(key.curve, keys.SITE_CURVE):
        raise UserError(f"{request} must hold a key on the curve {keys.SITE_CURVE.name}: make it as STEPS.md says")
    server = folder / "server"
    sites = _known_sites(folder)
    if name not in sites:
        raise UserError(
            f"{request} is a request of {name or 'nobody'}, as its comment says, which is no site of {folder} "
            f"({', '.join(sites) or 'it has none'}): make the key with -C and the site's name, as STEPS.md says, or "
            "add the site to the consortium's file and call fedssl provision first"
        )
    public = server / SITES / f"{name}.pub"
    registered = _registered(folder, sites)
    if registered.get(name, key) != key:
        raise UserError(
            f"{name} already has the key {key_fingerprint(registered[name])}, but {request} holds "
            f"{key_fingerprint(key)}: if the site has made a new key, call fedssl provision revoke {name} --output "
            f"{quoted(folder)} first"
        )
    owner = next((site for site, other in registered.items() if other == key and site != name), None)
    if owner is not None:
        raise UserError(f"{request} is a request of {name} with the key of {owner}: each site makes a key of its own")
    for revoked in server.glob(f"{REVOKED}/*.pub"):
        if keys.read_public(revoked) == key:
            raise UserError(
                f"the key in {request} was revoked ({revoked}): the site must move its site.key away and "
                "make a new one, see its STEPS.md"
            )
    _write_text(public, keys.public_text(key))
    _write_lists(folder, sites)
    return [
        f"{name}: its key is {key_fingerprint(key)}; compare this with the site by telephone",
        f"copy {server / SITES} to the server, and call fedssl provision register SERVER-FOLDER there if it runs",
    ]


def revoke(name: str, folder: Path) -> list[str]:
    """Remove a site's key from those that the server accepts; return lines on what was done and what is left to do.

    Raises:
        UserError: no site of this name has a key.
    """
    server = folder / "server"
    public = server / SITES / f"{name}.pub"
    sites = _known_sites(folder)
    if name not in sites or not public.exists():
        registered = ", ".join(sorted(path.stem for path in (server / SITES).glob("*.pub")))
        raise UserError(f"no site {name!r} has a key in {folder}: sites with a key are {registered or 'none'}")
    _make_private_folder(server / REVOKED)
    public.rename(server / REVOKED / f"{name}-{len(_revoked(server, name)) + 1}.pub")
    _write_lists(folder, sites)
    return [
        f"{name}: its key is no longer in {server / SITES}",
        f"at the server, replace sites/ by {server / SITES} (or delete {name}.pub there and copy {MANIFEST}), and call "
        "fedssl provision register SERVER-FOLDER: it prints who is in and who is out, and applies this to the running "
        "server at once; a server that starts does so by itself",
    ]


def _prepare_server(consortium: Consortium, folder: Path, authority: Authority) -> list[str]:
    done = []
    _write_authority_certificate(folder / "ca.crt", authority)
    public, last = _server_public(folder), authority.certificate.not_valid_after_utc
    if last - datetime.now(timezone.utc) < timedelta(days=RENEWAL_DAYS):
        advice = "provision the consortium anew in another folder before, and give every site the new ca.crt"
        done.append(f"authority: its certificate ends on {last:%Y-%m-%d}, and the server's with it: {advice}")
    if reason := certificates.needs_renewal(folder / "server.crt", consortium.server.address, last):
        issued = authority.issue(public, consortium.server.address, consortium.valid_days)
        _write_text(folder / "server.crt", issued.public_bytes(Encoding.PEM).decode())
        done.append(
            f"server: wrote server.crt, valid until {issued.not_valid_after_utc:%Y-%m-%d} ({reason}); "
            "copy it to the server and restart the server"
        )
    _write_text(folder / SERVER_FILE, yaml.safe_dump(consortium.server.model_dump(), sort_keys=False))
    unit = _write_unit(folder, consortium, "server", f"Server of {consortium.name} (fedssl)")
    about = {"consortium": consortium.name, "server": consortium.server, "clients": len(consortium.sites)}
    _fill(folder / "STEPS.md", "server_steps.md", **about, unit=unit)
    _fill(folder / "start.sh", "server_start.sh", **about)
    _fill(folder / "nginx.conf", "nginx.conf", **about)
    return done


def _server_public(folder: Path) -> PublicKey:
    """Return the public key of the server as its folder here tells it; make its key if it has none yet."""
    if (folder / "server.key").exists() or not (folder / "server.crt").exists():
        return keys.server_key(folder / "server.key").public_key()
    certified = certificates.read_certificate(folder / "server.crt").public_key()  # the server has its key
    if not isinstance(certified, PublicKey):
        kind = type(certified).__name__
        raise UserError(f"{folder / 'server.crt'} must be for a key on an elliptic curve, got {kind}")
    return certified


def _prepare_site(
    consortium: Consortium, client: int, folder: Path, authority: Authority, keys_at_sites: bool
) -> list[str]:
    name = consortium.sites[client]
    site, public = folder / name, folder / "server" / SITES / f"{name}.pub"
    if _revoked(folder / "server", name) and not public.exists():
        return [f"{name}: its key is revoked; for a new one see its STEPS.md, then fedssl provision answer"]
    if public.exists() and not site.exists():
        return []  # the site has its folder, which was deleted here
    has_key = (not site.exists() and not keys_at_sites) or (site / "site.key").exists()
    _make_private_folder(site)
    _write_authority_certificate(site / "ca.crt", authority)
    if not (site / "site.yaml").exists():  # the site may have changed it
        _fill(site / "site.yaml", "site.yaml", site=name)
    unit = _write_unit(site, consortium, name, f"{name} in {consortium.name} (fedssl)")
    about = {"consortium": consortium.name, "site": name, "server": consortium.server}
    _fill(site / "STEPS.md", "site_steps.md", **about, unit=unit, has_key=has_key or public.exists())
    done = []
    if has_key:
        key = keys.site_key(site / "site.key").public_key()
        if not public.exists():
            _write_text(public, keys.public_text(key))
        done.append(f"{name}: client {client}, key {key_fingerprint(keys.read_public(public))}")
    elif not public.exists():
        done.append(f"{name}: client {client}; its key is made at the site (STEPS.md), then fedssl provision answer")
    _fill(site / "start.sh", "site_start.sh", **about)
    return done


def _write_unit(folder: Path, consortium: Consortium, name: str, description: str) -> str:
    """Write the systemd unit of a site or the server; return its name."""
    unit = f"fedssl-{consortium.name}-{name}.service"
    _fill(folder / unit, "systemd.service", description=description, folder=name)
    return unit


def _write_authority_certificate(path: Path, authority: Authority) -> None:
    data = authority.certificate.public_bytes(Encoding.PEM)
    if path.exists() and path.read_bytes() != data:
        raise UserError(f"{path} is the certificate of another authority: provision into another folder")
    _write_text(path, data.decode())


def _registered(folder: Path, sites: Sequence[str]) -> dict[str, PublicKey]:
    """Return the keys of the sites that have one, in the order of their client numbers."""
    paths = {name: folder / "server" / SITES / f"{name}.pub" for name in sites}
    return {name: keys.read_public(path) for name, path in paths.items() if path.exists()}


def _revoked(server: Path, name: str) -> list[Path]:
    """Return the files of a site's revoked keys, NAME-NUMBER.pub; another site's name may begin with this one."""
    return [path for path in server.glob(f"{REVOKED}/{name}-*.pub") if path.stem.rpartition("-")[0] == name]


def _write_lists(folder: Path, sites: Sequence[str]) -> None:
    """Write the sites' keys into the page for telephone calls, and into the manifest that the server obeys."""
    certificate = certificates.read_certificate(folder / "authority" / "ca.crt")
    fingerprints = {name: key_fingerprint(key) for name, key in _registered(folder, sites).items()}
    manifest = yaml.safe_dump({"sites": {name: fingerprints.get(name) for name in sites}}, sort_keys=False)
    about = "# Written by fedssl provision: the sites in the order of their client numbers, from 0, with their keys.\n"
    _write_text(folder / "server" / SITES / MANIFEST, about + manifest)
    name = certificate.subject.rfc4514_string().removeprefix("CN=")
    authority = certificate.fingerprint(SHA256()).hex(":").upper()  # as openssl x509 -fingerprint -sha256 prints it
    _fill(folder / "fingerprints.md", "fingerprints.md", consortium=name, authority=authority, keys=fingerprints)


def _known_sites(folder: Path) -> list[str]:
    """Return the sites of a provisioned folder in the order of their client numbers; none if there is no folder."""
    authority = folder / "authority"
    if (folder / "server" / "ca.crt").exists() and not (authority / "ca.crt").exists():
        raise UserError(
            f"{authority} is missing: bring the authority's folder back from where it is kept; a new authority would "
            "lock out the sites, which trust the old one"
        )
    path = folder / "server" / SITES / MANIFEST
    return list(read_manifest(path).sites) if path.exists() else []


def _fill(path: Path, template: str, **values: object) -> None:
    _write_text(path, fill_template("fedssl.deploy", f"{template}.jinja", **values))


def _write_text(path: Path, text: str) -> None:
    """Write a text file that only its user can read; a start script can also be executed."""
    with writing(path):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text.encode())
            path.chmod(0o700 if path.suffix == ".sh" else 0o600)


def _make_private_folder(path: Path) -> None:
    """Make a folder that only its user can enter, with those above it."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
