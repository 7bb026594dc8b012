"""``python -m rawflash``: the command line of :mod:`rawflash.cli`."""

from rawflash.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
