"""Numba CUDA: the kernels of cupy_raw in Python, file by file, launched as those are."""
