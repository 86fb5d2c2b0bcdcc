"""A consortium's keys, certificates and folders from one file; docs/deploy.md uses the commands."""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
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
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import UserError
from ..run.storage import cannot_write, sync_path, write_atomically
from ..untrusted import read_regular_file

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
        sync_path(path.parent)
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


_AUTHORITY_DAYS = 3650


#: a certificate that ends within this many days is renewed
RENEWAL_DAYS = 30


#: clocks that lag behind still take a new certificate as valid
_CLOCK_TOLERANCE = timedelta(hours=1)


class Authority:
    """The consortium's authority: its private key and its certificate.

    Attributes:
        key: the private key; whoever has it can pretend to be the server.
        certificate: the sites trust what it has issued.
    """

    def __init__(self, folder: Path, consortium: str):
        """Read ca.key and ca.crt of a folder; make them where both are missing.

        Raises:
            UserError: one of the two is missing or cannot be read, or they do not belong together.
        """
        key_path, certificate_path = folder / "ca.key", folder / "ca.crt"
        if certificate_path.exists() and not key_path.exists():
            raise UserError(
                f"{key_path} is missing: bring the authority's key back from where it is kept, as certificates are "
                "issued with it"
            )
        self.key = server_key(key_path)
        if not certificate_path.exists():
            write_atomically(certificate_path, _new_authority(self.key, consortium).public_bytes(Encoding.PEM))
        self.certificate = read_certificate(certificate_path)
        if self.certificate.public_key() != self.key.public_key():
            raise UserError(f"{key_path} is not the private key of {certificate_path}: bring back the right one")

    def issue(self, key: PublicKey, address: str, days: int) -> x509.Certificate:
        """A new certificate of the server.

        Args:
            key: the server's public key.
            address: host name or IP address by which the sites reach the server. The certificate also names localhost
                and 127.0.0.1, where Flower's own processes reach the SuperLink.
            days: how long it is valid; not longer than the authority's own certificate.
        """
        now = datetime.now(timezone.utc)
        end = min(now + timedelta(days=days), self.certificate.not_valid_after_utc)
        identifier = self.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = (
            _builder(key, now, end)
            .subject_name(_subject(address[:64]))
            .issuer_name(self.certificate.subject)
            .add_extension(x509.SubjectAlternativeName(_server_names(address)), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())


def read_certificate(path: Path) -> x509.Certificate:
    """The first certificate in a PEM file.

    Raises:
        UserError: the file cannot be read, or holds no certificate.
    """
    try:
        return x509.load_pem_x509_certificate(read_regular_file(path, _LARGEST_FILE))
    except OSError as error:
        raise UserError(f"the certificate {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not a certificate in PEM format: {error}") from error


def certified_key(path: Path) -> PublicKey:
    """The public key that a certificate in a PEM file is for.

    Raises:
        UserError: the file cannot be read or holds no certificate; the key is not on an elliptic curve.
    """
    key = read_certificate(path).public_key()
    if not isinstance(key, PublicKey):
        raise UserError(f"{path} must be for a key on an elliptic curve, got {type(key).__name__}")
    return key


def needs_renewal(certificate: x509.Certificate, address: str) -> str | None:
    """Why a certificate of the server has to be issued anew; None where it need not be."""
    left = certificate.not_valid_after_utc - datetime.now(timezone.utc)
    if left < timedelta(days=RENEWAL_DAYS):
        return f"the old one ends on {certificate.not_valid_after_utc:%Y-%m-%d}"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if list(names) != _server_names(address):
        return f"the old one is not for {address}"
    return None


def certificate_fingerprint(certificate: x509.Certificate) -> str:
    """The SHA-256 of a certificate as `openssl x509 -fingerprint -sha256` prints it."""
    return certificate.fingerprint(hashes.SHA256()).hex(":").upper()


def _new_authority(key: PrivateKey, consortium: str) -> x509.Certificate:
    now = datetime.now(timezone.utc)
    builder = (
        _builder(key.public_key(), now, now + timedelta(days=_AUTHORITY_DAYS))
        .subject_name(_subject(consortium))
        .issuer_name(_subject(consortium))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    return builder.sign(key, hashes.SHA256())


def _builder(key: PublicKey, now: datetime, end: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_TOLERANCE)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _server_names(address: str) -> list[x509.GeneralName]:
    try:
        own: x509.GeneralName = x509.IPAddress(ip_address(address))
    except ValueError:
        own = x509.DNSName(address)
    local: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    return [own, *(name for name in local if name != own)]


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
