"""Commands as forked copies: a copy is the command that was asked for, and none outlives the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fedssl.engines.flower.deployment import MARK, kill_marked, marked, poll, with_package

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")

#: `main` asks for an app; both do what the arguments say
PROGRAM = """
import json, os, socket, subprocess, sys, time
from fedssl.deploy import flower_commands as commands

def main():
    if "unasked" in sys.argv:  # a command that is ended before it has asked
        for request in (b"", b"+", b"+{\\n"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(os.environ["PATH"].split(":")[0] + "/copies")
                connection.sendall(request)
    environment = os.environ | {"ASKED": "yes"}
    asked = subprocess.run(["flwr-serverapp", *sys.argv[1:]], env=environment, cwd="/", capture_output=True)
    print(json.dumps([asked.returncode, asked.stdout.decode(), asked.stderr.decode()]))
    sys.exit(7)

def app():
    if "sleep" in sys.argv:
        print("sleeping", file=open(sys.argv[2], "w"))
        time.sleep(600)
    print("error", file=sys.stderr)
    print(json.dumps([sys.argv, os.environ["ASKED"], os.environ["MAIN"], os.getcwd(), "wave" in sys.modules]))
    sys.exit(3)

commands._entry_point = {"flower-superlink": main, "flwr-serverapp": app}.get
command = ["flower-superlink", *sys.argv[1:]]
sys.exit(commands.run(command, os.environ | {"MAIN": "yes"}, ["wave"]))
"""


def run_program(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, env=with_package(), capture_output=True, text=True, timeout=120)


def test_a_copy_has_the_arguments_environment_folder_output_and_exit_code():
    """A command that is ended before it has asked disturbs no other."""
    done = run_program(PROGRAM, "unasked", "two words")
    assert done.returncode == 7, done.stderr
    code, printed, errors = json.loads(done.stdout)
    assert (code, errors) == (3, "error\n")
    assert json.loads(printed) == [["flwr-serverapp", "unasked", "two words"], "yes", "yes", "/", True]


AGAIN = """
import os, pathlib, subprocess, sys
from fedssl.deploy import flower_commands as commands

def main():
    sys.exit(subprocess.run(["flower-superexec", *sys.argv[1:]]).returncode)

def superexec():
    begun = pathlib.Path(sys.argv[1])
    begun.write_text(begun.read_text() + "x" if begun.exists() else "x")
    sys.exit(0 if len(begun.read_text()) == 3 else 5)

commands._entry_point = {"flower-superlink": main, "flower-superexec": superexec}.get
commands._RESTART_SECONDS = 0.01
sys.exit(commands.run(["flower-superlink", *sys.argv[1:]], dict(os.environ), []))
"""


def test_what_starts_the_runs_is_started_again_where_it_fails(tmp_path):
    done = run_program(AGAIN, str(tmp_path / "begun"))
    assert (done.returncode, (tmp_path / "begun").read_text()) == (0, "xxx"), done.stderr
    assert done.stderr.count("fedssl: flower-superexec has ended with code 5 and is started again") == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 130), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_told_to_end_or_killed_it_leaves_no_copy(number, code, tmp_path):
    begun = tmp_path / "begun"
    environment = with_package() | {MARK: f"{tmp_path}/"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "sleep", str(begun)], env=environment)
    try:
        poll(begun.exists, "the app sleeps", seconds=120)
        assert len(marked(f"{tmp_path}/")) == 4  # this process, the command, the one that asked, and the app
        os.kill(process.pid, number)
        assert process.wait(60) == code
        poll(lambda: not marked(f"{tmp_path}/"), "no copy is left", seconds=60)
    finally:
        kill_marked(f"{tmp_path}/")
