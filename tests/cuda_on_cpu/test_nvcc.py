"""Where there is an nvcc: csrc/cuda compiles for every architecture, without a warning and with no or few spills."""

import re
import runpy
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cuda_on_cpu.emulation import CUDA, ROOT, SANITIZED

# The longest first, so that no processor is left with it in the end.
SOURCES = [path.name for path in sorted(CUDA.glob("*.cu"), key=lambda path: -path.stat().st_size)]
# Bytes that a thread may keep in memory, by architecture: on sm_120 the contrastive kernel of 256 columns, which has
# no room to run there.
MOST_SPILLED = {"sm_120": 40}


def spills(report):
    """-> functions that keep registers in memory, and how many functions there are, from what ptxas -v prints."""
    found, function, architecture, count = [], "", "", 0
    for line in report.splitlines():
        if match := re.search(r"Compiling entry function .* for '(\w+)'", line):
            architecture = match[1]
        elif match := re.search(r"Function properties for (\S+)", line):
            function, count = match[1], count + 1
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stores, loads = int(match[1]), int(match[2])
            if stores > MOST_SPILLED.get(architecture, 0) or (loads and not stores):
                found.append(f"{function} for {architecture}: {line.strip()}")
    return found, count


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    build = runpy.run_path(str(ROOT / "csrc/cuda_compiler.py"))  # by which setup.py calls nvcc
    nvcc = build["nvcc_path"]()
    if nvcc is None:
        pytest.skip("no nvcc")
    if SANITIZED:
        pytest.skip("once is enough")
    folder = tmp_path_factory.mktemp("nvcc")

    def compile_one(source: str) -> subprocess.CompletedProcess[str]:
        architectures = build["architecture_flags"](build["ARCHITECTURES"].split())
        flags = *build["NVCC_FLAGS"], *build["NVCC_WERROR"], *architectures, "-Xptxas", "-v"
        command = [nvcc, *flags, "-c", CUDA / source, "-o", folder / f"{source}.o"]
        return subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SOURCES, pool.map(compile_one, SOURCES), strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_for_all_architectures(reports, source):
    done = reports[source]
    assert done.returncode == 0, done.stdout + done.stderr
    found, count = spills(done.stderr)
    assert not found
    assert count >= 4  # at least one kernel for each architecture was looked at
