"""How much memory this process can still take."""

import os
import resource
from pathlib import Path

_KIB = 1024


def available_memory() -> int:
    """Bytes that can still be allocated: the least of what the machine, the control group and `ulimit -v` leave."""
    limits = [_of_machine()]
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft_limit != resource.RLIM_INFINITY:
        limits.append(soft_limit - _address_space_in_use())
    limits += _of_control_group()
    return max(0, min(limits))


def readable_bytes(count: int) -> str:
    """A number of bytes in GB, or in MB below one GB."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _of_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * _KIB
    except OSError:
        pass  # no Linux: what is installed
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _address_space_in_use() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _of_control_group(folder: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What a container's limit leaves; empty where there is none. Cached files can be dropped: they count as free."""
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        return [limit - used + int(statistics["inactive_file"])]
    except (OSError, ValueError, KeyError):  # no such file, or `max` for no limit
        return []
