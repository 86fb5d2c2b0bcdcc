"""Certificates of a consortium: issued by its authority, read, renewed, and checked before anything starts.

With a wrong certificate Flower's processes would try to connect for ever, so it is refused beforehand.
"""

import ssl
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import UserError, explained
from ..run_folder.storage import write_atomically
from .consortium import RENEWAL_DAYS
from .keys import PublicKey, read_file, server_key

_AUTHORITY_DAYS = 3650
_CLOCK_TOLERANCE = timedelta(hours=1)  # clocks that are behind still accept a new certificate


class Authority:
    """The consortium's authority: its private `key` and its `certificate`."""

    def __init__(self, folder: Path, consortium: str):
        """Read ca.key and ca.crt of a folder; make them if both are missing.

        Raises:
            UserError: the key alone is missing; one cannot be read; they do not belong together, or to another
                consortium.
        """
        key_path, certificate_path = folder / "ca.key", folder / "ca.crt"
        if certificate_path.exists() and not key_path.exists():
            advice = "bring the authority's key back from where it is kept, as certificates are issued with it"
            raise UserError(f"{key_path} is missing: {advice}")
        self.key = server_key(key_path)
        if not certificate_path.exists():
            now, name = datetime.now(timezone.utc), common_name(consortium)
            builder = _builder(
                self.key.public_key(), name, name, now, now + timedelta(days=_AUTHORITY_DAYS), is_authority=True
            )
            write_atomically(certificate_path, builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM))
            certificate_path.chmod(0o600)
        self.certificate = read_certificate(certificate_path)
        if self.certificate.public_key() != self.key.public_key():
            raise UserError(f"{key_path} is not the private key of {certificate_path}: bring back the right one")
        if self.certificate.subject != common_name(consortium):
            raise UserError(
                f"{folder} is the authority of {_name(self.certificate).removeprefix('CN=')}, but the consortium's "
                f"file has name: {consortium}: name another folder with --output, or correct the name"
            )

    def issue(self, key: PublicKey, address: str, days: int) -> x509.Certificate:
        """Return a new certificate for the server's key and the address by which the sites reach it.

        It also names localhost and 127.0.0.1, where Flower's own processes reach the SuperLink, and is valid for `days`
        days, but not longer than the authority's own.
        """
        now = datetime.now(timezone.utc)
        end = min(now + timedelta(days=days), self.certificate.not_valid_after_utc)
        builder = (
            _builder(key, common_name(address[:64]), self.certificate.subject, now, end, is_authority=False)
            .add_extension(x509.SubjectAlternativeName(_server_names(address)), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())


def read_certificate(path: Path) -> x509.Certificate:
    """Return the first certificate in a PEM file; raise UserError if it has none or cannot be read."""
    return _read_certificates(path)[0]


def needs_renewal(path: Path, address: str, last: datetime) -> str | None:
    """Return the reason to issue the server's certificate; None if the one in a PEM file is still good.

    It is also good if it is valid until the authority's own end, `last`: a new one would not be valid for longer.
    """
    if not path.exists():
        return "there was none"
    certificate = read_certificate(path)
    end = certificate.not_valid_after_utc
    if end - datetime.now(timezone.utc) < timedelta(days=RENEWAL_DAYS) and end < last:
        return f"the old one ends on {end:%Y-%m-%d}"
    names: list[x509.GeneralName] = []
    with suppress(x509.ExtensionNotFound):
        names += certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return None if names == _server_names(address) else f"the old one is not for {address}"


def common_name(name: str) -> x509.Name:
    """Return the subject that has this common name and nothing else."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def require_server(certificate: Path, key: Path, authority: Path) -> None:
    """Raise UserError for a server's certificate with which nobody could reach the SuperLink.

    The file `certificate` holds the server's, and any that lead from it to one in `authority`, which the sites and
    Flower's own processes trust. These connect to 127.0.0.1 by TLS; here both ends of that are tried in memory.
    """
    for path, what in ((authority, "the certificate"), (certificate, "the certificate"), (key, "the private key")):
        read_file(path, what)
    require_authority(authority)
    client, server = ssl.create_default_context(cafile=authority), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(certificate, key, password=lambda: b"none")
    except ssl.SSLError as error:
        raise UserError(
            f"{key} is not the private key of {certificate}, or one of them is not in PEM format without a password: "
            f"{error}; use the key that the certificate was made with"
        ) from error
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there, server_hostname="127.0.0.1"), server.wrap_bio(there, back, server_side=True)
    try:
        for end in (*ends, *ends):
            with suppress(ssl.SSLWantReadError):  # it is the other one's turn
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise UserError(
            f"{certificate} would be refused by those who trust {authority}: {error.verify_message}; it must be "
            "issued by that authority, name 127.0.0.1, where Flower's own processes reach the SuperLink, in its "
            f"subjectAltName, and be valid now, which is {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC by this "
            "machine's clock (docs/deploy.md)"
        ) from error


def require_authority(path: Path) -> None:
    """Raise UserError for a file of authorities' certificates of which none is valid now."""
    certificates, now = _read_certificates(path), datetime.now(timezone.utc)
    if not any(one.not_valid_before_utc <= now <= one.not_valid_after_utc for one in certificates):
        first, last = certificates[0].not_valid_before_utc, certificates[0].not_valid_after_utc
        raise UserError(
            f"{path} is not valid now: {_name(certificates[0])} is valid from {first:%Y-%m-%d %H:%M} to "
            f"{last:%Y-%m-%d %H:%M} UTC, but this machine's clock shows {now:%Y-%m-%d %H:%M} UTC"
        )


def _read_certificates(path: Path) -> list[x509.Certificate]:
    data = read_file(path, "the certificate")
    with explained(f"{path} is not a certificate in PEM format"):
        return x509.load_pem_x509_certificates(data)


def _name(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string() or "a certificate without a name"


def _builder(
    key: PublicKey, subject: x509.Name, issuer: x509.Name, now: datetime, end: datetime, is_authority: bool
) -> x509.CertificateBuilder:
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        **dict.fromkeys((*unused, "encipher_only", "decipher_only"), False),
    )
    return (
        x509.CertificateBuilder()
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_TOLERANCE)
        .not_valid_after(end)
        .subject_name(subject)
        .issuer_name(issuer)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
    )


def _server_names(address: str) -> list[x509.GeneralName]:
    try:
        name: x509.GeneralName = x509.IPAddress(ip_address(address))
    except ValueError:
        name = x509.DNSName(address)
    local: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    return [name, *(one for one in local if one != name)]
