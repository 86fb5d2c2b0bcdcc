"""``python -m benchmarks.site_faults ROW ...``: what a run of twenty sites says of a fault, and what it loses by it.

From the repository's root, with the extra `flower`. A SuperLink and the sites are processes of this machine, with TLS
and registered keys. For each row they train FedBYOL on scikit-learn's digits for three rounds. The fault is in round 2,
at the last site unless the row says otherwise. Without ROW all rows run; `--sites 3` tries them with fewer sites.

What a run loses is compared with what it names: `refused.csv` lists the answers that do not count, by round, client and
reason. The run is repeated in one process with exactly these answers left out. Where the global model then has the same
bits, the fault has cost nothing else.

The round's deadline follows from the row `none`, which always runs first: twice its longest round.
"""

import argparse
import contextlib
import csv
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.measure import ROOT
from benchmarks.resident_memory import status
from fedssl.guard import TOLD_CAPPED
from fedssl.recipe.reading import load_recipe
from fedssl.recipe.recipe import Recipe
from tests.fedssl.engines.flower.deployment import Deployment, marked, poll
from tests.fedssl.engines.flower.flower_command import GONE_SECONDS
from tests.fedssl.engines.flower.test_deployment import replay

FOLDER = ROOT / "benchmarks" / "results" / "site_faults"
COMMAND = Path(__file__).with_name("site_faults_command.py")
ROUNDS, BROKEN_ROUND = 3, 2
#: a killed site's key is refused until Flower takes the site for gone
KEY_IS_FREE_AFTER = GONE_SECONDS + 2
CUT_SECONDS = 20
#: seconds until a wait is given up; twenty sites share this machine's cores
LONG = 3600.0
IMAGES_OF_A_SITE = 70


@dataclass
class Outcome:
    """One row of the table.

    Attributes:
        row: its name.
        what: the fault.
        sites: how many take part.
        status: the run's, as Flower tells it.
        said: what the run's folder or the site's log says of each answer that does not count.
        lost: how many answers that is, of all.
        nothing_else: whether the global model has the bits of a run in which exactly these answers are missing.
        seconds: of the run.
    """

    row: str
    what: str
    sites: int
    status: str
    said: list[str]
    lost: int
    nothing_else: bool
    seconds: float


class CuttableDeployment(Deployment):
    """A deployment whose sites reach the SuperLink through a proxy, at which their connections can be cut."""

    def __init__(self, folder: Path, patience: float, command: Path):
        super().__init__(folder, patience, command)
        self._connections: set[socket.socket] = set()
        self._listener = _bound(0)
        self.sites_port = self._listener.getsockname()[1]

    def start_superlink(self) -> None:
        super().start_superlink()
        self.open()

    def kill(self, name: str) -> None:
        if name == "superlink":
            self.cut()  # as long as nothing listens behind the proxy, nothing listens before it
        super().kill(name)

    def close(self) -> None:
        super().close()
        self.cut()

    def open(self) -> None:
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        """Refuse connections, and break those that there are, until `open` is called; the port is kept."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._listener = _bound(self.sites_port)
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                outer, _ = listener.accept()
                try:
                    inner = socket.create_connection(("127.0.0.1", self.port))
                except OSError:
                    outer.close()
                    continue
                self._connections.add(outer)
                for pair in ((outer, inner), (inner, outer)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                sink.sendall(data)
        for one in (source, sink):
            self._connections.discard(one)
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _bound(port: int) -> socket.socket:
    """Bound but not listening: the port is kept, and connections to it are refused."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", port))
    return kept


class Trial:
    """One run in which a fault happens."""

    def __init__(self, deployment: CuttableDeployment, sites: int, name: str, deadline: float):
        self.deployment, self.sites, self.last = deployment, sites, sites - 1
        self.output = deployment.folder / f"run-{name}"
        self.recipe = _recipe(sites, {"round_seconds": deadline, "connect_seconds": LONG})
        self.run = ""
        self.said: list[str] = []  # beside the reasons of refused.csv

    def plant(self, fault: str, client: int) -> Path:
        """Let a site break round 2; the file is gone once it does."""
        return self.deployment.break_round(self.recipe, client, BROKEN_ROUND, fault)

    def submit(self) -> None:
        self.run = self.deployment.submit(self.recipe, self.output)

    def wait_until_broken(self, files: list[Path]) -> None:
        self.deployment.wait_for(lambda: not any(file.exists() for file in files), "the fault begins")

    def wait_until_round_2(self) -> None:
        self.deployment.wait_for(lambda: self.deployment.committed(self.output) >= BROKEN_ROUND - 1, "round 2 begins")

    def quote_site(self, pattern: str) -> None:
        """Quote the last line of the last site's log that has a pattern."""
        lines = self.deployment.log(f"site{self.last}").read_text(errors="replace").splitlines()
        self.said += [" ".join(line.split()) for line in lines if re.search(pattern, line)][-1:]


def nothing(trial: Trial) -> None:
    trial.submit()


