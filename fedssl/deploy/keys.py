"""The private and public keys of a consortium's members: made, written, read and compared.

The server's key and the authority's are PEM files on the curve P-256, a site's is one of ssh-keygen's on P-384.
"""

import os
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ..errors import UserError, explained
from ..run_folder.storage import writing
from ..untrusted import read_regular_file, refuse_shared

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
SERVER_CURVE, SITE_CURVE = ec.SECP256R1, ec.SECP384R1


def server_key(path: Path) -> PrivateKey:
    """Return the private key in a PEM file; make one on the curve P-256 if the file is missing."""
    _make_if_missing(path, SERVER_CURVE(), serialization.PrivateFormat.PKCS8)
    command = "openssl ecparam -name prime256v1 -genkey"
    return _read_private(path, serialization.load_pem_private_key, "in PEM format", command)


def site_key(path: Path) -> PrivateKey:
    """Return the private key in a file of ssh-keygen's format; make one on the curve P-384 if the file is missing."""
    _make_if_missing(path, SITE_CURVE(), serialization.PrivateFormat.OpenSSH)
    return read_site_key(path)


def read_site_key(path: Path) -> PrivateKey:
    """Return the private key in a file of ssh-keygen's format, which is how Flower reads a site's key."""
    return _read_private(path, serialization.load_ssh_private_key, "as ssh-keygen writes it", "ssh-keygen -t ecdsa")


def _make_if_missing(path: Path, curve: ec.EllipticCurve, key_format: serialization.PrivateFormat) -> None:
    """Write a new key that only its user can read where there is none; a key is never overwritten."""
    if path.exists():
        return
    key = ec.generate_private_key(curve)
    with writing(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(handle, "wb") as file:
                file.write(key.private_bytes(serialization.Encoding.PEM, key_format, serialization.NoEncryption()))
                file.flush()
                os.fsync(handle)
        except OSError:
            path.unlink()  # half a key, which each later call would refuse
            raise


def _read_private(path: Path, load, format_name: str, command: str) -> PrivateKey:  # type: ignore[no-untyped-def]
    """Return a private key; raise UserError if it has a password, or is not on an elliptic curve."""
    data = read_file(path, "the private key")
    with explained(f"{path} is not a private key without a password {format_name}"):
        key = load(data, password=None)
    if not isinstance(key, PrivateKey):
        raise UserError(f"{path} must be a key on an elliptic curve, got {type(key).__name__}: make one with {command}")
    return key


def public_text(key: PublicKey) -> str:
    """Return a public key as the line that ssh-keygen writes into a `.pub` file."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode() + "\n"


def read_public(path: Path, own: bool = True) -> PublicKey:
    """Return the public key, on an elliptic curve, in a file of ssh-keygen's format; for `own` see `read_file`."""
    data = read_file(path, "the public key", own)
    with explained(f"{path} is not a public key as ssh-keygen writes it"):
        key = serialization.load_ssh_public_key(data)
    if not isinstance(key, PublicKey):
        raise UserError(f"{path} must be a public key on an elliptic curve, got {type(key).__name__}")
    return key


def require_own(path: Path) -> None:
    """Raise UserError for a file or folder that is missing, or that other users can write."""
    try:
        refuse_shared(path, path.stat())
    except OSError as error:
        raise UserError(f"{path} cannot be used: {error.strerror}") from error


def read_file(path: Path, name: str, own: bool = True) -> bytes:
    """Return the content of at most 1 MiB; `name` is its kind in a UserError's text, such as "the private key".

    Unless `own` is False, other users must not be able to write the file.
    """
    try:
        return read_regular_file(path, 2**20, own)
    except OSError as error:
        raise UserError(f"{name} {path} cannot be read: {error.strerror}") from error
