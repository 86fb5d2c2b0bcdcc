"""Private keys and public keys as files. A private key is never overwritten, and only its user can read it."""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from ..errors import UserError
from ..storage import cannot_write, sync_folder
from ..untrusted.files import read_regular_file

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
_LARGEST_FILE = 2**16


def server_key(path: Path) -> PrivateKey:
    """The private key in a PEM file on the curve P-256; it is made where the file is missing.

    Raises:
        UserError: the file holds something else, or cannot be written.
    """
    return _existing_or_new(path, ec.SECP256R1(), PrivateFormat.PKCS8, load_pem_private_key)


def site_key(path: Path) -> PrivateKey:
    """The private key in a file as ssh-keygen writes it, on the curve P-384; it is made where the file is missing.

    Raises:
        UserError: the file holds something else, or cannot be written.
    """
    return _existing_or_new(path, ec.SECP384R1(), PrivateFormat.OpenSSH, load_ssh_private_key)


def _existing_or_new(path: Path, curve: ec.EllipticCurve, form: PrivateFormat, load) -> PrivateKey:  # type: ignore[no-untyped-def]
    if not path.exists():
        write_private(path, ec.generate_private_key(curve).private_bytes(Encoding.PEM, form, NoEncryption()))
    try:
        key = load(read_regular_file(path, _LARGEST_FILE), password=None)
    except OSError as error:
        raise UserError(f"the private key {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it has a password
        raise UserError(f"{path} is not a private key without a password: {' '.join(str(error).split())}") from error
    if not isinstance(key, PrivateKey):
        raise UserError(f"{path} must be a private key on an elliptic curve, got {type(key).__name__}")
    return key


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only its user can read. An existing file is never replaced.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # fails where the file exists, which a rename would replace
        sync_folder(path.parent)
    except FileExistsError:
        raise UserError(f"{path} exists already, and a key is never overwritten: move it away first") from None
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def public_text(key: PublicKey) -> str:
    """A public key as the line that ssh-keygen writes into a `.pub` file."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() + "\n"


def read_public(path: Path) -> PublicKey:
    """The public key in a file as ssh-keygen writes it.

    Raises:
        UserError: the file cannot be read, or is no public key on an elliptic curve.
    """
    try:
        key = load_ssh_public_key(read_regular_file(path, _LARGEST_FILE))
    except OSError as error:
        raise UserError(f"the public key {path} cannot be read: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} is not a public key as ssh-keygen writes it: {error}") from error
    if not isinstance(key, PublicKey):
        raise UserError(f"{path} must be a public key on an elliptic curve, got {type(key).__name__}")
    return key


def key_fingerprint(key: PublicKey) -> str:
    """A public key's fingerprint as `ssh-keygen -l` prints it: SHA256 and the digest in base64."""
    blob = base64.b64decode(public_text(key).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
