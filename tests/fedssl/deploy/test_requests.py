"""Keys that are made at the sites, and keys that are revoked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install .[flower]")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fedssl.deploy.certificates import read_certificate
from fedssl.deploy.consortium import Consortium, load_consortium
from fedssl.deploy.folders import answer_request, revoke, write_request
from fedssl.deploy.keys import key_fingerprint, read_public, server_key, site_key
from fedssl.errors import UserError


@pytest.fixture
def consortium(consortium_file) -> Consortium:
    return load_consortium(consortium_file())


@pytest.fixture
def without_keys(provisioned) -> Path:
    """The coordinator's folder, whose sites and server make their own keys."""
    return provisioned(keys_at_sites=True)


def new_key(site: Path) -> None:
    (site / "site.key").unlink()
    write_request(site)


def test_with_keys_at_sites_the_coordinator_makes_the_authoritys_key_alone(without_keys):
    assert [str(p.relative_to(without_keys)) for p in without_keys.rglob("*.key")] == ["authority/ca.key"]
    assert not list(without_keys.rglob("*.pub"))
    assert not (without_keys / "server" / "server.crt").exists()
    assert "fedssl provision request FOLDER" in (without_keys / "hospital-a" / "STEPS.md").read_text()
    assert "fedssl provision request FOLDER" in (without_keys / "server" / "STEPS.md").read_text()


def test_a_request_and_its_answer_register_a_site_without_its_private_key(without_keys, consortium):
    site = without_keys / "hospital-a"
    path, fingerprint = write_request(site)
    assert path == site / "hospital-a.request"
    assert (site / "site.key").stat().st_mode & 0o777 == 0o600
    assert "PRIVATE" not in path.read_text()
    assert write_request(site) == (path, fingerprint)  # which keeps the key
    done = answer_request(path, without_keys, consortium)
    assert fingerprint in done[0]
    public = read_public(without_keys / "server" / "sites" / "hospital-a.pub")
    assert key_fingerprint(public) == fingerprint == key_fingerprint(site_key(site / "site.key").public_key())
    assert f"- hospital-a: {fingerprint}" in (without_keys / "fingerprints.md").read_text()
    assert not (without_keys / "server" / "sites" / "hospital-b.pub").exists()


def test_a_request_of_the_server_gives_it_a_certificate(without_keys, consortium):
    path, _ = write_request(without_keys / "server")
    answer_request(path, without_keys, consortium)
    certificate = read_certificate(without_keys / "server" / "server.crt")
    assert certificate.public_key() == server_key(without_keys / "server" / "server.key").public_key()
    certificate.verify_directly_issued_by(read_certificate(without_keys / "hospital-a" / "ca.crt"))


def test_a_call_again_leaves_keys_that_are_at_the_sites(without_keys, provisioned, consortium):
    path, _ = write_request(without_keys / "hospital-a")
    answer_request(path, without_keys, consortium)
    before = (without_keys / "server" / "sites" / "hospital-a.pub").read_bytes()
    (without_keys / "hospital-a" / "site.key").unlink()  # it never was here
    provisioned(keys_at_sites=True, sites=["hospital-a", "hospital-b", "hospital-c"])
    assert (without_keys / "server" / "sites" / "hospital-a.pub").read_bytes() == before
    assert [str(p.relative_to(without_keys)) for p in without_keys.rglob("*.key")] == ["authority/ca.key"]


def test_another_key_for_a_registered_site_is_refused(without_keys, consortium):
    site, public = without_keys / "hospital-a", without_keys / "server" / "sites" / "hospital-a.pub"
    path, first = write_request(site)
    answer_request(path, without_keys, consortium)
    new_key(site)
    with pytest.raises(UserError, match="call fedssl provision revoke hospital-a first") as caught:
        answer_request(path, without_keys, consortium)
    assert first in str(caught.value)
    assert key_fingerprint(read_public(public)) == first


def test_a_forged_request_and_one_of_a_stranger_are_refused(without_keys, consortium, tmp_path):
    path, _ = write_request(without_keys / "hospital-a")
    forged = tmp_path / "forged.request"
    data = x509.load_pem_x509_csr(path.read_bytes()).public_bytes(Encoding.DER)
    renamed = x509.load_der_x509_csr(data.replace(b"hospital-a", b"hospital-b"))
    forged.write_bytes(renamed.public_bytes(Encoding.PEM))
    with pytest.raises(UserError, match="is damaged or forged"):
        answer_request(forged, without_keys, consortium)
    forged.write_text("nonsense")
    with pytest.raises(UserError, match="is not a request of fedssl provision request"):
        answer_request(forged, without_keys, consortium)
    (without_keys / "authority" / "sites.txt").write_text("hospital-b\n")
    with pytest.raises(UserError, match=r"is no site of .*hospital-b.*: add the site to the consortium's file"):
        answer_request(path, without_keys, consortium)
    assert not list((without_keys / "server" / "sites").iterdir())


def test_a_revoked_key_is_not_registered_again_and_a_new_one_is(provisioned, consortium):
    folder = provisioned()
    site, public = folder / "hospital-b", folder / "server" / "sites" / "hospital-b.pub"
    done = revoke("hospital-b", folder)
    assert "fedssl provision register" in done[1]
    assert not public.exists()
    assert "hospital-b" not in (folder / "fingerprints.md").read_text()
    provisioned()
    assert not public.exists()
    path, revoked = write_request(site)
    with pytest.raises(UserError, match=r"was revoked .*move its site\.key away"):
        answer_request(path, folder, consortium)
    assert not public.exists()
    new_key(site)
    answer_request(path, folder, consortium)
    assert key_fingerprint(read_public(public)) != revoked


def test_a_site_without_a_key_cannot_be_revoked(provisioned):
    folder = provisioned()
    for name in ("hospital-c", "../authority/ca"):
        with pytest.raises(UserError, match="sites with a key are hospital-a, hospital-b"):
            revoke(name, folder)


def test_the_commands_print_what_to_compare_and_what_to_do(consortium_file, fedssl):
    file = str(consortium_file())

    def printed(*arguments: str, expected_code: int = 0) -> str:
        code, out, err = fedssl("provision", *arguments, columns=300)
        assert code == expected_code, err
        return out or err

    out = printed(file, "--output", "made", "--keys-at-sites")
    assert "hospital-a: client 0; its key is made at the site: fedssl provision request, then answer" in out
    fingerprint = printed("request", "made/hospital-a").split()[-1]
    assert fingerprint.startswith("SHA256:")
    assert fingerprint in printed("answer", file, "made/hospital-a/hospital-a.request", "--output", "made")
    revocation = ("revoke", "hospital-a", "--output", "made")
    assert "its key is no longer in made/server/sites" in printed(*revocation)
    assert "sites with a key are none" in printed(*revocation, expected_code=2)
    assert "name the consortium's file" in printed("folders", expected_code=2)
    out = printed(file, "--output", "other")
    assert out.startswith("server: wrote server.crt, valid until ")
    assert re.search(r"^hospital-a: client 0, key SHA256:\S+\nhospital-b: client 1, key SHA256:", out, re.MULTILINE)
