"""The fast CPU backend: FlashAttention-1 and -2 as Numba kernels, one core a tile.

``fa1_forward``, ``fa1_backward``, ``fa2_forward`` and ``fa2_backward`` hold the kernels and their
launchers, ``few_rows`` the forward kernel for decoding; ``tile`` and ``gradient`` the phases of one
tile that they share; ``panel`` and ``backward_panel`` their vector code; ``visibility`` the compiled
twin of :mod:`rawflash.masks`; ``microkernel`` the matrix products; ``numerics`` exp, conversions and
Philox; ``launch`` the record that a kernel reads and the threads that run it.
"""
