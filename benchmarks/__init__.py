"""Measurements of the operators of fedkernels against their peers: ``python -m benchmarks``, see README.md here."""
