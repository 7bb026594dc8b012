"""The fast CPU backend: FlashAttention-1 and -2 as Numba kernels, one core a tile.

``fa1_forward``, ``fa1_backward``, ``fa2_forward`` and ``fa2_backward`` hold the kernels and their
launchers; ``tile`` the phases of one tile that they share; ``visibility`` the compiled twin of
:mod:`rawflash.masks`; ``microkernel`` the one matrix product; ``numerics`` exp, conversions and
Philox; ``launch`` the record that a kernel reads and the threads that run it.
"""
