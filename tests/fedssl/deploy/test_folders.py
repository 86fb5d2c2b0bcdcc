"""What `fedssl provision` writes, and who can read it; keys that are made at the sites, and keys that are revoked."""

import re
import shutil
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fedssl.deploy.certificates import Authority, read_certificate
from fedssl.deploy.consortium import load_consortium, load_server
from fedssl.deploy.folders import answer_request, provision, revoke
from fedssl.deploy.keys import public_text, read_public, server_key, site_key
from fedssl.engines.flower.site_files import key_fingerprint, load_site, read_manifest
from fedssl.errors import UserError
from tests.fedssl.data.data_files import full_disk
from tests.fedssl.engines.short_runs import everything

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
needs_ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def run(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout


def test_each_member_gets_its_files_for_its_user_alone_and_no_other_members_key(provisioned):
    folder = provisioned()
    files = {"ca.crt", "start.sh", "STEPS.md"}
    server = {"server.crt", "server.key", "sites/hospital-a.pub", "sites/hospital-b.pub"}
    server |= {"sites/manifest.yaml", "fedssl-our-consortium-server.service", "nginx.conf", "server.yaml"}
    expected = {f"server/{name}" for name in files | server}
    for site in ("hospital-a", "hospital-b"):
        own = files | {"site.key", "site.yaml", f"fedssl-our-consortium-{site}.service"}
        expected |= {f"{site}/{name}" for name in own}
    assert {name for name in everything(folder) if not name.startswith("authority/")} == expected | {"fingerprints.md"}
    assert [str(path.relative_to(folder)) for path in folder.glob("authority/*.key")] == ["authority/ca.key"]
    for path in (folder, *folder.rglob("*")):
        mode = 0o700 if path.is_dir() or path.suffix == ".sh" else 0o600
        assert path.suffix == ".crt" or path.stat().st_mode & 0o777 == mode, path


@needs_openssl
@pytest.mark.parametrize(("address", "option"), [("fed.example.org", "-verify_hostname"), ("10.1.2.3", "-verify_ip")])
def test_openssl_verifies_the_servers_certificate_against_the_authority(address, option, provisioned):
    folder = provisioned(server={"address": address})

    def verify(*check: str) -> None:
        verified = ("openssl", "verify", "-x509_strict", "-purpose", "sslserver", *check)
        run(*verified, "-CAfile", folder / "hospital-a" / "ca.crt", folder / "server" / "server.crt")

    for check in ((option, address), ("-verify_hostname", "localhost"), ("-verify_ip", "127.0.0.1")):
        verify(*check)
    with pytest.raises(subprocess.CalledProcessError):
        verify("-verify_hostname", "other.org")


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
    (folder / "hospital-a" / "site.yaml").write_text("state: /data/state\n")
    before = everything(folder)
    provisioned()
    assert everything(folder) == before
    provisioned(sites=THREE)
    after = everything(folder)
    changed = {"fingerprints.md"}
    changed |= {f"server/{name}" for name in ("sites/manifest.yaml", "start.sh", "STEPS.md")}
    assert {name for name in before if after[name] != before[name]} == changed
    assert "partition.clients=3" in (folder / "server" / "start.sh").read_text()
    added = {name for name in after if name not in before}
    assert {name for name in added if not name.startswith("hospital-c/")} == {"server/sites/hospital-c.pub"}
    assert list(read_manifest(folder / "server" / "sites" / "manifest.yaml").sites) == THREE


ORDER = "must begin with the sites of .* in their order"
THREE = ["hospital-a", "hospital-b", "hospital-c"]
OTHER = "is the authority of our-consortium, but the consortium's file has name: other: name another folder with"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sites": ["hospital-b", "hospital-a"]}, ORDER),
        ({"sites": ["hospital-a"]}, ORDER),
        ({"sites": ["hospital-c", "hospital-a", "hospital-b"]}, ORDER),
        ({"name": "other", "sites": THREE}, OTHER),
    ],
)
def test_another_order_of_the_sites_and_another_consortium_are_refused_and_change_nothing(changes, told, provisioned):
    folder = provisioned()
    before = everything(folder)
    with pytest.raises(UserError, match=told):
        provisioned(**changes)
    assert everything(folder) == before


