"""The record behind docs/gpt.md: what docs/examples/gpt.py prints, as a user runs it.

    python -m bench.gpt FILE [--plot SVG]

Two runs on the processor: a training from an empty cache of compiled kernels, and a step beside dense attention.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import record

EXAMPLE = record.ROOT / "docs" / "examples" / "gpt.py"
SCHEMA = "rawflash-gpt-1"


def said(*options: str, cache: str) -> list[str]:
    """The lines that the example prints. An error of it is one here."""
    environment = os.environ | {"NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(record.ROOT)}
    made = subprocess.run([sys.executable, str(EXAMPLE), *options], env=environment, stdout=subprocess.PIPE,
                          encoding="utf-8", errors="replace", check=True)  # fmt: skip
    return made.stdout.splitlines()


def main(arguments: list[str] | None = None) -> int:
    found = argparse.ArgumentParser(prog="python -m bench.gpt", description=__doc__,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    found.add_argument("file", type=Path, help="the record")
    found.add_argument("--plot", metavar="SVG", help="draw the losses")
    found.add_argument("--steps", type=int, default=300, help="of training")
    options = found.parse_args(arguments)
    made = {"schema": SCHEMA, "device": "example", **record.about(gpu=False)}
    with tempfile.TemporaryDirectory() as folder:
        train = ["--steps", str(options.steps), "--sample", "200", "--checkpoint", f"{folder}/gpt.npz"]
        train += ["--plot", options.plot] if options.plot else []
        begun = time.monotonic()
        made["train"] = said(*train, cache=folder)
        made["train_seconds"] = round(time.monotonic() - begun, 1)
        made["compare"] = said("--compare", cache=folder)
    record.write(options.file, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
