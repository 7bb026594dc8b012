"""What compilers make of kernels for tests, in files that stay between processes and runs: most of a run is compiling.

A file's name is a hash of all that decides its content; one that is deleted is made again.
"""

import hashlib
import json
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.gettempdir(), "rawflash-binaries")


def kept(folder, about, suffix, make):
    """The file for what strings say: text, options, compiler. ``make(path)`` writes it where there is none."""
    path = folder / (hashlib.sha256("\n".join(about).encode()).hexdigest()[:32] + suffix)
    if not path.exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:  # other processes see a whole file or none
            made = Path(temporary, "made")
            make(made)
            made.replace(path)
    return path


def _code_and_log(about, compiled):
    def make(path):
        code, log = compiled()
        path.write_bytes(json.dumps(log).encode() + b"\n" + code)

    log, _, code = kept(FOLDER, about, ".cubin", make).read_bytes().partition(b"\n")
    return code, json.loads(log)


def compile_log(text, arch):
    """:func:`rawflash.backends.cupy_raw.compile.compile_log`, of each text once."""
    from rawflash.backends.cupy_raw import compile

    about = ("NVRTC", compile._compiler(), repr(compile.OPTIONS), arch, text)
    return _code_and_log(about, lambda: compile.compile_log(text, arch))


def compiled(module, name):
    """``module.compiled(name)`` of a :class:`rawflash.backends.numba_cuda.compile.Module`, of each kernel once."""
    return _code_and_log(("Numba", module.key_of(name)), lambda: module.compiled(name))