def test_a_certificate_of_another_address_or_that_ends_soon_is_renewed_for_the_same_key(provisioned):
    folder = provisioned()
    path, key = folder / "server" / "server.crt", server_key(folder / "server" / "server.key").public_key()
    provisioned(server={"address": "10.1.2.3", "port": 8000, "internal_port": 8001})
    names = read_certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "10.1.2.3" in [str(one) for one in names.get_values_for_type(x509.IPAddress)]
    assert "--superlink 10.1.2.3:8000" in (folder / "hospital-a" / "start.sh").read_text()
    authority = Authority(folder / "authority", "our-consortium")
    path.write_bytes(authority.issue(key, "localhost", 29).public_bytes(Encoding.PEM))
    provisioned()
    renewed = read_certificate(path)
    assert renewed.not_valid_after_utc > datetime.now(timezone.utc) + timedelta(days=300)
    assert renewed.public_key() == key == server_key(folder / "server" / "server.key").public_key()
    renewed.verify_directly_issued_by(authority.certificate)


def test_a_deleted_copy_of_a_sites_key_is_not_made_again(provisioned):
    """The coordinator deletes a site's key, or its folder, once the site has it."""
    folder = provisioned()
    (folder / "hospital-a" / "site.key").unlink()
    shutil.rmtree(folder / "hospital-b")
    before = everything(folder / "server")
    provisioned()
    assert not (folder / "hospital-a" / "site.key").exists()
    assert not (folder / "hospital-b").exists()
    assert everything(folder / "server") == before


def test_without_the_authority_no_new_one_is_made(provisioned):
    folder = provisioned()
    shutil.move(folder / "authority", folder.parent / "safe")
    for call in (provisioned, lambda: revoke("hospital-a", folder)):
        with pytest.raises(UserError, match="a new authority would lock out the sites"):
            call()
    assert not (folder / "authority").exists()
    shutil.move(folder.parent / "safe", folder / "authority")
    (folder / "authority" / "ca.key").unlink()
    with pytest.raises(UserError, match=r"ca\.key is missing: bring the authority's key back"):
        provisioned()
    server_key(folder / "authority" / "ca.key")
    with pytest.raises(UserError, match=r"is not the private key of .*ca\.crt"):
        provisioned()


def test_a_private_key_is_never_replaced_and_of_a_full_disk_no_part_of_one_stays(tmp_path):
    path = tmp_path / "site.key"
    with full_disk(100), pytest.raises(UserError, match=r"no space left to write .*repeat the command"):
        site_key(path)
    key = site_key(path)
    assert site_key(path).private_numbers() == key.private_numbers()
    assert [p.name for p in tmp_path.iterdir()] == ["site.key"]
    path.write_text("nonsense")
    with pytest.raises(UserError, match="is not a private key without a password"):
        site_key(path)
    assert path.read_text() == "nonsense"


# Keys that are made at the sites, and keys that are revoked


@pytest.fixture
def without_keys(provisioned) -> Path:
    """The coordinator's folder, whose sites make their own keys."""
    return provisioned(keys_at_sites=True)


def write_request(site: Path) -> tuple[Path, str]:
    """What ssh-keygen makes in a site's folder, whose key stays if there is one; the fingerprint."""
    key = site_key(site / "site.key").public_key()
    path = site / "site.key.pub"
    path.write_text(f"{public_text(key).strip()} {site.name}\n")
    return path, key_fingerprint(key)


def new_key(site: Path) -> None:
    (site / "site.key").unlink()
    write_request(site)


