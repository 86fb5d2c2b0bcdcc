"""Writes what was measured, on the CPU or a GPU: results.json, results.md, and the table in docs/speed.md."""

import datetime
import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fedkernels
from benchmarks.measure import ROOT, Settings

SPEED_PAGE = ROOT / "docs" / "speed.md"
START, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"

_TITLE = {"cpu": "# Operators against their peers", "cuda": "# Operators on a GPU"}
_HEAD = {
    "cpu": """\
Written by `python -m benchmarks`; [benchmarks/README.md](../../../README.md) says how each column is measured. Times
are medians with the interquartile range in brackets. A peer's ratio is its time over ours, the floor's is ours over
the floor's. Memory is the growth of the resident set at its peak, in MiB. Errors are relative to the largest entry,
against float64, unless the first lines of `bench_OPERATOR.py` say otherwise.""",
    "cuda": """\
Written by `python -m benchmarks --device cuda`; [benchmarks/README.md](../../../README.md) says how each column is
measured. Times are medians with the interquartile range in brackets. A peer's ratio is its time over ours. A share is a
part of the rate that this card reached in the same run. Memory is the peak of torch's allocator, in MiB. Errors are
relative to the largest entry, against float64, unless the first lines of `bench_OPERATOR.py` say otherwise.""",
}

Results = dict[str, Any]  # operator -> {"environment", "cases"}


def environment(settings: Settings) -> dict[str, Any]:
    """What a figure depends on besides its inputs; for a GPU with its name and measured rates."""
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": processor(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": settings.threads,
        "repeats": settings.repeats,
        "load_average": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fedkernels": fedkernels.build_info(),
    }
    if settings.device == "cuda":
        about |= {"device": "the CPU, in a rehearsal", "torch_cuda": torch.version.cuda, "rates": settings.rates}
        if not settings.rehearse:
            card = torch.cuda.get_device_properties(settings.torch_device())
            about |= {"device": card.name, "multiprocessors": card.multi_processor_count, "memory": card.total_memory}
    return about


