"""What `fedssl provision` writes, who can read it, and that a later call only adds."""

from __future__ import annotations

import shutil
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import yaml

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install .[flower]")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fedssl.deploy.certificates import Authority, read_certificate
from fedssl.deploy.keys import server_key, site_key, write_private
from fedssl.errors import UserError

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
needs_ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
PRIVATE_KEYS = ("authority/ca.key", "server/server.key", "hospital-a/site.key", "hospital-b/site.key")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout


def test_each_member_gets_its_files_and_no_other_members_key(provisioned):
    folder = provisioned()
    written = set(contents(folder))
    assert {name for name in written if name.endswith(".key")} == set(PRIVATE_KEYS)
    for site in ("hospital-a", "hospital-b"):
        files = {"ca.crt", "site.key", "site.yaml", "member.yaml", "start.sh", "STEPS.md"}
        files.add(f"fedssl-our-consortium-{site}.service")
        assert {name.partition("/")[2] for name in written if name.startswith(f"{site}/")} == files
    files = {"ca.crt", "server.crt", "server.key", "member.yaml", "start.sh", "STEPS.md"}
    files |= {"sites/hospital-a.pub", "sites/hospital-b.pub", "fedssl-our-consortium-server.service"}
    assert {name.partition("/")[2] for name in written if name.startswith("server/")} == files
    assert yaml.safe_load((folder / "hospital-b" / "site.yaml").read_text())["client"] == 1


def test_private_keys_and_folders_are_for_their_user_alone(provisioned):
    folder = provisioned()
    for path in (folder, *folder.rglob("*")):
        expected = 0o700 if path.is_dir() or path.suffix == ".sh" else 0o600
        assert path.suffix == ".crt" or path.stat().st_mode & 0o777 == expected, path


@needs_openssl
@pytest.mark.parametrize(("address", "option"), [("fed.example.org", "-verify_hostname"), ("10.1.2.3", "-verify_ip")])
def test_openssl_verifies_the_servers_certificate_against_the_authority(address, option, provisioned):
    folder = provisioned(server={"address": address})
    for check in ((option, address), ("-verify_hostname", "localhost"), ("-verify_ip", "127.0.0.1")):
        verified = ("openssl", "verify", "-x509_strict", "-purpose", "sslserver", *check)
        run(*verified, "-CAfile", folder / "hospital-a" / "ca.crt", folder / "server" / "server.crt")
    with pytest.raises(subprocess.CalledProcessError):
        run("openssl", "verify", "-verify_hostname", "other.org", "-CAfile", folder / "authority" / "ca.crt",
            folder / "server" / "server.crt")  # fmt: skip


@needs_openssl
@needs_ssh_keygen
def test_the_fingerprints_are_those_that_openssl_and_ssh_keygen_print(provisioned):
    folder = provisioned()
    page = (folder / "fingerprints.md").read_text()
    printed = run("openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in", folder / "authority" / "ca.crt")
    assert printed.partition("=")[2].strip() in page
    for site in ("hospital-a", "hospital-b"):
        printed = run("ssh-keygen", "-l", "-f", folder / "server" / "sites" / f"{site}.pub").split()[1]
        assert f"- {site}: {printed}\n" in page
        private = run("ssh-keygen", "-y", "-f", folder / site / "site.key")
        assert private.split()[:2] == (folder / "server" / "sites" / f"{site}.pub").read_text().split()[:2]


