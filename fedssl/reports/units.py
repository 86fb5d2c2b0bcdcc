"""Counts of bytes and operations as people read them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Bytes in decimal units: `0`, `812 B`, `4.1 kB`, `20.5 MB`, `1.3 GB`."""
    if count < 1000:
        return f"{count:.0f} B" if count else "0"
    for unit, size in (("kB", 1e3), ("MB", 1e6)):
        if count < 999.95 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e9:,.1f} GB"


def format_flops(count: float) -> str:
    """Floating-point operations: `812.0 M`, `4.1 G`, `20.5 T`, `1.2 P`."""
    for unit, size in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if count < 999.95 * size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e15:,.1f} P"