def answer(fault: str) -> Callable[[Trial], None]:
    """A fault of site_faults_command.py in the last site's answer."""

    def act(trial: Trial) -> None:
        file = trial.plant(fault, trial.last)
        trial.submit()
        trial.wait_until_broken([file])

    return act


def answer_twice(trial: Trial) -> None:
    answer("twice")(trial)
    poll(lambda: "the second answer: " in trial.deployment.log(f"site{trial.last}").read_text(), "it answers twice")
    trial.quote_site("the second answer: ")


def kill_sites(trial: Trial) -> None:
    """An eighth of the sites, at least one, in the middle of their round."""
    clients = range(trial.sites - max(1, trial.sites // 8), trial.sites)
    files = [trial.plant("hang", k) for k in clients]
    trial.submit()
    trial.wait_until_broken(files)
    for k in clients:
        trial.deployment.kill(f"site{k}")


def kill_superlink(trial: Trial) -> None:
    trial.submit()
    trial.wait_until_round_2()
    trial.deployment.kill("superlink")
    trial.said.append(f"flwr run again after it was killed in round {trial.deployment.committed(trial.output) + 1}")
    trial.deployment.start_superlink()
    trial.submit()


def cut_connections(trial: Trial) -> None:
    trial.submit()
    trial.wait_until_round_2()
    trial.deployment.cut()
    time.sleep(CUT_SECONDS)
    trial.deployment.open()


def wrong_clock(trial: Trial) -> None:
    """A site that is started with a clock an hour ahead, and left out of the whole run."""
    name = f"site{trial.last}"
    trial.deployment.kill(name)
    time.sleep(KEY_IS_FREE_AFTER)
    library = trial.deployment.folder / "clock_ahead.so"
    source = Path(__file__).with_name("clock_ahead.cpp")
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    trial.deployment.start_node(f"site{trial.last}", before=("env", f"LD_PRELOAD={library}"))
    poll(lambda: trial.deployment.has_ended(name), "the site with the wrong clock ends")
    trial.quote_site("does not accept")
    trial.recipe = trial.recipe.model_copy(
        update={"flower": trial.recipe.flower.model_copy(update={"connect_seconds": 10.0})}
    )
    trial.submit()


#: by name what happens, and how
ROWS: dict[str, tuple[str, Callable[[Trial], None]]] = {
    "none": ("no fault", nothing),
    "nan": ("an answer of NaN", answer("nan")),
    "1e30": ("an answer whose weights are 1e30", answer("1e30")),
    "900": ("an answer whose weights are 900", answer("900")),
    "flip": ("an answer whose weights have the opposite sign, ten times as large", answer("flip")),
    "zeros": ("an answer whose weights are 0", answer("zeros")),
    "buffers": ("an answer whose running variances and counters are 900,000", answer("buffers")),
    "shape": ("an answer with a tensor of another shape", answer("shape")),
    "500mb": ("an answer of 500 MB", answer("pieces")),
    "twice": ("an answer that is sent twice", answer_twice),
    "late": ("an answer that is sent 5 s after the deadline", answer("late")),
    "disk": ("the site's disk is full when it stores its state", answer("disk")),
    "kill-sites": ("an eighth of the sites is killed and stays away", kill_sites),
    "cut": (f"all sites' connections are cut, and none is possible for {CUT_SECONDS} s", cut_connections),
    "kill-superlink": ("the SuperLink is killed, started again, and the run too", kill_superlink),
    "clock": ("the site's clock is an hour ahead when it starts", wrong_clock),
}


def _recipe(sites: int, waits: dict[str, float]) -> Recipe:
    overrides = [
        f"rounds={ROUNDS}",
        f"partition={{name: iid, clients: {sites}}}",
        f"data.train_limit={IMAGES_OF_A_SITE * sites}",
        "architectures=[small_convnet]",
        "objective.hidden_features=64",
        "objective.output_features=32",
        "training={local_epochs: 1, batch_size: 16}",
        "evaluation={linear: {epochs: 2}}",
        "device=cpu",
        "engine=flower",
        *(f"flower.{name}={value}" for name, value in waits.items()),
    ]
    return load_recipe("fedbyol", overrides)


def measure_row(deployment: CuttableDeployment, sites: int, name: str, deadline: float) -> Outcome:
    """Run one row. Sites that the row before has ended are started again."""
    for k in range(sites):
        if f"site{k}" not in deployment.processes or deployment.has_ended(f"site{k}"):
            deployment.start_node(f"site{k}")
    what, act = ROWS[name]
    trial = Trial(deployment, sites, name, deadline)
    started = time.monotonic()
    act(trial)
    run_status = deployment.finish(trial.run)
    seconds = time.monotonic() - started
    rows = left_out(trial.output)
    dropped: dict[int, set[int]] = {}
    for number, client, _ in rows:
        dropped.setdefault(number, set()).add(client)
    said = trial.said + _grouped(rows)
    same = deployment.committed(trial.output) == ROUNDS and _is_the_run_without(trial, dropped)
    return Outcome(name, what, sites, run_status, said, len(rows), same, round(seconds, 1))


def left_out(output: Path) -> list[tuple[int, int, str]]:
    """Round, client and reason of each answer of a run that does not count at all; there is no file where all count."""
    if not (output / "refused.csv").exists():
        return []
    with open(output / "refused.csv") as file:
        rows = [(int(row["round"]), int(row["client"]), row["reason"]) for row in csv.DictReader(file)]
    return [row for row in rows if not row[2].startswith(TOLD_CAPPED)]


def _is_the_run_without(trial: Trial, dropped: dict[int, set[int]]) -> bool:
    path = trial.deployment.folder / f"replayed-{trial.output.name}"
    replay(trial.recipe.model_copy(update={"engine": "in-process"}), path, dropped)
    state = f"checkpoints/server.round-{ROUNDS:05d}.safetensors"
    return (trial.output / state).read_bytes() == (path / state).read_bytes()


def _grouped(rows: list[tuple[int, int, str]]) -> list[str]:
    """The reasons of a round, each once with its clients."""
    clients: dict[tuple[int, str], list[int]] = {}
    for number, client, reason in rows:
        clients.setdefault((number, reason), []).append(client)
    return [
        f"round {number}: {'client' if len(group) == 1 else 'clients'} {', '.join(map(str, group))}: {reason}"
        for (number, reason), group in clients.items()
    ]


def longest_round(output: Path) -> float:
    """Seconds of a run's longest round."""
    with open(output / "timings.csv") as file:
        return max(float(row["seconds"]) for row in csv.DictReader(file))


def private_memory(deployment: Deployment, name: str) -> int:
    """Bytes that a process and those that it started share with no other process."""
    pages = 0
    for pid in marked(f"{deployment.folder}/{name}/"):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        pages += sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return pages * 2**10


def table(outcomes: list[Outcome]) -> str:
    """The rows as Markdown."""
    lines = [
        "# Faults at sites and server",
        "",
        "Written by `python -m benchmarks.site_faults`, whose first lines say what is done.",
        "",
        "| row | fault | sites | the run | what is said | answers lost | nothing else lost | seconds |",
        "| --- | --- | ---: | --- | --- | ---: | --- | ---: |",
    ]
    lines += [
        f"| `{o.row}` | {o.what} | {o.sites} | {o.status} | {'; '.join(o.said).replace('|', '/') or 'nothing'} | "
        f"{o.lost} of {o.sites * ROUNDS} | {'yes' if o.nothing_else else '**no**'} | {o.seconds:.0f} |"
        for o in outcomes
    ]
    return "\n".join(lines) + "\n"


def write(folder: Path, outcome: Outcome) -> None:
    """Put a row into the folder's results; the other rows stay."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.json"
    rows = json.loads(file.read_text()) if file.exists() else {}
    rows[outcome.row] = asdict(outcome)
    file.write_text(json.dumps({name: rows[name] for name in ROWS if name in rows}, indent=1) + "\n")
    (folder / "README.md").write_text(table([Outcome(**rows[name]) for name in ROWS if name in rows]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.site_faults", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--sites", type=int, default=20, help="that take part (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of README.md and results.json")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"unknown row {unknown[0]}: expected {', '.join(ROWS)}")
    names = [name for name in ROWS if name in (options.rows or ROWS)]
    if "clock" in names and shutil.which("c++") is None:
        parser.error("the row clock needs a C++ compiler (c++): install one, or name the other rows")
    torch.set_num_threads(1)  # as the sites have
    deployment = CuttableDeployment(Path(tempfile.mkdtemp(prefix="site-faults-")), LONG, COMMAND)
    try:
        deployment.start_superlink()
        deployment.register(*(f"site{k}" for k in range(options.sites)))
        deadline = LONG
        for name in dict.fromkeys(["none", *names]):
            outcome = measure_row(deployment, options.sites, name, deadline)
            if name == "none":
                deadline = max(30.0, round(2 * longest_round(deployment.folder / "run-none")))
                memory = private_memory(deployment, "site0") / 2**20
                print(f"deadline: {deadline:g} s; private memory of a site's processes: {memory:.0f} MiB", flush=True)
            print(json.dumps(asdict(outcome)), flush=True)
            write(options.output, outcome)
            _wait_until_keys_are_free(deployment, options.sites)
    finally:
        deployment.close()
        shutil.rmtree(deployment.folder, ignore_errors=True)
    print(f"peak memory of this process: {status('VmHWM') / 2**20:.0f} MiB")
    return 0


def _wait_until_keys_are_free(deployment: Deployment, sites: int) -> None:
    names = [f"site{k}" for k in range(sites)]
    if any(name not in deployment.processes or deployment.has_ended(name) for name in names):
        time.sleep(KEY_IS_FREE_AFTER)


if __name__ == "__main__":
    sys.exit(main())
