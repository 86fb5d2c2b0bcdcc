"""`fedssl superlink` and `fedssl supernode` refuse to start where something is wrong, and keep their files private."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from fedssl.deploy import apps, nodes
from fedssl.run_folder.creation import alone_in
from tests.fedssl.engines.flower.deployment import (
    MARK,
    free_port,
    kill_marked,
    make_authority,
    marked,
    missing_tools,
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
def supernode(tmp_path) -> Callable[..., int]:
    """Start a SuperNode without TLS from a site's file with some keys changed; gives the exit code."""

    def start(allowed: Sequence[str] = (), **changes) -> int:
        path = tmp_path / "site.yaml"
        path.write_text(yaml.safe_dump({"client": 0, "state": str(tmp_path / "state")} | changes))
        return nodes.supernode(path, "127.0.0.1:1", None, None, insecure=True, allowed_apps=[*allowed])

    return start


@pytest.fixture
def started(monkeypatch) -> list[tuple]:
    """What would be started, in place of Flower's commands, which end as if they were interrupted."""
    calls: list[tuple] = []
    monkeypatch.setattr(nodes, "run", lambda *arguments: calls.append(arguments) or 130)
    return calls


def test_the_commands_refuse_to_start_without_tls(refused, tmp_path):
    (tmp_path / "site.yaml").write_text("client: 0\nstate: state\n")
    refused("ca.crt does not exist: TLS needs it", "superlink", tmp_path)
    to_superlink = ("--superlink", "127.0.0.1:1")
    refused("give --root-certificates and --key, or --insecure", "supernode", tmp_path / "site.yaml", *to_superlink)
    insecure = ("superlink", tmp_path, "--insecure", "--reverse-proxy", "8001")
    refused("--reverse-proxy needs TLS: leave out --insecure or --reverse-proxy", *insecure)


@pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
def test_a_certificate_that_flowers_own_processes_would_not_trust_is_refused(refused, tmp_path):
    make_authority(tmp_path, names="DNS:fed.example.org,IP:10.0.0.1")
    told = "server.crt is valid for 10.0.0.1, fed.example.org, but not for 127.0.0.1"
    refused(told, "superlink", tmp_path)
    (tmp_path / "superlink.db").touch()
    (tmp_path / "superlink.db").chmod(0o602)
    refused("superlink.db cannot be used: other users can change it (mode 0602)", "superlink", tmp_path)


def test_a_site_whose_data_are_not_there_is_told_before_anything_starts(started, supernode, capfd):
    assert supernode(data={"name": "npz", "path": "nowhere.npz"}) == 2
    told = capfd.readouterr().err  # a copy of this process loads the data
    assert "fedssl: warning: insecure: without TLS" in told
    assert "nowhere.npz" in told
    assert started == []


def test_a_port_that_is_taken_and_a_folder_that_is_in_use_are_told(refused, tmp_path):
    insecure = ("superlink", tmp_path, "--insecure")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused(f"port {port} of 127.0.0.1 is in use, perhaps by another SuperLink", *insecure, "--port", port)
    with alone_in(tmp_path):
        refused("another SuperLink keeps its database in this folder: stop it, or", *insecure, "--port", port)


@pytest.mark.parametrize("command", ["superlink", "supernode"])
def test_what_the_commands_write_is_for_their_user_alone(command, started, supernode, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "run", lambda *arguments: (tmp_path / "written").touch() or 130)
    if command == "superlink":
        assert nodes.superlink(tmp_path, free_port(), insecure=True) == 130
    else:
        assert supernode() == 130
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "written").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (1, 1), (130, 130)])
def test_a_supernode_that_ends_by_itself_names_the_key_and_the_clock(
    code, expected, started, supernode, monkeypatch, capsys
):
    monkeypatch.setattr(nodes, "run", lambda *arguments: code)
    assert supernode() == expected
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
    [(_, environment, _, *prepare)] = started
    told = "every app that the server sends runs at this site" in capsys.readouterr().err
    assert told == (not approvals) == (prepare == [])
    if prepare:
        assert Path(environment["FLWR_HOME"]).name.startswith(".fedssl-")
        prepare[0]()
        assert len(replaced) == 1


# The commands' processes: a forked copy is the command that was asked for, and none outlives the process


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")

