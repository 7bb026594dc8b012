"""Benchmarks: ``python -m bench.run``, ``python -m bench.traffic``, ``python -m bench.report``."""
