"""CUDA C++ kernels, compiled by NVRTC at run time and launched through CuPy.

Read in this order:

* ``cuda/fa2_forward.cu``: a kernel; its first lines say what a block of threads owns and what lies on chip;
* ``cuda/tile.cuh``: tiles in shared memory, and the matrix products on them;
* ``fa2_forward``: its launcher;
* ``launch``: from a problem to the text's preamble, and from a call to the kernel's argument;
* ``compile``: from text to a loaded module.
"""
