"""`fedssl superlink` and `fedssl supernode` refuse to start where something is wrong, and keep their files private."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from fedssl.deploy import apps, nodes
from fedssl.deploy.registered_keys import register_keys
from fedssl.run_folder.creation import alone_in
from tests.fedssl.engines.flower.deployment import (
    MARK,
    free_port,
    is_listening,
    kill_marked,
    marked,
    needs_proc,
    poll,
    with_package,
)

pytestmark = pytest.mark.usefixtures("umask")


@pytest.fixture
def refused(fedssl):
    """Call `fedssl`, which must refuse its arguments and say why in its standard error."""

    def call(told: str, *arguments: str | Path) -> None:
        code, _, err = fedssl(*map(str, arguments))
        assert (code, told in err) == (2, True), err

    return call


@pytest.fixture
def supernode(provisioned, tmp_path) -> Callable[..., int]:
    """Start a SuperNode from a site's file with some keys changed; gives the exit code."""
    site = provisioned() / "hospital-a"

    def start(allowed: Sequence[str] = (), **changes) -> int:
        path = tmp_path / "site.yaml"
        path.write_text(yaml.safe_dump({"state": str(tmp_path / "state")} | changes))
        return nodes.supernode(path, "127.0.0.1:1", site / "ca.crt", site / "site.key", [*allowed])

    return start


@pytest.fixture
def started(monkeypatch) -> list[tuple]:
    """What would be started, in place of Flower's commands, which end as if they were interrupted."""
    calls: list[tuple] = []
    monkeypatch.setattr(nodes, "run", lambda *arguments: calls.append(arguments) or 130)
    return calls


def test_a_superlink_refuses_to_start_without_tls(refused, tmp_path):
    refused("ca.crt cannot be read: No such file or directory", "superlink", tmp_path)


def test_a_database_that_others_can_write_or_that_is_in_use_is_refused(refused, provisioned):
    server = provisioned() / "server"
    with alone_in(server):
        refused("another SuperLink keeps its database in this folder: stop it, or", "superlink", server)
    (server / "superlink.db").touch()
    (server / "superlink.db").chmod(0o602)
    refused("superlink.db cannot be used: other users can change it (mode 0602)", "superlink", server)


def test_a_site_whose_data_are_not_there_is_told_before_anything_starts(started, supernode, capfd):
    assert supernode(data={"name": "npz", "path": "nowhere.npz"}) == 2
    told = capfd.readouterr().err  # a copy of this process loads the data
    assert "nowhere.npz" in told
    assert started == []


@pytest.mark.parametrize("command", ["superlink", "supernode"])
def test_what_the_commands_write_is_for_their_user_alone(
    command, started, supernode, provisioned, tmp_path, monkeypatch
):
    monkeypatch.setattr(nodes, "run", lambda *arguments: (tmp_path / "written").touch() or 130)
    if command == "superlink":
        assert nodes.superlink(provisioned() / "server", free_port()) == 130
    else:
        assert supernode() == 130
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "written").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_supernode_that_ends_by_itself_names_the_key_and_the_clock(code, supernode, monkeypatch, capsys):
    monkeypatch.setattr(nodes, "run", lambda *arguments: code)
    assert supernode() == code
    said = capsys.readouterr().err
    for text in ("the server does not accept this site", "this machine's clock ("):
        assert (text in said) == (code == 0)


@pytest.mark.parametrize(
    "approvals", [{"approved_apps": []}, {"allowed": ["0" * 64]}, {}], ids=["file", "allow", "none"]
)
def test_a_supernode_refuses_other_apps_where_the_file_or_allow_says_so(
    approvals, started, supernode, monkeypatch, capsys
):
    """Then it also has a folder of its own for installed apps, in which no other app can be."""
    replaced = []
    monkeypatch.setattr(apps, "refuse_other_apps", replaced.append)
    supernode(**approvals)
    [(_, _, environment, _)] = started
    told = "every app that the server sends runs at this site" in capsys.readouterr().err
    assert told == (not approvals) == (replaced == [])
    assert Path(environment["FLWR_HOME"]).name.startswith("fedssl-")


# The commands' processes: an app is a copy of one that has imported what it needs, and none outlives the command


#: `main` is the command, and ends when the app has written what it saw; `superexec` fails twice, then starts the app
PROGRAM = """
import json, os, pathlib, sys, threading, time
import httpx
from flwr.supercore.superexec.executor import subprocess_executor
from fedssl.deploy import flower_commands as commands

what, seen, begun = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[2] + " begun")

def main():
    if what == "returns":
        return
    if what == "thread":
        threading.Thread(target=lambda: 1 / 0).start()
    if what == "refused":
        heartbeat = threading.Thread(target=httpx.Response(401, request=httpx.Request("POST", "/")).raise_for_status)
        heartbeat.start()
        heartbeat.join()
        sys.exit(0)  # as Flower does when it interrupts itself
    while what != "work" or not seen.exists():
        time.sleep(0.05)
    assert "wave" not in sys.modules
    sys.exit(7)

def app():
    found = [sys.argv, os.environ["ASKED"], "wave" in sys.modules, os.getppid()]
    seen.with_name("partial").write_text(json.dumps(found))
    seen.with_name("partial").rename(seen)
    time.sleep(600)

def superexec():
    begun.write_text((begun.read_text() if begun.exists() else "") + f"{os.getpid()} ")
    if len(begun.read_text().split()) < 3:
        sys.exit(5)
    assert sys.argv == ["flower-superexec", "--insecure"]
    subprocess_executor.subprocess.Popen(["flwr-serverapp", "--token", "a b"])
    time.sleep(600)

commands._entry_point = lambda name: {"flower-superlink": main, "flwr-serverapp": app}.get(name, superexec)
commands._RESTART_SECONDS = 0.01
sys.exit(commands.run(["flower-superlink"], ["--insecure"], {"ASKED": "yes"}, ["wave"]))
"""


