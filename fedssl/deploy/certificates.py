"""Certificates and keys are checked before anything starts: with wrong ones Flower's processes would try for ever."""

from __future__ import annotations

import itertools
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)

from ..errors import UserError


def require_server(certificate: Path, key: Path, authority: Path, host: str) -> None:
    """Refuse a server's certificate with which nobody could reach the SuperLink.

    Args:
        certificate: of the server; further ones in the file lead from it to the authority's.
        key: the server's private key.
        authority: the certificates that sites and Flower's own processes trust.
        host: where the SuperLink listens.

    Raises:
        UserError: a file cannot be read; a certificate has expired or is not valid yet; the key is another's; the
            authority has not issued the certificate; it does not name the address of the SuperLink's own processes.
    """
    require_authority(authority)
    chain = _certificates(certificate)
    for one in chain:
        _require_valid_now(certificate, one)
    try:
        private = load_pem_private_key(_read(key), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it has a password
        raise UserError(f"{key} is not a private key in PEM format without a password: {error}") from error
    if _public_bytes(private.public_key()) != _public_bytes(chain[0].public_key()):
        raise UserError(f"{key} is not the private key of {certificate}: use the key that it was made with")
    for one, issuer in itertools.pairwise(chain):
        if not _issued(one, issuer):
            raise UserError(f"{certificate} is a broken chain: {_name(issuer)} has not issued {_name(one)}")
    if not any(chain[-1] == trusted or _issued(chain[-1], trusted) for trusted in _certificates(authority)):
        raise UserError(f"{certificate} was not issued by {authority}: sign it with that authority's key")
    _require_own_address(certificate, chain[0], host)


def require_authority(path: Path) -> None:
    """Refuse a file of authorities' certificates of which none is valid now.

    Raises:
        UserError: the file cannot be read, or all its certificates have expired or are not valid yet.
    """
    problems = [_not_valid_now(certificate) for certificate in _certificates(path)]
    if None not in problems:
        raise UserError(f"{path} {problems[0]}")


def require_site_key(path: Path) -> None:
    """Refuse a site's key that Flower cannot use.

    Raises:
        UserError: it cannot be read, or is not a private key on an elliptic curve as ssh-keygen writes it.
    """
    try:
        key = load_ssh_private_key(_read(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(
            f"{path} is not a private key without a password as ssh-keygen writes it: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"{path} must be a key on an elliptic curve, got {type(key).__name__}: make one with ssh-keygen -t ecdsa"
        )


def _require_valid_now(path: Path, certificate: x509.Certificate) -> None:
    if problem := _not_valid_now(certificate):
        raise UserError(f"{path} {problem}")


def _not_valid_now(certificate: x509.Certificate) -> str | None:
    now = datetime.now(timezone.utc)
    if now > certificate.not_valid_after_utc:
        return f"has expired: {_name(certificate)} was valid until {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if now < certificate.not_valid_before_utc:
        return (
            f"is not valid yet: {_name(certificate)} is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} "
            f"UTC, but this machine's clock shows {now:%Y-%m-%d %H:%M} UTC"
        )
    return None


def _require_own_address(path: Path, certificate: x509.Certificate, host: str) -> None:
    """Refuse a certificate that Flower's own processes would not trust: they reach the SuperLink with TLS too."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise UserError(f"{path} has no valid subjectAltName: {error}") from error
    valid_for = [*map(str, names.get_values_for_type(x509.IPAddress)), *names.get_values_for_type(x509.DNSName)]
    if reached not in valid_for and not any(name.startswith("*.") for name in valid_for):
        raise UserError(
            f"{path} is valid for {', '.join(valid_for) or 'no address'}, but not for {reached}, where Flower's own "
            "processes reach the SuperLink: add that address to the subjectAltName (docs/deploy.md)"
        )


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(path))
    except ValueError as error:
        raise UserError(f"{path} is not a certificate in PEM format: {error}") from error


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):  # of another name; of a kind that signs nothing; by another key
        return False
    return True


def _public_bytes(key: Any) -> bytes:
    data: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return data


def _name(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string() or "a certificate without a name"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
