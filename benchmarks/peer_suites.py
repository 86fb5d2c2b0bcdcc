"""``python -m benchmarks.peer_suites --suites FOLDER``: other libraries' own tests against ``fedkernels.compat``.

The tests are not part of this repository: copy them from the library's repository into FOLDER/NAME, as `PEERS` names
them. They run twice. First as they are; then with the drop-ins in place of the originals, under the name that users
import and in the module that defines it. The rest of the library keeps the original, as it does for whoever changes one
import. A failure is new if the test passes with the original. The calls of the drop-ins are counted, and a library
whose tests call none ends the command: its successes would be the original's.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import fedkernels
from benchmarks.measure import ROOT
from benchmarks.write import replace, table

FOLDER = ROOT / "benchmarks" / "results" / "peer_suites"
_REPLACED, _CALLS = "FEDKERNELS_REPLACED_NAMES", "FEDKERNELS_CALLS_FILE"


@dataclass(frozen=True)
class Peer:
    """A library: where its tests come from, what of them is run, and the names with a drop-in.

    `names` are those of `module`, which are replaced by those of ``fedkernels.compat.NAME``. `changed` says what of the
    tests had to be changed for the release. `refused` are the failures that stay, as parts of "TEST: ERROR", with why.
    """

    distribution: str
    repository: str
    tests: tuple[str, ...]
    module: str
    names: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    changed: str = ""
    refused: dict[str, str] = field(default_factory=dict)


_RANKING = ("MultipleNegativesRankingLoss", "MultipleNegativesSymmetricRankingLoss")
PEERS = {
    "lightly": Peer(
        "lightly",
        "github.com/lightly-ai/lightly",
        ("tests/loss/test_ntx_ent_loss.py",),
        "lightly.loss",
        ("NTXentLoss",),
        changed="a memory bank's size is (rows, dimension), which release 1.6.0 asks for; two misspelt variables",
        refused={"got -1.0": "a temperature must be positive: a negative one pushes the views apart"},
    ),
    "open_clip": Peer(
        "open_clip_torch",
        "github.com/mlfoundations/open_clip, also in the source distribution",
        ("tests/test_training_simple.py",),
        "open_clip.factory",
        ("ClipLoss", "SigLipLoss"),
        {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        "the networks have fewer and narrower layers; the one that loads weights from a hub fails in both runs",
    ),
    "pytorch_metric_learning": Peer(
        "pytorch-metric-learning",
        "github.com/KevinMusgrave/pytorch-metric-learning",
        tuple(f"tests/losses/test_{name}.py" for name in ("ntxent_loss", "supcon_loss"))
        + tuple(f"tests/losses/test_{name}.py" for name in ("cross_batch_memory", "self_supervised_loss")),
        "pytorch_metric_learning.losses",
        ("NTXentLoss", "SupConLoss"),
        {"TEST_DEVICE": "cpu", "TEST_DTYPES": "float16,float32"},
        "of the memory's tests only those with NTXentLoss, two iterations each, with release 2.9.0's enqueue_mask; "
        "SelfSupervisedLoss with symmetric=False; get_pair_embeddings_with_ref, which is not stored, is written anew",
        {"got LpDistance": "the distance is the cosine; each of these tests tries LpDistance too"},
    ),
    "torchjd": Peer(
        "torchjd",
        "github.com/TorchJD/torchjd",
        ("tests/unit/aggregation/test_mgda.py", "tests/unit/aggregation/test_values.py"),
        "torchjd.aggregation",
        ("MGDA", "MGDAWeighting"),
        changed="of the values only those of aggregators that need no further package",
    ),
    "pot": Peer(
        "POT",
        "github.com/PythonOT/POT",
        ("test/unbalanced/test_mm.py",),
        "ot.unbalanced",
        ("mm_unbalanced", "mm_unbalanced2"),
        refused={
            "div='kl'": "only the half-squared divergence is solved",
            "without regularisation": "only the problem without regularisation is solved",
            "test_mm_convergence": "the test wants the plan of balanced transport, from which POT starts and does not "
            "move; the drop-in's plan has a lower total cost, and differs by 5e-5 at these prices",
        },
    ),
    "sentence_transformers": Peer(
        "sentence-transformers",
        "github.com/huggingface/sentence-transformers",
        ("tests/sentence_transformer/losses",),
        "sentence_transformers.sentence_transformer.losses",
        (*_RANKING, *(f"Cached{name}" for name in _RANKING)),
        {"HF_HUB_OFFLINE": "1"},
        "the models are small ones with random weights, made by a conftest.py, as none can be downloaded; "
        "without the tests of the mini-batches' own helpers",
        {
            "hardness_mode must be": "hardness weights are not supported; one of these tests also passes a "
            "functools.partial as the similarity, one replaces the gather of the original's module",
            "directions must be": "pairs within queries or within documents are not supported",
            "attribute 'loss'": "there is no inner loss that could be assigned to",
            "attribute 'embed_minibatch'": "the tests watch a method of the original's; ours has none of that name",
            "requires reduced-precision": "the loss is float32 under autocast, where the original's is bfloat16",
            "Regex pattern did not match": "it is a ValueError too, in other words",
        },
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    """Put the drop-ins in place. pytest calls this in the second run, where this module is a plugin."""
    replaced = json.loads(os.environ[_REPLACED])
    calls = dict.fromkeys(replaced, 0)
    for path, drop_in in replaced.items():
        _replace(path, drop_in, calls)
    config.add_cleanup(functools.partial(_write, Path(os.environ[_CALLS]), calls))


def _replace(path: str, drop_in: str, calls: dict[str, int]) -> None:
    (module, name), (ours, our_name) = (full.rsplit(".", 1) for full in (path, drop_in))
    counted = _counted(getattr(import_module(ours), our_name), path, calls)
    for holder in (module, getattr(import_module(module), name).__module__):
        setattr(import_module(holder), name, counted)


def _counted(drop_in: Any, path: str, calls: dict[str, int]) -> Any:
    """A function that counts; a class stays itself, and torch tells of each forward pass."""
    if isinstance(drop_in, type):

        def count(module: nn.Module, inputs: Any) -> None:
            calls[path] += type(module) is drop_in

        register_module_forward_pre_hook(count)
        return drop_in

    @functools.wraps(drop_in)
    def counting(*arguments: Any, **options: Any) -> Any:
        calls[path] += 1
        return drop_in(*arguments, **options)

    return counting


def _write(path: Path, calls: dict[str, int]) -> None:
    path.write_text(json.dumps(calls), encoding="utf-8")


def replacements(name: str, peer: Peer) -> dict[str, str]:
    """Full names of the library with those of their drop-ins, of which fedkernels may lack some."""
    module = import_module(f"fedkernels.compat.{name}")
    return {f"{peer.module}.{one}": f"{module.__name__}.{one}" for one in peer.names if hasattr(module, one)}


def outcomes(folder: Path, peer: Peer, replaced: dict[str, str]) -> tuple[dict[str, str], dict[str, int]]:
    """Run the tests once. -> the first line of each test's error, "" where it passed; calls of each replaced name."""
    with tempfile.TemporaryDirectory() as temporary:
        report, calls = Path(temporary) / "report.xml", Path(temporary) / "calls.json"
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {**os.environ, **peer.environment, "PYTHONPATH": path}
        variables |= {_REPLACED: json.dumps(replaced), _CALLS: str(calls)}
        plugin = ["-p", "benchmarks.peer_suites"] if replaced else []
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}", *plugin]
        command = [sys.executable, "-m", "pytest", *options, *peer.tests]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(f"{' '.join(command)} in {folder}:\n{done.stdout}{done.stderr}")
        counts = json.loads(calls.read_text(encoding="utf-8")) if replaced else {}
        return {_name(case): _error(case) for case in ElementTree.parse(report).iter("testcase")}, counts


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '')}::{case.get('name', '')}"


