"""The exceptions that rawflash raises; every one derives from :class:`RawflashError`."""

from __future__ import annotations


class RawflashError(Exception):
    """Base class of every error that rawflash raises on purpose."""


class ProblemError(RawflashError, ValueError):
    """A call that is wrong in itself: shapes, dtypes or option values.

    The message names the argument, its value and the rule that it breaks. It is raised
    before any work is done, so ``out`` is untouched.
    """


class TileError(RawflashError):
    """No legal tile fits the on-chip memory.

    Attributes
    ----------
    needed : int
        Bytes that the smallest legal tiles occupy.
    available : int
        Bytes that one block may use.
    """

    def __init__(self, message: str, needed: int = 0, available: int = 0) -> None:
        super().__init__(message, needed, available)
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        return str(self.args[0])


class BackendError(RawflashError):
    """A backend or one of its features is not available here.

    The message says what to install, or which backend has it.
    """
