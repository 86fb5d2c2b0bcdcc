"""SuperLink and three SuperNodes on loopback, with TLS and authentication: the same result, and faults survived."""

import csv
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedssl.engines.in_process import LocalClients
from fedssl.engines.observers import Observer
from fedssl.engines.rounds import first_files, run_rounds
from fedssl.federation import build_federation
from fedssl.recipe.recipe import Recipe
from fedssl.reports.cost import estimate, totals
from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.conftest import AVERAGED, METHODS
from tests.fedssl.engines.flower.deployment import (
    MARK,
    PATIENCE,
    Deployment,
    free_port,
    kill_marked,
    make_authority,
    marked,
    needs_proc,
    poll,
    with_package,
)
from tests.fedssl.engines.flower.flower_command import GONE_SECONDS
from tests.fedssl.engines.flower.loop_grid import assert_close

pytestmark = needs_proc


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    """A SuperLink and three sites, which serve all end-to-end tests: starting them takes longer than a run."""
    started = Deployment(tmp_path_factory.mktemp("deployment"))
    try:
        started.start_superlink()
        started.register("site0", "site1", "site2")
        for k in range(3):
            started.start_node(f"site{k}")
        yield started
    finally:
        started.close()


# large layers, so that what Flower adds to each tensor is little beside it
LARGE = METHODS["lw_fedssl"] | {
    "objective": {"name": "moco_v3", "hidden_features": 768, "output_features": 256},
    "architectures": ["small_convnet_wide"],
}
EQUAL = AVERAGED | {"partition": {"name": "iid", "clients": 3}, "rounds": 1}  # as privacy counts the clients
WAITS = {"round_seconds": PATIENCE, "connect_seconds": PATIENCE}


def test_across_machines_the_run_is_the_one_in_this_process_and_its_bytes_are_those_that_were_predicted(
    deployment, finished, noisy
):
    """Bit for bit; bytes by Flower's own count, which has all messages."""
    large = deployment.folder / "large"
    run = deployment.submit(noisy(**LARGE, engine="flower", flower=WAITS), large)
    assert deployment.finish(run) == "finished:completed", deployment.logs()
    traffic = deployment.look(run)["network-traffic"]
    here = finished(noisy(**LARGE))
    last = RunDirectory.open(here).checkpoint.round
    for name in ("metrics.csv", "spectrum.csv", f"checkpoints/server.round-{last:05d}.safetensors"):
        assert (here / name).read_bytes() == (large / name).read_bytes(), name
    cost = totals(estimate(build_federation(noisy(**LARGE))))
    assert traffic["inbound-bytes"] == pytest.approx(cost["bytes_up"], rel=0.03)
    assert traffic["outbound-bytes"] == pytest.approx(cost["bytes_down"], rel=0.03)


@pytest.fixture(scope="module")
def private(deployment, noisy) -> Path:
    """The folder of a run with secure aggregation and clipping."""
    options = {
        "secure_aggregation": {"name": "secagg_plus"},
        "differential_privacy": {"name": "fixed_clipping", "clipping_norm": 1e9, "noise_multiplier": 0},
    }
    output = deployment.folder / "private"
    run = deployment.submit(noisy(**EQUAL, engine="flower", flower=WAITS | options), output)
    assert deployment.finish(run) == "finished:completed", deployment.logs()
    return output


def test_with_secure_aggregation_and_clipping_the_mean_is_the_same(private, finished, noisy):
    """A client's keys outlive its process."""
    assert_close(finished(noisy(**EQUAL)), private, atol=1e-5)


class Dropping(LocalClients):
    """Clients of this process of which some do not answer some rounds."""

    def __init__(self, *arguments, dropped: dict[int, set[int]]):
        super().__init__(*arguments)
        self.dropped = dropped

    def answers(self, number, sent):
        lost = self.dropped.get(number, set())
        replies, _ = super().answers(number, {k: message for k, message in sent.items() if k not in lost})
        return replies, dict.fromkeys(sorted(lost & sent.keys()), "dropped")


def replay(recipe: Recipe, path: Path, dropped: dict[int, set[int]]) -> None:
    federation = build_federation(recipe)
    directory = RunDirectory.create(path, first_files(federation))
    progress = Observer()
    run_rounds(federation, directory, progress, Dropping(federation, directory, progress, dropped=dropped))


def deadline(private: Path) -> int:
    """Seconds for a round, which the hanging site costs in full.

    Twice as long as a round took whose sites were asked four times one after another, where they will be asked once.
    """
    with open(private / "timings.csv") as file:
        return max(20, round(2 * max(float(row["seconds"]) for row in csv.DictReader(file))))


