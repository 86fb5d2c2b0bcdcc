"""Runs compilers through ninja, which repeats a step only where its command or a file that it reads has changed."""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

_RULES = """\
ninja_required_version = 1.5
builddir = {folder}

rule compile
  command = $command
  description = $description
  depfile = $out.d
  deps = gcc

rule link
  command = $command
  description = $description
"""


@dataclass(frozen=True)
class Step:
    """One command and the file that it writes.

    A "compile" step writes the headers that it reads to ``output`` + ".d", as gcc does by -MMD.
    """

    name: str  # "compile" or "link"
    output: Path
    inputs: tuple[Path, ...]
    command: tuple[str, ...]
    depends: tuple[Path, ...] = ()  # files that the command does not name and that change its result


class StepError(RuntimeError):
    """A step that failed, with the first line of the compiler's output that names an error."""

    def __init__(self, step: Step, first_error: str) -> None:
        super().__init__(f"{Path(step.command[0]).name} failed on {step.inputs[0]}: {first_error}")
        self.step = step


def find_ninja() -> str:
    """Path of ninja: of this Python's package, in PATH, or beside a package that `pip install --target` installed.

    Raises RuntimeError where there is none.
    """
    folders = [sysconfig.get_path("scripts"), *os.get_exec_path()]
    package = find_spec("ninja")
    if package and package.origin:
        folders.append(str(Path(package.origin).parents[1] / "bin"))
    ninja = shutil.which("ninja", path=os.pathsep.join(folders))
    if ninja is None:
        raise RuntimeError("ninja was not found; install it with `pip install ninja`")
    return ninja


def write_if_changed(path: Path, text: str) -> Path:
    """Writes `text`; a file that already holds it keeps its time, so that steps that depend on it are not repeated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path


def run(steps: Sequence[Step], folder: Path, jobs: int) -> None:
    """Writes build.ninja into `folder` and brings the outputs of all steps up to date, `jobs` steps at a time.

    Raises StepError for the first step that fails, and RuntimeError where ninja is missing or fails itself.
    """
    ninja = find_ninja()
    text = _RULES.format(folder=_escape_path(folder)) + "".join(map(_build_statement, steps))
    file = write_if_changed(folder / "build.ninja", text)
    command = [ninja, "-f", str(file), "-j", str(jobs)]
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if process.returncode:
        raise _error(steps, lines)


def _build_statement(step: Step) -> str:
    inputs = " ".join(map(_escape_path, step.inputs))
    depends = "".join(f" {_escape_path(path)}" for path in step.depends)
    command = shlex.join(step.command).replace("$", "$$")
    return f"""
build {_escape_path(step.output)}: {step.name} {inputs}{" |" if depends else ""}{depends}
  command = {command}
  description = {step.name} {str(step.output).replace("$", "$$")}
"""


def _escape_path(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def _error(steps: Sequence[Step], lines: list[str]) -> RuntimeError:
    """The first failure that ninja reports: a line with the output, one with the command, then the command's output."""
    for number, line in enumerate(lines):
        for step in steps:
            if line.startswith("FAILED: ") and line.endswith(f" {step.output}"):
                output = []
                for text in lines[number + 2 :]:
                    if re.match(r"\[\d+/\d+\] |ninja: |FAILED: ", text):
                        break
                    output.append(text)
                first = next((text for text in output if "error" in text or "fatal" in text), (output or [""])[0])
                return StepError(step, first or "it gave no message")
    return RuntimeError(f"ninja failed: {(lines or ['it gave no message'])[-1]}")
