"""The command that shows what is installed, and what of it fedssl uses."""

import importlib.metadata
import os
import platform

from rich.table import Table as TextTable

from ..errors import installed_distribution
from .console import console, print_next

REQUIRED = ("torch", "torchvision", "timm", "numpy", "pydantic", "scikit-learn", "safetensors", "matplotlib")
OPTIONAL = ("onnx", "onnxruntime", "flwr")


def doctor() -> None:
    """Show what is installed and used, and test the CUDA kernels. Look here first if something does not work."""
    import torch

    import fedkernels

    table = TextTable("what", "finding", box=None, pad_edge=False)
    table.add_row("python", f"{platform.python_version()} on {platform.platform()}")
    for name in (installed_distribution(), *REQUIRED, *OPTIONAL):
        try:
            table.add_row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            table.add_row(name, "not installed")
    table.add_row("processor", f"{os.cpu_count()} cores; torch uses {torch.get_num_threads()} threads")
    table.add_row("vector instructions", torch.backends.cpu.get_cpu_capability())
    if torch.cuda.is_available():
        console.print("Testing the CUDA kernels on each kind of GPU, which takes seconds to a few minutes:")
        fedkernels.self_test()
        console.print()
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        table.add_row("cuda", f"{torch.version.cuda}: {', '.join(names)}")
    else:
        table.add_row("cuda", "no device; everything runs on the processor")
    for what, finding in fedkernels.build_info().items():
        if finding:
            table.add_row(f"fedkernels, {what}", finding)
    console.print(table)
    print_next("recipes")