def _error(case: ElementTree.Element) -> str:
    problem = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
    if problem is None:
        return "skipped" if case.find("skipped") is not None else ""
    return (problem.get("message") or problem.text or "no message").strip().splitlines()[0]


def compare(name: str, peer: Peer, folder: Path) -> dict[str, Any]:
    """Both runs of a library's tests: versions, counts, calls, and the new failures with their errors."""
    original, _ = outcomes(folder, peer, {})
    drop_in, calls = outcomes(folder, peer, replacements(name, peer))
    if not any(calls.values()):
        raise SystemExit(f"{name}: the tests called none of {', '.join(calls)}")
    passed = [test for test, error in original.items() if not error]
    new = {test: drop_in.get(test, "did not run") for test in passed if drop_in.get(test, "did not run")}
    return {
        "version": version(peer.distribution),
        "tests": len(original),
        "original": len(passed),
        "drop_in": sum(not error for error in drop_in.values()),
        "calls": calls,
        "new": new,
    }


def page(results: dict[str, dict[str, Any]], missing: dict[str, str]) -> str:
    """What was counted, as Markdown: a row for each library, and one for each reason or error of the new failures."""
    rows, failures = [], []
    for name, result in results.items():
        calls = ", ".join(f"{path.rpartition('.')[2]} {count:,}" for path, count in result["calls"].items())
        passed = (str(result[key]) for key in ("tests", "original", "drop_in"))
        rows.append([name, result["version"], *passed, str(len(result["new"])), calls])
        causes: dict[str, list[str]] = {}
        for test, error in result["new"].items():
            why = next((why for part, why in PEERS[name].refused.items() if part in f"{test}: {error}"), "")
            causes.setdefault(why or f"not explained: {error}", []).append(test)
        for cause, tests in causes.items():
            failures.append([name, cause, str(len(tests)), f"`{tests[0].partition('::')[2]}`"])
    parts = [
        "# Other libraries' tests against the drop-ins",
        "Written by `python -m benchmarks.peer_suites --suites FOLDER`; its first lines say what is run. fedkernels "
        f"{fedkernels.__version__}.",
        table(["library", "version", "tests", "pass with the original", "with the drop-in", "new", "calls"], rows),
    ]
    changed = [f"- {name}: {PEERS[name].changed}." for name in results if PEERS[name].changed]
    if changed:
        parts += ["What was changed of the tests:\n\n" + "\n".join(changed)]
    if failures:
        parts += ["## New failures", table(["library", "why they fail", "tests", "one of them"], failures)]
    if missing:
        parts += ["## Not run", "\n".join(f"- {name}: {why}" for name, why in missing.items())]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_suites", description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--suites", type=Path, required=True, help="folder with a folder of tests for each library")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of README.md and results.json")
    options = parser.parse_args(arguments)
    unknown = set(options.peers) - set(PEERS)
    if unknown:
        parser.error(f"NAME must be of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}")
    file, asked, missing = options.output / "results.json", options.peers or list(PEERS), {}
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    results = {name: result for name, result in results.items() if name not in asked}
    for name in asked:
        peer, folder = PEERS[name], options.suites / name
        absent = [test for test in peer.tests if not (folder / test).exists()]
        try:
            version(peer.distribution)
        except PackageNotFoundError:
            missing[name] = f"{peer.distribution} is not installed"
        else:
            if absent:
                missing[name] = f"{folder} has no {', '.join(absent)}: copy them from {peer.repository}"
            else:
                results[name] = compare(name, peer, folder.resolve())
    results = {name: results[name] for name in PEERS if name in results}
    text = page(results, missing)
    options.output.mkdir(parents=True, exist_ok=True)
    replace(file, json.dumps(results, indent=1) + "\n")
    replace(options.output / "README.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
