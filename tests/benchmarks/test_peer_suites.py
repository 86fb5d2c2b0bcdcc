"""``python -m benchmarks.peer_suites``: what is replaced and counted, on a library of this file's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("benchmarks", reason="the benchmarks are not part of the sdist")

from benchmarks import peer_suites
from benchmarks.peer_suites import Peer

LIBRARY = {
    "library/__init__.py": "from library.losses import Loss, user, value\n",
    "library/losses.py": """\
from torch import nn
class Loss(nn.Module):
    def forward(self, x): return x
def value(x): return x
def user(): return value, Loss
""",
    "ours.py": """\
from torch import nn
class Loss(nn.Module):
    def forward(self, x): return x + 1
def value(x): return x
""",
    "test_library.py": """\
import library, library.losses
import pytest
def test_both_pass(): assert library.value(3) == library.losses.value(3) == 3
@pytest.mark.parametrize("x", [1, 2])
def test_ours_fails(x): assert library.Loss()(x) == library.losses.Loss()(x) == x
def test_both_fail(): assert library.value(1) == 2
""",
}


@pytest.fixture
def suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tests, with the library and a module in the place of fedkernels.compat in it."""
    folder = tmp_path / "suites" / "mine"
    for name, text in LIBRARY.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    refused = {"assert 3 == 2": "ours adds one"}
    peer = Peer("torch", "example.org", ("test_library.py",), "library", ("Loss", "value"), refused=refused)
    monkeypatch.setattr(peer_suites, "PEERS", {"mine": peer})
    monkeypatch.setattr(peer_suites, "replacements", lambda *_: {f"library.{one}": f"ours.{one}" for one in peer.names})
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return tmp_path / "suites"


@pytest.mark.nightly  # two processes of pytest
def test_new_failures_and_calls_are_those_of_the_drop_in(suites: Path, tmp_path: Path) -> None:
    assert peer_suites.main(["--suites", str(suites), "--output", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["mine"]
    assert (result["tests"], result["original"], result["drop_in"]) == (4, 3, 1)
    assert result["calls"] == {"library.Loss": 4, "library.value": 3}
    assert [test.partition("::")[2] for test in result["new"]] == ["test_ours_fails[1]", "test_ours_fails[2]"]
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| mine | not explained: AssertionError: assert 2 == 1 | 1 | `test_ours_fails[1]` |" in page
    assert "| mine | ours adds one | 1 | `test_ours_fails[2]` |" in page


def test_tests_that_never_call_a_drop_in_are_refused(
    suites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_suites, "outcomes", lambda *_: ({"test_library::test": ""}, {"library.Loss": 0}))
    with pytest.raises(SystemExit, match=r"^mine: the tests called none of library\.Loss$"):
        peer_suites.main(["--suites", str(suites), "--output", str(tmp_path)])


def test_missing_tests_are_named_with_their_source(suites: Path, tmp_path: Path) -> None:
    (suites / "mine" / "test_library.py").unlink()
    peer_suites.main(["--suites", str(suites), "--output", str(tmp_path)])
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"- mine: {suites / 'mine'} has no test_library.py: copy them from example.org" in page
