"""Each example runs, and what it prints means what examples/README.md says."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="not a source tree")


@pytest.fixture
def out(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> str:
    """What the example of the test's name prints."""
    runpy.run_path(str(EXAMPLES / f"{request.node.name.removeprefix('test_')}.py"), run_name="__main__")
    return capsys.readouterr().out


def numbers(pattern: str, text: str) -> list[float]:
    """The groups of the one place where `pattern` is found."""
    found = re.findall(pattern, text)
    assert len(found) == 1, text
    return [float(number) for number in ([found[0]] if isinstance(found[0], str) else found[0])]


def test_simclr(out):
    before, after = numbers(r"([\d.]+)% before, ([\d.]+)% after", out)
    assert before > 50
    assert after > before + 3
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0]


def test_moco(out):
    before, after = numbers(r"([\d.]+)% before, ([\d.]+)% after", out)
    assert 12.5 < before < 75  # of eight classes
    assert after > 90


def test_compare_networks(out):
    same, other = re.findall(r"layer by layer: (.+)", out)
    same, other = ([float(value) for value in line.split(", ")] for line in (same, other))
    assert len(same) == len(other) == 5
    assert min(same) > 0.7
    assert other[-1] < 0.5  # the networks part
    assert other[-1] < other[0] - 0.2  # on the way to the output


def test_align_to_kernel(out):
    steps = [[float(value) for value in step] for step in re.findall(r"CKA ([\d.]+), accuracy .* ([\d.]+)%", out)]
    (teacher,) = numbers(r"teacher: accuracy from 50 labels ([\d.]+)%", out)
    (first_cka, first), (last_cka, last) = steps[0], steps[-1]
    assert last_cka > first_cka + 0.2
    assert last > first + 8
    assert last > teacher - 5


def test_transport(out):
    angle, shift = numbers(r"step 120: .* angle ([\d.]+), shift off by ([\d.]+)", out)
    assert abs(angle - 20) < 0.5
    assert shift < 0.02
    (right,) = numbers(r"(\d+)% of the 80 shared points", out)
    assert right >= 95
    moved, others = numbers(r"shared points ([\d.]+), from the 20 others ([\d.]+)", out)
    assert moved > 75
    assert others < 1


def test_weigh_clients(out):
    (many, one), (weighted_many, weighted_one) = (
        (float(a), float(b)) for a, b in re.findall(r"([\d.]+)% on the digits 0 to 4, ([\d.]+)% on 5 to 9", out)
    )
    assert many > 70
    assert one < 10  # with even weights the client that is unlike the others gets nothing
    assert weighted_many > 50
    assert weighted_one > 40


@pytest.fixture
def fewer_images(monkeypatch):
    from fedssl import load_recipe

    monkeypatch.setattr("fedssl.load_recipe", lambda name, given: load_recipe(name, [*given, "data.train_limit=700"]))


def test_run_a_recipe(fewer_images, out):
    before, after = numbers(r"([\d.]+)% before, ([\d.]+)% after", out)
    assert min(before, after) > 70  # of ten classes
    first, last = (numbers(rf"round {number}: loss ([\d.]+)", out)[0] for number in (1, 2))
    assert last < first
    assert "report: report.html" in out


def test_every_example_is_listed():
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*.py"))}
    listed = re.findall(r"^\| \[(.+?)\]", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == list(texts)
    assert [name for name, text in texts.items() if "fedssl" in text] == ["run_a_recipe.py"]