@pytest.fixture
def environment(tmp_path) -> Iterator[dict[str, str]]:
    """Of processes that end with the test."""
    yield with_package() | {MARK: f"{tmp_path}/", "FLWR_HOME": str(tmp_path / "home")}
    kill_marked(f"{tmp_path}/")


@needs_proc
def test_an_app_is_forked_by_what_starts_the_apps_and_that_is_started_again(environment, tmp_path):
    """With its arguments, and the modules that it needs, which the command has not imported."""
    seen = tmp_path / "seen of two words"
    command = [sys.executable, "-c", PROGRAM, "work", str(seen)]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    starters = [int(word) for word in Path(f"{seen} begun").read_text().split()]
    assert json.loads(seen.read_text()) == [["flwr-serverapp", "--token", "a b"], "yes", True, starters[2]]
    assert done.stderr.count("fedssl: flower-superexec has ended with code 5 and is started again") == 2
    poll(lambda: not marked(f"{tmp_path}/"), "no copy is left", seconds=60)


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_told_to_end_or_killed_it_leaves_no_copy(number, environment, tmp_path):
    seen = tmp_path / "seen"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "sleep", str(seen)], env=environment)
    poll(seen.exists, "the app sleeps", seconds=120)
    assert len(marked(f"{tmp_path}/")) == 4  # the command, what starts the starter again, the starter, and the app
    os.kill(process.pid, number)
    assert process.wait(60) == -number
    poll(lambda: not marked(f"{tmp_path}/"), "no copy is left", seconds=60)


@pytest.mark.parametrize(
    ("case", "code", "told"),
    [
        ("thread", 1, "fedssl: flower-superlink ends, because a part of it failed: division by zero"),
        ("returns", 1, "fedssl: flower-superlink ends after the error above; it may be started again"),
        ("refused", 0, ""),  # a heartbeat: the end is Flower's, whose code has the site told why
    ],
)
def test_a_process_that_cannot_go_on_ends_with_a_message(case, code, told, tmp_path):
    """And with a code other than 0, after which systemd starts it again."""
    command = [sys.executable, "-c", PROGRAM, case, str(tmp_path / "seen")]
    done = subprocess.run(command, env=with_package(), capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert told or "401" not in done.stderr


def test_a_copy_whose_parent_ended_before_the_copy_could_ask_for_its_signal_ends_too():
    program = """
import ctypes, os, time
from fedssl.deploy import flower_commands as commands

parent, library = os.getpid(), ctypes.CDLL

def late(name):
    while os.getppid() == parent:
        time.sleep(0.01)
    return library(name)

ctypes.CDLL = late
commands.fork(lambda: time.sleep(600))
"""
    # the copy holds the pipes open while it lives
    subprocess.run([sys.executable, "-c", program], env=with_package(), capture_output=True, timeout=60, check=True)


@needs_proc
def test_a_superlink_and_a_supernode_that_wait_have_imported_no_torch(environment, provisioned, tmp_path):
    """Nor scipy; each of their processes needs little memory. A copy of the second has loaded the site's data."""
    folder, port, log = provisioned(), free_port(), tmp_path / "log"
    (folder / "hospital-a" / "site.yaml").write_text(f"state: {tmp_path}/state\n")
    superlink = ["superlink", str(folder / "server"), "--port", str(port)]
    supernode = ["supernode", "site.yaml", "--superlink", f"127.0.0.1:{port}"]
    supernode += ["--root-certificates", "ca.crt", "--key", "site.key"]

    def start(command: list[str]) -> None:
        command, place = [sys.executable, "-m", "fedssl", *command], folder / "hospital-a"
        with open(log, "ab") as file:
            subprocess.Popen(command, env=environment, cwd=place, stdout=file, stderr=file)

    start(superlink)
    poll(lambda: is_listening(port), "the SuperLink listens")
    register_keys(folder / "server" / "sites", f"127.0.0.1:{port}", folder / "server" / "ca.crt", 60.0)
    start(supernode)
    poll(lambda: "SuperNode ID" in log.read_text(), "the site is connected")
    poll(lambda: log.read_text().count("Starting Flower SuperExec") == 2, "both wait for runs")
    for pid in marked(f"{tmp_path}/"):
        assert not re.findall("libtorch|/scipy/|/sklearn/", Path(f"/proc/{pid}/maps").read_text())
        [kilobytes] = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        assert int(kilobytes) < 300_000