#: `main` asks for an app, and then for what starts the runs; all do what the arguments say
PROGRAM = """
import json, os, pathlib, socket, subprocess, sys, time
from fedssl.deploy import flower_commands as commands

def main():
    for request in (b"", b"+", b"+{\\n"):  # commands that are ended before they have asked
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ["PATH"].split(":")[0] + "/copies")
            connection.sendall(request)
    environment = os.environ | {"ASKED": "yes"}
    ask = lambda: subprocess.run(["flwr-serverapp", *sys.argv[1:]], env=environment, cwd="/", capture_output=True)
    first = ask()
    time.sleep(2.5)
    asked = ask()  # by another app host: the first one has ended
    assert json.loads(first.stdout)[:-1] == json.loads(asked.stdout)[:-1], (first, asked)
    assert json.loads(first.stdout)[-1] != json.loads(asked.stdout)[-1]
    assert "wave" not in sys.modules
    started = subprocess.run(["flower-superexec", *sys.argv[1:]])
    print(json.dumps([asked.returncode, asked.stdout.decode(), asked.stderr.decode(), started.returncode]))
    sys.exit(7)

def app():
    if "sleep" in sys.argv:
        print("sleeping", file=open(sys.argv[2], "w"))
        time.sleep(600)
    print("error", file=sys.stderr)
    seen = [os.environ["ASKED"], os.environ["MAIN"], os.getcwd(), "wave" in sys.modules, os.getppid()]
    print(json.dumps([sys.argv, *seen]))
    sys.exit(3)

def superexec():  # fails twice
    begun = pathlib.Path(sys.argv[2])
    begun.write_text(begun.read_text() + "x" if begun.exists() else "x")
    sys.exit(0 if len(begun.read_text()) == 3 else 5)

commands._entry_point = {"flower-superlink": main, "flwr-serverapp": app, "flower-superexec": superexec}.get
commands._RESTART_SECONDS, commands._IDLE_SECONDS = 0.01, 1.0
command = ["flower-superlink", *sys.argv[1:]]
sys.exit(commands.run(command, os.environ | {"MAIN": "yes"}, ["wave"]))
"""


@needs_proc
def test_a_copy_is_the_command_that_was_asked_for_and_what_starts_the_runs_is_started_again(tmp_path):
    """With its arguments, environment, folder, output and exit code; a command that never asks disturbs no other."""
    begun = str(tmp_path / "begun of two words")
    command = [sys.executable, "-c", PROGRAM, "work", begun]
    done = subprocess.run(command, env=with_package(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    code, printed, errors, started = json.loads(done.stdout)
    assert (code, errors) == (3, "error\n")
    assert json.loads(printed)[:-1] == [["flwr-serverapp", "work", begun], "yes", "yes", "/", True]
    assert (started, Path(begun).read_text()) == (0, "xxx")
    assert done.stderr.count("fedssl: flower-superexec has ended with code 5 and is started again") == 2


@needs_proc
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_told_to_end_or_killed_it_leaves_no_copy(number, code, tmp_path):
    begun = tmp_path / "begun"
    environment = with_package() | {MARK: f"{tmp_path}/"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "sleep", str(begun)], env=environment)
    try:
        poll(begun.exists, "the app sleeps", seconds=120)
        assert (
            len(marked(f"{tmp_path}/")) == 5
        )  # this process, the command, the one that asked, the app host, and the app
        os.kill(process.pid, number)
        assert process.wait(60) == code
        poll(lambda: not marked(f"{tmp_path}/"), "no copy is left", seconds=60)
    finally:
        kill_marked(f"{tmp_path}/")


@needs_proc
def test_a_superlink_and_a_supernode_that_wait_have_imported_no_torch(tmp_path):
    """Nor scipy; each of their processes needs little memory. A copy of them had loaded the site's data."""
    (tmp_path / "site.yaml").write_text(f"client: 0\nstate: {tmp_path}/state\n")
    port, log = free_port(), tmp_path / "log"
    environment = with_package() | {MARK: f"{tmp_path}/", "FLWR_HOME": str(tmp_path / "home")}
    superlink = ["superlink", str(tmp_path), "--insecure", "--port", str(port)]
    supernode = ["supernode", str(tmp_path / "site.yaml"), "--insecure", "--superlink", f"127.0.0.1:{port}"]
    try:
        with open(log, "wb") as file:
            for command in (superlink, supernode):
                subprocess.Popen([sys.executable, "-m", "fedssl", *command], env=environment, stdout=file, stderr=file)
        poll(lambda: "SuperNode ID" in log.read_text(), "the site is connected")
        poll(lambda: log.read_text().count("Starting Flower SuperExec") == 2, "both wait for runs")
        for pid in marked(f"{tmp_path}/"):
            assert not re.findall("libtorch|/scipy/|/sklearn/", Path(f"/proc/{pid}/maps").read_text())
            [kilobytes] = re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
            assert int(kilobytes) < 300_000
    finally:
        kill_marked(f"{tmp_path}/")
