"""Keys that are made where they are used: a request with the public key, and the coordinator's answer to it."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from ..errors import UserError
from ..run.storage import write_atomically
from ..untrusted import read_regular_file
from .authority import Authority, PublicKey, key_fingerprint, public_text, read_public, server_key, site_key
from .consortium import Consortium, load_member
from .folders import REVOKED, SITES, known_sites, make_private_folder, write_fingerprints, write_text

_LARGEST_FILE = 2**16


def write_request(folder: Path) -> tuple[Path, str]:
    """Make the private key of a site's or the server's folder, and write a request with its public key.

    The key stays as it is where the folder has one; the request is then written again.

    Args:
        folder: as `provision` wrote it; of a site or of the server.

    Returns:
        The request's path and the key's fingerprint.

    Raises:
        UserError: the folder is not one that `provision` wrote; a file cannot be written.
    """
    name = load_member(folder).name
    key = server_key(folder / "server.key") if name == "server" else site_key(folder / "site.key")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    path = folder / f"{name}.request"
    write_text(path, request.public_bytes(Encoding.PEM).decode())
    return path, key_fingerprint(key.public_key())


def answer_request(request: Path, folder: Path, consortium: Consortium) -> list[str]:
    """Accept a request: a site's public key is registered, and the server gets its certificate.

    Args:
        request: the file that `write_request` wrote. Only the name and the key are taken from it.
        folder: the coordinator's, as `provision` wrote it.
        consortium: says the address and the days of the server's certificate.

    Returns:
        One line for each thing that was done, with the fingerprint that must be compared.

    Raises:
        UserError: the request is damaged or not of this consortium; the site has another key, or this one was revoked.
    """
    name, key = _read_request(request)
    server = folder / "server"
    if name == "server":
        authority = Authority(_existing_authority(folder), consortium.name)
        certificate = authority.issue(key, consortium.server.address, consortium.valid_days)
        write_atomically(server / "server.crt", certificate.public_bytes(Encoding.PEM))
        return [
            f"server: wrote {server / 'server.crt'} for the key {key_fingerprint(key)}; send it to the server, and "
            "compare the fingerprint by telephone"
        ]
    sites = known_sites(folder)
    if name not in sites:
        raise UserError(
            f"{request} is a request of {name}, which is no site of {folder} ({', '.join(sites) or 'it has none'}): "
            "add the site to the consortium's file and call fedssl provision first"
        )
    public = server / SITES / f"{name}.pub"
    if public.exists() and read_public(public) != key:
        raise UserError(
            f"{name} already has the key {key_fingerprint(read_public(public))}, but {request} holds "
            f"{key_fingerprint(key)}: if the site has made a new key, call fedssl provision revoke {name} first"
        )
    for revoked in server.glob(f"{REVOKED}/*.pub"):
        if read_public(revoked) == key:
            raise UserError(
                f"the key in {request} was revoked ({revoked}): the site must move its site.key away and "
                "call fedssl provision request again, which makes a new one"
            )
    make_private_folder(public.parent)
    write_text(public, public_text(key))
    write_fingerprints(folder)
    return [
        f"{name}: its key is {key_fingerprint(key)}; compare this with the site by telephone",
        f"copy {server / SITES} to the server, and call fedssl provision register SERVER-FOLDER there if it runs",
    ]


def revoke(name: str, folder: Path) -> list[str]:
    """Remove a site's key from those that the server accepts.

    Returns:
        Lines that say what was done and how the running server learns of it.

    Raises:
        UserError: no site of this name has a key.
    """
    server = folder / "server"
    public = server / SITES / f"{name}.pub"
    if name not in known_sites(folder) or not public.exists():
        registered = ", ".join(sorted(p.stem for p in (server / SITES).glob("*.pub")))
        raise UserError(f"no site {name!r} has a key in {folder}: sites with a key are {registered or 'none'}")
    make_private_folder(server / REVOKED)
    number = len(list((server / REVOKED).glob(f"{name}-*.pub"))) + 1
    public.rename(server / REVOKED / f"{name}-{number}.pub")
    write_fingerprints(folder)
    return [
        f"{name}: its key is no longer in {server / SITES}",
        f"copy {server / SITES} to the server (remove {name}.pub there), and call fedssl provision register "
        "SERVER-FOLDER there: it applies this to the running server at once; a server that starts does so by itself",
    ]


def _existing_authority(folder: Path) -> Path:
    authority = folder / "authority"
    if not (authority / "ca.crt").exists():
        raise UserError(f"{authority} is missing: bring the authority's folder back from where it is kept")
    return authority


def _read_request(path: Path) -> tuple[str, PublicKey]:
    """The name and the public key of a request, whose sender has shown that he has the private key."""
    try:
        request = x509.load_pem_x509_csr(read_regular_file(path, _LARGEST_FILE))
        names = request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        key = request.public_key()
        valid = request.is_signature_valid
    except OSError as error:
        raise UserError(f"the request {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} is not a request of fedssl provision request: {error}") from error
    if not valid or len(names) != 1:
        raise UserError(
            f"{path} is damaged or forged: its signature is not of the key that it holds; ask for a new one"
        )
    name = str(names[0].value)
    curve = ec.SECP256R1 if name == "server" else ec.SECP384R1
    if not isinstance(key, PublicKey) or not isinstance(key.curve, curve):
        raise UserError(f"{path} must hold a key on the curve {curve.name}: make it with fedssl provision request")
    return name, key