def test_faults(deployment, private, noisy, tmp_path):
    """One run of four rounds, in which everything goes wrong.

    round 1: site 1 sends weights that would spoil the mean, and is refused by name
    round 2: site 1 is killed while it trains, site 2 hangs: both are dropped at the deadline
    round 3: the SuperLink is killed and started again, site 1 too; the run is started again and continues;
        site 2 answers with 2,000 records, which the SuperLink refuses
    round 4: site 2 answers with 300 MiB, of which the server reads no more than it takes
    meanwhile a node with an unknown key and one that trusts another authority try to get in
    """
    seconds = deadline(private)
    print(f"the round's deadline: {seconds} s")
    recipe = noisy(**AVERAGED, rounds=4, engine="flower", flower=WAITS | {"round_seconds": seconds})
    for client, number, fault in ((1, 1, "weights"), (2, 3, "records"), (2, 4, "pieces")):
        deployment.break_round(recipe, client, number, fault)
    faults = [deployment.break_round(recipe, k, 2, "hang") for k in (1, 2)]
    output = deployment.folder / "run"
    first = deployment.submit(recipe, output)
    deployment.wait_for(lambda: not any(file.exists() for file in faults), "sites 1 and 2 hang in round 2")
    deployment.kill("site1")
    killed = time.monotonic()
    make_authority(tmp_path)
    deployment.register("misled")
    deployment.start_node("unknown")
    deployment.start_node("misled", authority=tmp_path / "ca.crt")
    deployment.wait_for(lambda: deployment.committed(output) >= 2, "round 2 is committed without them")
    deployment.kill("superlink")
    assert deployment.committed(output) == 2
    kept = (output / "metrics.csv").read_bytes()[: RunDirectory.open(output).checkpoint.lengths["metrics.csv"]]

    deployment.start_superlink()
    again = deployment.submit(recipe, output)
    # until then it lets nobody in with the killed site's key
    deployment.wait_for(lambda: time.monotonic() > killed + GONE_SECONDS + 2, "Flower takes the site for gone")
    deployment.start_node("site1")
    assert deployment.finish(again) == "finished:completed", deployment.logs()
    assert deployment.look(first)["status"] != "finished:completed"
    assert (output / "metrics.csv").read_bytes().startswith(kept)

    with open(output / "refused.csv") as file:
        lost = {(int(row["round"]), int(row["client"])): row["reason"] for row in csv.DictReader(file)}
    assert list(lost) == [(1, 1), (2, 1), (2, 2), (3, 2), (4, 2)], f"{lost}\n{deployment.logs()}"
    assert " holds, as root mean square, 9e+05, far above the server's and the round's median" in lost[1, 1]
    # whichever comes first: the deadline at the server or the SuperLink, or the time after which Flower takes a
    # silent node for gone
    late = {f"no answer within {seconds} s", "no answer in time"}
    assert lost[2, 1] in late | {"its node is no longer connected"}
    assert lost[2, 2] in late
    assert " pieces, more than 1000, the most that the SuperLink takes" in lost[3, 2]
    assert "its answer is larger than " in lost[4, 2]
    replay(noisy(**AVERAGED, rounds=4), tmp_path / "replayed", {1: {1}, 2: {1, 2}, 3: {2}, 4: {2}})
    state = "checkpoints/server.round-00004.safetensors"
    assert (output / state).read_bytes() == (tmp_path / "replayed" / state).read_bytes()

    for intruder in ("unknown", "misled"):
        deployment.wait_for(lambda name=intruder: deployment.has_ended(name), f"{intruder} has given up")
        log = deployment.log(intruder).read_text(errors="replace")
        assert "SuperNode ID" not in log, log
        assert "Exit Code: 305" in log, log
    assert "CERTIFICATE_VERIFY_FAILED" in deployment.log("misled").read_text(errors="replace")


# docs/deploy.md, from nothing to a run of two sites


PAGE = Path(__file__).parents[4] / "docs" / "deploy.md"
SCRIPTS = sysconfig.get_path("scripts")


def commands() -> list[str]:
    """The indented lines of the section, but for the installation."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith("From nothing to a run of two sites")]
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert lines[0].startswith("pip install")
    return lines[1:]


@pytest.mark.nightly  # what the commands do is tested above
@pytest.mark.skipif(shutil.which("fedssl", path=SCRIPTS) is None, reason="fedssl is not installed: pip install .")
@pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not here")
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
