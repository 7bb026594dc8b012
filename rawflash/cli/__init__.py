"""The command line: ``rawflash`` or ``python -m rawflash``.

``demo`` (also with no arguments) runs every algorithm and backend of this machine on a text and
checks each against the oracle; ``run`` computes attention on the arrays of a file, on the GPU where
it is asked to; ``explain`` prints a plan for any chip of the table; ``info`` says what is installed
here and what is missing.

Exit codes: 0 done; 1 a kernel disagrees with the oracle or with the predicted traffic, or a backend that
``--backends`` names cannot run; 2 bad input; 130 interrupted; 141 the reader of the output went away.
"""

from rawflash.cli.parser import main

__all__ = ["main"]