@pytest.mark.skipif(shutil.which("sh") is None, reason="sh is not installed")
@pytest.mark.parametrize("wall", [True, False])
def test_the_start_scripts_are_valid_shell(wall, provisioned):
    folder = provisioned(server={"address": "localhost", "wall": wall})
    for name in ("server", "hospital-a"):
        run("sh", "-n", folder / name / "start.sh")
    script = (folder / "server" / "start.sh").read_text()
    assert ("nginx" in script) == wall
    assert ("--host 0.0.0.0 --port 8000" in script) != wall


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_no_fault_in_the_units(provisioned):
    """Once their three places are adapted, as their first lines say."""
    folder = provisioned()
    for name in ("server", "hospital-a"):
        [unit] = (folder / name).glob("*.service")
        adapted = folder.parent / unit.name
        text = unit.read_text().replace(f"/opt/fedssl/{name}", str(folder / name)).replace("User=fedssl", "User=root")
        adapted.write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", str(adapted)], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_same_call_again_changes_nothing_and_a_site_added_later_gets_a_folder(provisioned):
    folder = provisioned()
    (folder / "hospital-a" / "site.yaml").write_text("client: 0\nstate: /data/state\n")
    before = contents(folder)
    provisioned()
    assert contents(folder) == before
    provisioned(sites=["hospital-a", "hospital-b", "hospital-c"])
    after = contents(folder)
    assert {name for name in before if after[name] != before[name]} == {"authority/sites.txt", "fingerprints.md"}
    added = {name for name in after if name not in before}
    assert {name for name in added if not name.startswith("hospital-c/")} == {"server/sites/hospital-c.pub"}
    assert yaml.safe_load((folder / "hospital-c" / "site.yaml").read_text())["client"] == 2


def test_another_order_of_the_sites_is_refused_and_nothing_is_written(provisioned):
    folder = provisioned()
    before = contents(folder)
    for sites in (["hospital-b", "hospital-a"], ["hospital-a"], ["hospital-c", "hospital-a", "hospital-b"]):
        with pytest.raises(UserError, match=r"must begin with the sites of .* in their order"):
            provisioned(sites=sites)
    assert contents(folder) == before


def test_another_address_gives_another_certificate_for_the_same_key(provisioned):
    folder = provisioned()
    key = (folder / "server" / "server.key").read_bytes()
    provisioned(server={"address": "10.1.2.3", "port": 8000, "internal_port": 8001})
    assert (folder / "server" / "server.key").read_bytes() == key
    certificate = read_certificate(folder / "server" / "server.crt")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "10.1.2.3" in [str(one) for one in names.get_values_for_type(x509.IPAddress)]
    assert "--superlink 10.1.2.3:8000" in (folder / "hospital-a" / "start.sh").read_text()


def test_a_certificate_that_ends_soon_is_renewed_for_the_same_key(provisioned):
    folder = provisioned()
    authority, path = Authority(folder / "authority", "our-consortium"), folder / "server" / "server.crt"
    key = server_key(folder / "server" / "server.key").public_key()
    path.write_bytes(authority.issue(key, "localhost", 29).public_bytes(Encoding.PEM))
    provisioned()
    renewed = read_certificate(path)
    assert renewed.not_valid_after_utc > datetime.now(timezone.utc) + timedelta(days=300)
    assert renewed.public_key() == key
    renewed.verify_directly_issued_by(authority.certificate)


def test_a_deleted_copy_of_a_sites_key_is_not_made_again(provisioned):
    """The coordinator deletes a site's key, or its folder, once the site has it."""
    folder = provisioned()
    (folder / "hospital-a" / "site.key").unlink()
    shutil.rmtree(folder / "hospital-b")
    before = contents(folder / "server")
    provisioned()
    assert not (folder / "hospital-a" / "site.key").exists()
    assert not (folder / "hospital-b").exists()
    assert contents(folder / "server") == before


def test_without_the_authority_no_new_one_is_made(provisioned):
    folder = provisioned()
    shutil.move(folder / "authority", folder.parent / "safe")
    with pytest.raises(UserError, match="a new authority would lock out the sites"):
        provisioned()
    assert not (folder / "authority").exists()
    shutil.move(folder.parent / "safe", folder / "authority")
    (folder / "authority" / "ca.key").unlink()
    with pytest.raises(UserError, match=r"ca\.key is missing: bring the authority's key back"):
        provisioned()
    server_key(folder / "authority" / "ca.key")
    with pytest.raises(UserError, match=r"is not the private key of .*ca\.crt"):
        provisioned()


def test_a_private_key_is_never_replaced(tmp_path):
    path = tmp_path / "site.key"
    key = site_key(path)
    assert site_key(path).private_numbers() == key.private_numbers()
    with pytest.raises(UserError, match="a key is never overwritten"):
        write_private(path, b"other")
    assert site_key(path).private_numbers() == key.private_numbers()
    assert [p.name for p in tmp_path.iterdir()] == ["site.key"]
    path.write_text("nonsense")
    with pytest.raises(UserError, match="is not a private key without a password"):
        site_key(path)
    assert path.read_text() == "nonsense"