def processor() -> str:
    """The processor's name, as /proc/cpuinfo has it where there is one."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def default_folder(settings: Settings) -> Path:
    """Below benchmarks/results: cpu/NAME-OF-THE-PROCESSOR, or gpu/NAME-OF-THE-CARD."""
    if settings.device == "cuda":
        kind, name = "gpu", torch.cuda.get_device_name().lower()
    else:
        kind, name = "cpu", re.sub(r"\((r|tm)\)", "", processor().lower())
    return ROOT / "benchmarks" / "results" / kind / re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def merge(folder: Path, operator: str, entry: dict[str, Any]) -> None:
    """Puts one operator's figures into the folder's files, the others stay."""
    path = folder / "results.json"
    results: Results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[operator] = entry
    folder.mkdir(parents=True, exist_ok=True)
    replace(path, json.dumps(results, indent=1) + "\n")
    replace(folder / "results.md", tables(results))


def update_speed_page(folder: Path, page: Path) -> None:
    """Writes the short tables of this folder and those beside it between the two marks of the page."""
    text = page.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{page} must hold {START} and, after it, {END}")
    replace(page, f"{before}{START}\n{short_tables(folder.parent)}{END}{after}")


def tables(results: Results) -> str:
    """results.md: for each operator one table of what was measured and one of the bars."""
    kind = "cuda" if any("device" in entry["environment"] for entry in results.values()) else "cpu"
    parts = [_TITLE[kind], _HEAD[kind]]
    for operator, entry in results.items():
        lines = [line for case in entry["cases"] for line in _lines(case)]
        columns = [name for name in _COLUMNS if name not in _GPU_COLUMNS or any(name in line for line in lines)]
        cells = [[line.get(name, "-") for name in columns] for line in lines]
        parts += [f"## {operator}", _about(entry["environment"]), table(columns, cells)]
        bars = [
            [case["size"], bar["bar"], bar["measured"], bar["outcome"]]
            for case in entry["cases"]
            for bar in case["bars"]
        ]
        if bars:
            parts.append(table(["size", "bar", "measured", ""], bars))
    return "\n\n".join(parts) + "\n"


def _about(about: dict[str, Any]) -> str:
    native = about["fedkernels"]
    module = f"compiled module of fedkernels: {native['native']}"
    if "device" in about:
        rates = about["rates"]
        products = ", ".join(f"{name} {rates[name] / 1e12:.4g} TFLOP/s" for name in rates if name != "copy")
        return (
            f"{about['date']}, {about['device']}. torch {about['torch']} (CUDA {about['torch_cuda']}), "
            f"Python {about['python']}, {module}. Rates measured: copy {rates['copy'] / 1e9:.4g} GB/s (read and "
            f"written), products {products}."
        )
    return (
        f"{about['date']}, {about['processor']} ({about['instruction_set']}), {about['threads']} threads, "
        f"{about['repeats']} repeats, load average {about['load_average']} at the start. torch {about['torch']}, "
        f"Python {about['python']}, {module}" + (f", {native['cpu_used']}." if "cpu_used" in native else ".")
    )


_COLUMNS = (
    *("size", "implementation", "time, ms", "wall, ms", "ratio", "share", "memory", "of it outputs"),
    *("error", "of gradients", ""),
)
_GPU_COLUMNS = ("wall, ms", "share")


def _lines(case: dict[str, Any]) -> list[dict[str, str]]:
    """The lines of one case, as the cells of their columns; where a cell is missing there is no figure."""
    lines = [_line(row, case) | {"size": "" if index else case["size"]} for index, row in enumerate(case["rows"])]
    lines[0]["implementation"] = f"**{case['rows'][0]['implementation']}**"
    empty = {"size": "", **dict.fromkeys(("memory", "of it outputs", "error", "of gradients"), "")}
    if floor := case["floor"]:
        ratio = {"ratio": f"{floor['ratio']:.2f}"} if "ratio" in floor else {}
        lines.append({**empty, "implementation": "*floor*", "time, ms": _time(floor), **ratio, "": floor["definition"]})
    if work := case.get("work"):
        lines.append({**empty, "implementation": "*work*", "": f"{work['definition']}; the share counts these"})
    return lines


def _line(row: dict[str, Any], case: dict[str, Any]) -> dict[str, str]:
    errors = row.get("errors", {})
    remarks = [row["version"]] if "version" in row else []
    remarks += [row["note"]] if row["note"] else []
    if "kernels" in row:
        kernels = ", ".join(row["kernels"])
        remarks.append(f"compiled: {kernels}" if kernels else "no compiled kernel: the reference in plain PyTorch")
    remarks += [f"**{row['status']}**"] if row["status"] != "ok" else []
    line = {"implementation": row["implementation"], "time, ms": _time(row), "": "; ".join(remarks)}
    line |= {"memory": _mib(row.get("growth")), "of it outputs": _mib(row.get("outputs"))}
    line |= {"error": _error(errors.get("value")), "of gradients": _error(errors.get("gradient"))}
    line |= {"wall, ms": _milliseconds(row["wall"])} if "wall" in row else {}
    line |= {"ratio": f"{row['ratio']:.2f}"} if "ratio" in row else {}
    line |= {"share": f"{row['share']:.0%} of {case['work']['rate']}"} if "share" in row else {}
    return line


def short_tables(parent: Path) -> str:
    """The tables of docs/speed.md, one for each machine: those of a processor's name differ in their torch."""
    texts = []
    for file in sorted(parent.glob("*/results.json")):
        of_machine: dict[str, Results] = {}
        for operator, entry in json.loads(file.read_text(encoding="utf-8")).items():
            of_machine.setdefault(_machine(entry["environment"]), {})[operator] = entry
        for name, results in of_machine.items():
            texts.append(f"## {name}\n\n{_short_table(results)}\n\n{_conditions(results)} {_link(file.parent)}\n")
    return "\n".join(texts)


def _machine(about: dict[str, Any]) -> str:
    return f"{about['processor']} ({about['instruction_set']}), torch {about['torch'].partition('+')[0]}"


def _short_table(results: Results) -> str:
    """Ours, the best peer and the floor."""
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
    return table(head, lines)


def _conditions(results: Results) -> str:
    abouts = [entry["environment"] for entry in results.values()]

    def all_of(field: str) -> str:
        return " / ".join(dict.fromkeys(str(about[field]) for about in abouts))

    return f"{all_of('threads')} threads, torch {all_of('torch')}; medians of {all_of('repeats')} repeats."


def _link(folder: Path) -> str:
    place = os.path.relpath(folder, ROOT)
    return f"By `python -m benchmarks`; all peers, errors and what each floor is: [{place}](../{place}/results.md)."


def table(head: Sequence[str], lines: list[list[str]]) -> str:
    """A Markdown table; the first two columns are text, the others numbers."""
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


def replace(path: Path, text: str) -> None:
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
