"""docs/deploy.md, from nothing to a run of two sites: its commands as they stand, one after another in one shell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
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


@pytest.mark.nightly  # what the commands do is tested in test_deployment.py
def test_every_command_of_the_page_works_as_written(tmp_path):
    """One after another in one shell; `flwr list` is repeated until the run has finished."""
    script, port = ["set -e"], str(free_port())
    for line in commands():
        command = line.replace("8000", port)
        if command.startswith("flwr list"):
            command = f"until {command} > list.txt && grep finished list.txt; do sleep 1; done"
        script.append(command)
    script.append("kill $(jobs -p); wait || true")
    (tmp_path / "home").mkdir()
    home = {"HOME": str(tmp_path / "home"), "FLWR_HOME": str(tmp_path / "home" / ".flwr"), "COLUMNS": "200"}
    path = {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", MARK: f"{tmp_path}/", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            ["bash", "--norc", "-x", "-c", "\n".join(script)],
            cwd=tmp_path,
            env=with_package() | home | path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout
        assert "finished:completed" in " ".join(done.stdout.split()), done.stdout
        [run] = (tmp_path / "runs").iterdir()
        assert RunDirectory.open(run).checkpoint.finished
        assert {row[0] for row in RunDirectory.open(run).read_metrics()} == {0, 1, 2}
        assert (run / "report.html").stat().st_size > 10_000
        assert len(list(tmp_path.glob("state-*/*/client-*"))) >= 2
        poll(lambda: marked(f"{tmp_path}/") == [], "nothing is left")
    finally:
        kill_marked(f"{tmp_path}/")
