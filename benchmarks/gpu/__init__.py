"""The operators against their peers on an NVIDIA GPU: ``python -m benchmarks.gpu``."""
