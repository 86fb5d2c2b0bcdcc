"""`fedssl run --observer FILE`."""

from __future__ import annotations

from pathlib import Path

from fedssl.run_folder.directory import RunDirectory
from tests.fedssl.cli.test_attacks import one_line, recipe_text

LOGGER = """
from pathlib import Path

from fedssl import Observer


class Logger(Observer):
    def run_began(self, recipe, path, first_round):
        self.log = open(Path(__file__).with_suffix(".log"), "a")
        self.log.write(f"began {first_round}\\n")

    def round_ended(self, number, rows):
        self.log.write("".join(f"{row}\\n" for row in rows))
        if number == STOP_AFTER:
            raise KeyboardInterrupt

    def run_ended(self, finished):
        self.log.write(f"ended {finished}\\n")
        self.log.close()
"""


def test_observers_are_called_by_a_run_and_its_continuation(fedssl, tmp_path):
    (tmp_path / "tiny.yaml").write_text(recipe_text())
    (tmp_path / "stops.py").write_text(f"STOP_AFTER = 1\n{LOGGER}")
    (tmp_path / "goes_on.py").write_text(f"STOP_AFTER = None\n{LOGGER}")
    both = ["--observer", "./goes_on.py", "--observer", "./stops.py"]
    code, out, _ = fedssl("run", "tiny.yaml", "rounds=2", "--output", "run", *both)
    assert code == 130
    assert "continue with: fedssl run --resume run" in out
    assert fedssl("run", "--resume", "run", "--observer", "goes_on.py")[0] == 0
    rows = RunDirectory.open(Path("run")).read_metrics()
    before, after = ([f"{row}" for row in rows if (row[0] <= 1) == first] for first in (True, False))
    assert Path("stops.log").read_text().splitlines() == ["began 0", *before, "ended False"]
    assert Path("goes_on.log").read_text().splitlines() == [
        *("began 0", *before, "ended False"),
        *("began 2", *after, "ended True"),
    ]


def test_a_missing_observer_is_one_line_and_nothing_runs(fedssl, tmp_path):
    (tmp_path / "tiny.yaml").write_text(recipe_text())
    code, _, err = fedssl("run", "tiny.yaml", "--output", "run", "--observer", "./nothing.py")
    one_line(code, err)
    assert "an observer is an existing .py file with one subclass of fedssl.Observer, got nothing.py" in err
    assert not (tmp_path / "run").exists()