def private_keys(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.key"))


def test_requests_and_their_answers_register_sites_without_their_private_keys(without_keys, provisioned):
    assert private_keys(without_keys) == ["authority/ca.key", "server/server.key"]
    assert not [*without_keys.rglob("*.pub")]
    assert "ssh-keygen -q -t ecdsa -b" in (without_keys / "hospital-a" / "STEPS.md").read_text()
    site, public = without_keys / "hospital-a", without_keys / "server" / "sites" / "hospital-a.pub"
    path, fingerprint = write_request(site)
    assert (site / "site.key").stat().st_mode & 0o777 == 0o600
    assert fingerprint in answer_request(path, without_keys)[0]
    assert key_fingerprint(read_public(public)) == fingerprint
    assert key_fingerprint(site_key(site / "site.key").public_key()) == fingerprint
    assert f"- hospital-a: {fingerprint}" in (without_keys / "fingerprints.md").read_text()
    assert not (without_keys / "server" / "sites" / "hospital-b.pub").exists()
    # another key for a registered site
    new_key(site)
    with pytest.raises(UserError, match=r"provision revoke hospital-a --output .*/consortium first") as caught:
        answer_request(path, without_keys)
    assert fingerprint in str(caught.value)
    # the same call again, where the site's key never was
    (site / "site.key").unlink()
    provisioned(keys_at_sites=True, sites=THREE)
    assert key_fingerprint(read_public(public)) == fingerprint
    assert private_keys(without_keys) == ["authority/ca.key", "server/server.key"]


def test_a_forged_request_and_one_of_a_stranger_are_refused(without_keys, tmp_path):
    path, _ = write_request(without_keys / "hospital-a")
    for request, told in (
        (path.read_text().replace("hospital-a", "server"), "is a request of server, .* which is no site of"),
        (path.read_text().replace("hospital-a", ""), "is a request of nobody, .* make the key with -C and the site's"),
        (public_text(server_key(tmp_path / "other.key").public_key()), "must hold a key on the curve secp384r1: make "),
        ("nonsense", "is not a public key as ssh-keygen writes it"),
    ):
        (tmp_path / "forged.request").write_text(request)
        with pytest.raises(UserError, match=told):
            answer_request(tmp_path / "forged.request", without_keys)
    (without_keys / "server" / "sites" / "manifest.yaml").write_text("sites: {hospital-b: null}\n")
    with pytest.raises(UserError, match=r"is no site of .*hospital-b.*, or add the site to the consortium's file"):
        answer_request(path, without_keys)
    assert not list((without_keys / "server" / "sites").glob("*.pub"))


def test_a_key_that_is_known_as_another_sites_is_refused(without_keys):
    path, _ = write_request(without_keys / "hospital-a")
    answer_request(path, without_keys)
    path.write_text(path.read_text().replace("hospital-a", "hospital-b"))
    with pytest.raises(UserError, match="is a request of hospital-b with the key of hospital-a"):
        answer_request(path, without_keys)


def test_the_manifest_has_the_sites_in_their_order_with_the_keys_that_count(provisioned, consortium_file):
    """The name of one site is the beginning of another's."""
    folder = provisioned(sites=["site-1", "site"])
    manifest = folder / "server" / "sites" / "manifest.yaml"
    prints = {name: key_fingerprint(read_public(folder / f"server/sites/{name}.pub")) for name in ("site-1", "site")}
    assert list(read_manifest(manifest).sites.items()) == list(prints.items())
    assert read_manifest(manifest).clients == {prints["site-1"]: 0, prints["site"]: 1}
    revoke("site-1", folder)
    assert read_manifest(manifest).sites == {"site": prints["site"], "site-1": None}
    (folder / "server" / "sites" / "site.pub").unlink()
    provisioned(sites=["site-1", "site"])
    assert read_manifest(manifest).clients == {prints["site"]: 1}


def test_a_certificate_that_ends_with_its_authority_is_not_issued_at_each_call(
    provisioned, consortium_file, monkeypatch
):
    monkeypatch.setattr("fedssl.deploy.certificates._AUTHORITY_DAYS", 20)
    folder = provisioned()
    before = everything(folder)
    done = provision(load_consortium(consortium_file()), folder, keys_at_sites=False)
    assert everything(folder) == before
    assert done[0].startswith("authority: its certificate ends on ")


#: what is trusted, and the call that reads it
TRUSTED = {
    **dict.fromkeys(["authority/ca.key", "authority/ca.crt", "server/server.key"], "provision"),
    **dict.fromkeys(["server/server.crt", "server/sites/hospital-a.pub", "../consortium.yaml"], "provision"),
    **{"server/sites/manifest.yaml": "manifest", "server/server.yaml": "server", "hospital-a/site.yaml": "site"},
}
CALLS = {"manifest": read_manifest, "site": load_site, "server": lambda path: load_server(path.parent)}


@pytest.mark.parametrize("mode", [0o666, 0o602])
def test_a_file_that_is_trusted_and_that_others_can_write_is_refused(mode, provisioned, consortium_file):
    folder = provisioned()
    (folder / "server" / "server.key").unlink()  # so that the certificate is read
    for name, call in TRUSTED.items():
        path = folder / name
        if name == "server/server.key":
            server_key(path)
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(UserError, match=rf"other users can change it \(mode {mode:04o}\).* chmod go-w ") as caught:
            CALLS[call](path) if call in CALLS else provision(
                load_consortium(folder / "../consortium.yaml"), folder, False
            )
        assert str(path) in str(caught.value)
        path.chmod(before)


def test_a_revoked_key_is_not_registered_again_and_a_new_one_is(provisioned):
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
        answer_request(path, folder)
    assert not public.exists()
    new_key(site)
    answer_request(path, folder)
    assert key_fingerprint(read_public(public)) != revoked
    for name in ("hospital-c", "../authority/ca"):
        with pytest.raises(UserError, match="sites with a key are hospital-a, hospital-b"):
            revoke(name, folder)


def test_the_commands_print_an_example_what_to_compare_and_what_to_do(tmp_path, fedssl):
    file = str(tmp_path / "consortium.yaml")

    def printed(*arguments: str, expected_code: int = 0) -> str:
        code, out, err = fedssl("provision", *arguments, columns=300)
        assert code == expected_code, err
        return out or err

    Path(file).write_text(printed("--example"))
    out = printed(file, "--output", "made", "--keys-at-sites")
    assert "hospital-a: client 0; its key is made at the site (STEPS.md), then fedssl provision answer" in out
    _, fingerprint = write_request(tmp_path / "made" / "hospital-a")
    assert fingerprint in printed("answer", "made/hospital-a/site.key.pub", "--output", "made")
    revocation = ("revoke", "hospital-a", "--output", "made")
    assert "its key is no longer in made/server/sites" in printed(*revocation)
    assert "sites with a key are none" in printed(*revocation, expected_code=2)
    assert "name the consortium's file" in printed("folders", expected_code=2)
    out = printed(file, "--output", "other")
    assert out.startswith("server: wrote server.crt, valid until ")
    assert re.search(r"^hospital-a: client 0, key SHA256:\S+\nhospital-b: client 1, key SHA256:", out, re.MULTILINE)


# An error for each wrong entry of the consortium's file


SERVER = {"address": "localhost"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "Our Consortium"}, "name"),
        ({"sites": ["a", "b", "a"]}, "each site needs a name of its own, but a occurs more than once"),
        ({"valid_days": 30}, "valid_days"),
        ({"sites": ["server"]}, "a site cannot be named server: that is the name of another folder"),
        ({"sites": ["../b"]}, "sites.0: string should match pattern"),
        ({"sites": ["a-"]}, "sites.0: string should match pattern"),
        ({"server": SERVER | {"port": 0}}, "server.port"),
        ({"server": SERVER | {"port": 8001}}, "port and internal_port must differ"),
        ({"server": SERVER | {"address": "local host; rm"}}, "server.address"),
        ({"site": ["a"]}, "site"),
    ],
)
def test_a_wrong_entry_is_named(changes, expected, consortium_file):
    path = consortium_file(**changes)
    with pytest.raises(UserError) as caught:
        load_consortium(path)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


def test_a_file_that_is_none_or_missing_and_a_folder_that_provision_did_not_write_are_refused(tmp_path):
    path = tmp_path / "consortium.yaml"
    with pytest.raises(UserError, match=r"cannot be read \(.*No such file.*fedssl provision --example prints one"):
        load_consortium(path)
    path.write_text("- hospital-a\n")
    with pytest.raises(UserError, match="must hold the keys name, server, sites, valid_days, got list"):
        load_consortium(path)
    with pytest.raises(UserError, match="name the server's folder, which fedssl provision wrote"):
        load_server(tmp_path)
