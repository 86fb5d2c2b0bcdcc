"""docs/deploy.md, from nothing to a run of two sites: its commands as they stand, one after another in one shell."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sysconfig
import threading
from pathlib import Path

import pytest

from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.engines.flower.deployment import (
    MARK,
    PATIENCE,
    free_port,
    kill_marked,
    marked,
    missing_tools,
    poll,
    run_flwr,
    with_package,
)

PAGE = Path(__file__).parents[4] / "docs" / "deploy.md"
SCRIPTS = sysconfig.get_path("scripts")

pytestmark = [
    pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools())),
    pytest.mark.skipif(shutil.which("fedssl", path=SCRIPTS) is None, reason="fedssl is not installed: pip install ."),
    pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not here"),
]


def commands() -> list[str]:
    """The indented lines of the section, but for the installation."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith("From nothing to a run of two sites")]
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert lines[0].startswith("pip install")
    return lines[1:]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Shell:
    """One bash that is given commands one at a time."""

    def __init__(self, folder: Path):
        home = folder / "home"
        home.mkdir()
        self.mark = f"{folder}/"
        path = {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", MARK: self.mark}
        settings = {"HOME": str(home), "FLWR_HOME": str(home / ".flwr"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env=with_package() | settings | path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command: str) -> str:
        """What a command prints; AssertionError where it fails, or takes very long."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        watch = threading.Timer(PATIENCE, kill_marked, [self.mark])
        watch.start()
        try:
            self.process.stdin.write(f'{command}\necho "ended with $?"\n')
            self.process.stdin.flush()
            printed = ""
            for line in self.process.stdout:
                code = re.search(r"ended with (\d+)$", line)
                if code:
                    assert code[1] == "0", f"{command}: code {code[1]}\n{printed}"
                    return printed
                printed += line
            raise AssertionError(f"{command}: the shell ended\n{printed}")
        finally:
            watch.cancel()

    def close(self) -> None:
        kill_marked(self.mark)
        self.process.wait()


@pytest.mark.nightly  # what the commands do is tested in test_deployment.py
def test_every_command_of_the_page_works_as_written(tmp_path):
    port = 8000 if is_free(8000) else free_port()
    shell = Shell(tmp_path)
    try:
        printed = {}
        for line in commands():
            command = line.replace("8000", str(port))
            if command.startswith("flwr list"):
                poll(lambda: finished(tmp_path), "flwr list says that the run has finished", pause=1.0)
            printed[line] = shell.run(command)
        assert "finished:completed" in " ".join(printed["flwr list consortium"].split())
        [run] = (tmp_path / "runs").iterdir()
        assert RunDirectory.open(run).checkpoint.finished
        assert {row[0] for row in RunDirectory.open(run).read_metrics()} == {0, 1, 2}
        assert (run / "report.html").stat().st_size > 10_000
        assert len(list(tmp_path.glob("state-*/*/client-*"))) >= 2
        shell.run("kill $(jobs -p)")
        shell.run("wait; true")
        poll(lambda: marked(shell.mark) == [shell.process.pid], "nothing but the shell is left")
    finally:
        shell.close()


def finished(folder: Path) -> bool:
    text, trouble = run_flwr(folder / "home" / ".flwr", "list", "consortium", "--format=json")
    assert '"status"' in text, (text, trouble)
    assert "finished:failed" not in text, (folder / "superlink.log").read_text(errors="replace")[-5000:]
    return "finished:completed" in text
