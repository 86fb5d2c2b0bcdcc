"""The command that shows what is installed, and what of it fedssl uses."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Annotated

from rich.table import Table as TextTable
from typer import Exit, Option

from ..errors import installed_distribution
from .console import console, print_next, print_text

REQUIRED = ("torch", "torchvision", "timm", "numpy", "pydantic", "scikit-learn", "safetensors", "matplotlib")
OPTIONAL = ("onnx", "onnxruntime", "flwr")


def doctor(
    consortium: Annotated[
        Path | None,
        Option(
            metavar="FOLDER",
            help="Check a site's folder instead; of the server's, show which sites are connected.",
        ),
    ] = None,
) -> None:
    """Show what is installed and used, and test the CUDA kernels. Look here first if something does not work."""
    if consortium is not None:
        _check_site(consortium)
        return
    import torch

    import fedkernels

    if torch.cuda.is_available():
        console.print("Testing the CUDA kernels on each kind of GPU, which takes seconds to a few minutes:")
        fedkernels.self_test()
        console.print()
    table = TextTable("what", "finding", box=None, pad_edge=False)
    for fact in diagnose():
        table.add_row(*fact)
    console.print(table)
    print_next("recipes")


def _check_site(folder: Path) -> None:
    """Print what a site needs for a run, each line ok or with what to do; exit with code 1 if something is to do."""
    from ..engines import flower_module

    checks = flower_module("deploy.site_check").check_site(folder)
    for check in checks:
        print_text(f"{'ok   ' if check.advice is None else 'to do'}  {check.what}: {check.finding}")
        if check.advice is not None:
            print_text(f"       {check.advice}")
    if any(check.advice is not None for check in checks):
        raise Exit(1)


def diagnose() -> list[tuple[str, str]]:
    """Return facts about this installation as (what, finding) pairs."""
    import torch

    import fedkernels

    facts = [("python", f"{platform.python_version()} on {platform.platform()}")]
    for name in (installed_distribution(), *REQUIRED, *OPTIONAL):
        try:
            facts.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            facts.append((name, "not installed"))
    facts.append(("processor", f"{os.cpu_count()} cores; torch uses {torch.get_num_threads()} threads"))
    facts.append(("vector instructions", torch.backends.cpu.get_cpu_capability()))
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts.append(("cuda", f"{torch.version.cuda}: {', '.join(names)}"))
    else:
        facts.append(("cuda", "no device; everything runs on the processor"))
    facts += [(f"fedkernels, {what}", finding) for what, finding in fedkernels.build_info().items() if finding]
    return facts
