"""The command line itself: its parser, and what becomes of errors."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from rawflash import hardware
from rawflash._version import __version__
from rawflash.backends import BACKENDS
from rawflash.cli import demo, explain, info, run
from rawflash.cli.common import BAD_INPUT, BROKEN_PIPE, DONE, INTERRUPTED, InputError
from rawflash.cli.places import TIMED_RUNS
from rawflash.errors import RawflashError
from rawflash.problem import ALGORITHMS, DIRECTIONS, DTYPES, LAYOUTS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments without the program's name; those of the process when left out.

    Returns
    -------
    int
        See the module's docstring.
    """
    with _streams():
        return _main(list(sys.argv[1:] if argv is None else argv))


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """In here a standard stream that was closed from the start, None in Python, takes what is written to it."""
    with contextlib.ExitStack() as stack:
        redirections = (sys.stdout, contextlib.redirect_stdout), (sys.stderr, contextlib.redirect_stderr)
        for stream, redirect in redirections:
            if stream is None:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect(nowhere))
        yield


def _main(arguments: list[str]) -> int:
    try:
        options = _parser().parse_args(arguments or ["demo"])
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: --help, --version or a wrong flag
        return stop.code if isinstance(stop.code, int) else DONE
    except (RawflashError, InputError) as error:
        return _complain(str(error))
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # what is still buffered goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        return _complain(f"{name}{error.strerror or error}")
    except MemoryError as error:  # NumPy's, or CuPy's of the GPU: both say how much was asked for
        return _complain(f"out of memory: {error}".rstrip(": "))


def _complain(message: str) -> int:
    with contextlib.suppress(OSError, ValueError):  # the exit status says it even where nothing can be written
        print(f"rawflash: {message}", file=sys.stderr, flush=True)
    return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rawflash",
        description="Exact attention and its gradients by FlashAttention-1 and -2. No command: demo.",
    )
    parser.add_argument("--version", action="version", version=f"rawflash {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    command = commands.add_parser("demo", help="run and check every kernel of this machine on a text")
    command.add_argument(
        "text", nargs="?", metavar="TEXT", help="a file to read; left out: a text in the package"
    )
    command.add_argument(
        "--tokens", type=_positive, default=1024, help="bytes of the text to attend over (default 1024)"
    )
    command.add_argument("--heads", type=_positive, default=4, help="heads (default 4)")
    command.add_argument("--dim", type=_positive, default=64, help="head dimension (default 64)")
    command.add_argument("--seed", type=int, default=0, help="seed of the projections (default 0)")
    command.add_argument("--backends", type=_names, default=None, metavar="A,B", help="only these backends")
    command.set_defaults(command=demo.command)

    command = commands.add_parser(
        "run",
        help="attention on the arrays of an .npz file",
        description="Reads q, k, v and, where present, "
        + ", ".join(run.OPTIONAL)
        + " from IN; writes out and lse "
        "and, if dout is there, dq, dk, dv (dbias, dsinks). float16, float32 and float64; an .npz file does "
        "not keep bfloat16. With --backend cupy_raw the arrays go to the GPU and the results come back.",
    )
    command.add_argument("input", metavar="IN.npz")
    command.add_argument("-o", "--output", required=True, metavar="OUT.npz")
    command.add_argument("--force", action="store_true", help="overwrite OUT.npz")
    command.add_argument("--time", action="store_true", help=f"then time it: the best of up to {TIMED_RUNS} more runs")
    _add_options(command)
    command.set_defaults(command=run.command)

    command = commands.add_parser("explain", help="kernel, tiles, bytes and traffic of a call, for any chip")
    command.add_argument("--shape", required=True, type=_shape, metavar="B,Hq,Hkv,Tq,Tk,d")
    command.add_argument("--dv", type=_positive, help="head dimension of v (default d)")
    command.add_argument("--dtype", choices=DTYPES, default="float32")
    command.add_argument("--direction", choices=DIRECTIONS, default="forward")
    command.add_argument(
        "--arch", choices=("cpu", *hardware.CHIPS), metavar="ARCH",
        help=f"cpu, {', '.join(hardware.CHIPS)}; left out: the CPU, or for a GPU backend the GPU of this machine",
    )  # fmt: skip
    _add_options(command)
    command.set_defaults(command=explain.command)

    command = commands.add_parser("info", help="versions, devices, backends: what is here, what to install")
    command.add_argument(
        "--compile", action="store_true",
        help="first compile every kernel of numba_cpu into its cache on disk, so that no later call waits",
    )  # fmt: skip
    command.set_defaults(command=info.command)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    """The scalar options of :class:`rawflash.Options`, under their own names; absent unless given."""
    group = parser.add_argument_group("options of the call")
    absent = argparse.SUPPRESS
    group.add_argument("--causal", action="store_true", default=absent)
    group.add_argument(
        "--window", type=_window, default=absent, metavar="L,R", help="each an int >= 0 or none"
    )
    group.add_argument(
        "--q-offset", type=int, default=absent, metavar="N", help="key position of query row 0"
    )
    group.add_argument("--softcap", type=float, default=absent, metavar="C")
    group.add_argument("--dropout", type=float, default=absent, metavar="P")
    group.add_argument("--seed", type=int, default=absent, metavar="N", help="of the dropout")
    group.add_argument("--scale", type=float, default=absent, help="default 1 / sqrt(d)")
    group.add_argument("--layout", choices=LAYOUTS, default=absent)
    group.add_argument("--algorithm", choices=ALGORITHMS, default=absent)
    group.add_argument("--backend", choices=tuple(BACKENDS), default=absent)
    group.add_argument("--deterministic", action="store_true", default=absent)
    group.add_argument(
        "--sram", type=int, default=absent, metavar="BYTES", help="on-chip bytes that tiles may use"
    )


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an int >= 1")
    return value


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in BACKENDS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(BACKENDS)}")
    return names


def _window(text: str) -> tuple[int | None, int | None]:
    try:
        left, right = (None if side.strip().lower() == "none" else int(side) for side in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not L,R with each an int or none") from None
    return left, right


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) != 6 or min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not B,Hq,Hkv,Tq,Tk,d, six ints >= 0")
    return sizes
