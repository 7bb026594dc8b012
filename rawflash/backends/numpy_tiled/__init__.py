"""The teaching backend: the papers' algorithms as NumPy loops on a two-level memory.

Read in this order:

* ``fa2_forward``: the whole idea, on one page;
* ``memory``: on-chip memory of M elements that counts what crosses its border and refuses more;
* ``scores``: what happens between ``Q K^T`` and the softmax (softcap, bias, masks, dropout);
* ``heads``: which rows of which arrays belong to a head;
* then ``standard_*`` (what everybody did), ``rowwise_*`` (what fails for long sequences) and
  ``fa1_*`` (what came first) beside ``fa2_*``.

Symbols: ``Q K V`` inputs, ``S`` scores, ``P`` probabilities, ``O`` output, ``m l`` running maximum
and sum of a row, ``lse = m + log l``, ``dO dP dS dQ dK dV`` gradients, ``gamma`` row sums of
``dO * O``, ``Br Bc`` rows of a Q block and of a K/V block. A plain name (``Q``) is a tile on chip; ``head.Q``
is the same matrix in slow memory.

Every kernel takes ``memory=``: pass a :class:`~rawflash.backends.numpy_tiled.memory.Memory` to read
its counts afterwards, as :func:`~rawflash.backends.numpy_tiled.counting.counted` does;
:mod:`rawflash.traffic` predicts them.
"""
