"""Certificates and keys with which nobody could reach the SuperLink are refused before it starts."""

from __future__ import annotations

import shutil
import subprocess
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from fedssl.deploy import nodes
from fedssl.deploy.certificates import require_server
from fedssl.deploy.keys import read_site_key
from fedssl.errors import UserError

NOW = datetime.now(timezone.utc)
DAY = timedelta(days=1)


class Owner:
    """A name with its key and certificate, which is valid between two days from now on."""

    def __init__(self, name: str, issuer: Owner | None = None, days=(-1, 1), address: str = "127.0.0.1"):
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        issuer = issuer or self
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address(address))])
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(issuer.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW + days[0] * DAY)
            .not_valid_after(NOW + days[1] * DAY)
            .add_extension(names, critical=False)
            .add_extension(x509.BasicConstraints(ca=name != "server", path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key()), critical=False)
            .sign(issuer.key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


AUTHORITY = Owner("authority")
SERVER = Owner("server", AUTHORITY)
EXPIRED, EARLY = {"days": (-1, -0.5)}, {"days": (0.5, 1)}
NO_KEY = "server.key is not the private key of .*server.crt, or one of them is not in PEM"


def issued(**changes) -> dict[str, Owner]:
    return {"certificate": Owner("server", AUTHORITY, **changes)}


@pytest.fixture
def check(tmp_path):
    """Writes the SuperLink's three files and checks them."""

    def run(authority: bytes, certificate: bytes, key: bytes) -> None:
        names = {"ca.crt": authority, "server.crt": certificate, "server.key": key}
        for name, data in names.items():
            (tmp_path / name).write_bytes(data)
        require_server(tmp_path / "server.crt", tmp_path / "server.key", tmp_path / "ca.crt")

    return run


def test_what_fits_is_taken(check):
    check(AUTHORITY.pem, SERVER.pem, SERVER.key_pem)
    between = Owner("between", AUTHORITY)
    server = Owner("server", between)
    check(AUTHORITY.pem, server.pem + between.pem, server.key_pem)
    check(Owner("former", **EXPIRED).pem + AUTHORITY.pem, SERVER.pem, SERVER.key_pem)


@pytest.mark.parametrize(
    ("expected", "files"),
    [
        ("server.crt would be refused .*: certificate has expired", issued(**EXPIRED)),
        ("server.crt would .* is not yet valid.* machine's clock", issued(**EARLY)),
        ("server.crt would .*: IP address mismatch, .* not valid for '127.0.0.1'", issued(address="10.0.0.1")),
        ("ca.crt is not valid now: CN=authority is valid from", {"authority": Owner("authority", **EXPIRED)}),
        ("ca.crt is not valid now: CN=authority is valid from", {"authority": Owner("authority", **EARLY)}),
        ("server.crt would be refused .*ca.crt: unable to get", {"authority": Owner("another")}),
        ("server.crt would be refused .*ca.crt: ", {"authority": Owner("authority")}),  # of the same name
        ("ca.crt is not a certificate in PEM format", {"authority": b"none"}),
        (NO_KEY, {"certificate": b"none"}),
        (NO_KEY, {"key": b"none"}),
        (NO_KEY, {"key": SERVER.pem}),
        (NO_KEY, {"key": AUTHORITY.key_pem}),
    ],
)
def test_what_does_not_fit_is_refused(expected, files, check):
    files = {"authority": AUTHORITY, "certificate": SERVER} | files
    key = files["certificate"].key_pem if isinstance(files["certificate"], Owner) else SERVER.key_pem
    pem = {name: file.pem if isinstance(file, Owner) else file for name, file in files.items()}
    with pytest.raises(UserError, match=expected):
        check(**{"key": key} | pem)


def test_a_site_refuses_an_authority_that_has_expired_and_an_address_without_a_port(tmp_path, umask):
    (tmp_path / "ca.crt").write_bytes(Owner("authority", **EXPIRED).pem)
    with pytest.raises(UserError, match=r"ca.crt is not valid now: CN=authority"):
        nodes.supernode(tmp_path / "site.yaml", "127.0.0.1:1", tmp_path / "ca.crt", tmp_path / "site.key")
    for address in ("localhost", "https://localhost:8000", "localhost:"):
        with pytest.raises(UserError, match="--superlink is the SuperLink's address as HOST:PORT, got "):
            nodes.supernode(tmp_path / "site.yaml", address, tmp_path / "ca.crt", tmp_path / "site.key")


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_sites_key_is_a_private_one_as_flower_takes_it(tmp_path):
    def ssh_keygen(*arguments: str) -> None:
        subprocess.run(["ssh-keygen", "-q", *arguments], check=True, capture_output=True)

    key = tmp_path / "site.key"
    ssh_keygen("-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key))
    read_site_key(key)
    ssh_keygen("-t", "ed25519", "-N", "", "-f", str(tmp_path / "other.key"))
    for name, told in (
        ("site.key.pub", "is not a private key without a password"),
        ("other.key", r"must be a key on an elliptic curve, got .* with ssh-keygen -t ecdsa"),
    ):
        with pytest.raises(UserError, match=f"{name} {told}"):
            read_site_key(tmp_path / name)
    ssh_keygen("-p", "-N", "secret", "-f", str(key))
    with pytest.raises(UserError, match=r"site.key is not a private key without a password"):
        read_site_key(key)
