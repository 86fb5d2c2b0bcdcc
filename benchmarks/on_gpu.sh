#!/usr/bin/env bash
# benchmarks/on_gpu.py says what this does; PYTHON names the Python that has torch (default: python3).
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
exec "${PYTHON:-python3}" -m benchmarks.on_gpu "$@"
