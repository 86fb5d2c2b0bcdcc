"""Writes what was measured: results.json, results.md beside it, and the table in the README."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import fedkernels
from benchmarks.measure import ROOT

README = ROOT / "README.md"
START, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"

_HEAD = """# Operators against their peers

Written by `python -m benchmarks`; [benchmarks/README.md](../../../README.md) says how each column is measured. Times
are medians with the interquartile range in brackets. A peer's ratio is its time over ours, the floor's is ours over
the floor's. Memory is the growth of the resident set at its peak, in MiB. Errors are relative to the largest entry,
against float64, unless the first lines of `bench_OPERATOR.py` say otherwise."""

Results = dict[str, Any]  # operator -> {"environment", "cases"}


def environment(threads: int, repeats: int) -> dict[str, Any]:
    """What a figure depends on besides its inputs."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": processor(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "repeats": repeats,
        "load_average": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fedkernels": fedkernels.build_info(),
    }


def processor() -> str:
    """The processor's name, as /proc/cpuinfo has it where there is one."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def default_folder() -> Path:
    """benchmarks/results/cpu/NAME-OF-THE-PROCESSOR"""
    name = re.sub(r"\((r|tm)\)", "", processor().lower())
    return ROOT / "benchmarks" / "results" / "cpu" / re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def merge(folder: Path, operator: str, entry: dict[str, Any]) -> Results:
    """Puts one operator's figures into the folder's files, the others stay. -> all of them."""
    path = folder / "results.json"
    results: Results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[operator] = entry
    folder.mkdir(parents=True, exist_ok=True)
    _replace(path, json.dumps(results, indent=1) + "\n")
    _replace(folder / "results.md", tables(results))
    return results


def update_readme(results: Results, folder: Path, readme: Path) -> None:
    """Writes the short table between the two marks of the README."""
    text = readme.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{readme} must hold {START} and, after it, {END}")
    _replace(readme, f"{before}{START}\n{short_table(results, folder)}{END}{after}")


def tables(results: Results) -> str:
    """results.md: for each operator one table of what was measured and one of the bars."""
    parts = [_HEAD]
    for operator, entry in results.items():
        about = entry["environment"]
        native = about["fedkernels"]
        parts += [
            f"## {operator}",
            f"{about['date']}, {about['processor']} ({about['instruction_set']}), {about['threads']} threads, "
            f"{about['repeats']} repeats, load average {about['load_average']} at the start. torch {about['torch']}, "
            f"Python {about['python']}, compiled module of fedkernels: {native['native']}"
            + (f", {native['cpu_used']}." if "cpu_used" in native else "."),
            _table(
                ["size", "implementation", "time, ms", "ratio", "memory", "of it outputs", "error", "of gradients", ""],
                [row for case in entry["cases"] for row in _rows(case)],
            ),
        ]
        bars = [
            [case["size"], bar["bar"], bar["measured"], bar["outcome"]]
            for case in entry["cases"]
            for bar in case["bars"]
        ]
        if bars:
            parts.append(_table(["size", "bar", "measured", ""], bars))
    return "\n\n".join(parts) + "\n"


def _rows(case: dict[str, Any]) -> list[list[str]]:
    lines = []
    for index, row in enumerate(case["rows"]):
        errors = row.get("errors", {})
        remarks = [row["version"]] if "version" in row else []
        remarks += [row["note"]] if row["note"] else []
        remarks += [f"**{row['status']}**"] if row["status"] != "ok" else []
        lines.append(
            [
                "" if index else case["size"],
                f"**{row['implementation']}**" if index == 0 else row["implementation"],
                _time(row),
                f"{row['ratio']:.2f}" if "ratio" in row else "-",
                _mib(row.get("growth")),
                _mib(row.get("outputs")),
                _error(errors.get("value")),
                _error(errors.get("gradient")),
                "; ".join(remarks),
            ]
        )
    floor = case["floor"]
    if floor:
        ratio = f"{floor['ratio']:.2f}" if "ratio" in floor else "-"
        lines.append(["", "*floor*", _time(floor), ratio, "", "", "", "", floor["definition"]])
    return lines


def short_table(results: Results, folder: Path) -> str:
    """The README's table: ours, the best peer and the floor."""
    lines = []
    for operator, entry in results.items():
        for case in entry["cases"]:
            ours, *peers = case["rows"]
            if "median" not in ours:
                continue
            fair = [row for row in peers if row["same_result"] and "ratio" in row]
            best = min(fair, key=lambda row: row["ratio"], default=None)
            floor = (case["floor"] or {}).get("ratio")
            lines.append(
                [
                    f"`{operator}`",
                    case["size"],
                    _milliseconds(ours["median"]),
                    f"{best['implementation']} {_milliseconds(best['median'])}" if best else "-",
                    f"{best['ratio']:.2f}" if best else "-",
                    f"{floor:.2f}" if floor else "-",
                    _mib(ours.get("extra")),
                    _mib(best.get("extra")) if best else "-",
                ]
            )
    head = ["operator", "size", "ours, ms", "best peer, ms", "ratio", "to the floor", "extra MiB", "of the peer"]
    return f"{_table(head, lines)}\n\n{_conditions(results)} {_link(folder)}\n"


def _conditions(results: Results) -> str:
    abouts = [entry["environment"] for entry in results.values()]

    def all_of(*fields: str) -> str:
        return " / ".join(dict.fromkeys(" ".join(str(about[field]) for field in fields) for about in abouts))

    return (
        f"{all_of('processor')} ({all_of('instruction_set')}), {all_of('threads')} threads, torch {all_of('torch')}; "
        f"medians of {all_of('repeats')} repeats."
    )


def _link(folder: Path) -> str:
    try:
        place = folder.resolve().relative_to(ROOT).as_posix()
    except ValueError:
        return "By `python -m benchmarks`."
    return f"By `python -m benchmarks`; all peers, errors and what each floor is: [{place}]({place}/results.md)."


def _table(head: list[str], lines: list[list[str]]) -> str:
    marks = ["---" if index < 2 else "---:" for index in range(len(head))]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, marks, *escaped])


def _time(row: dict[str, Any]) -> str:
    if "median" not in row:
        return "-"
    return f"{_milliseconds(row['median'])} ({_milliseconds(row['interquartile_range'])})"


def _milliseconds(seconds: float) -> str:
    """Three digits, and never an exponent."""
    value = 1e3 * seconds
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: a temporary file, synced and renamed."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
