"""How long a call takes: how often it is called, in which order, by which clock.

*Burst*: all calls take turns, round by round, so that a ratio is one of cycles whatever the clock does; in an order
drawn for each round, since a card at its power limit is faster behind a call that took little. *Sustained*: each for a
while of nothing else, its second half, which is what a training run sees of a card at its power limit.
Every timed turn comes right after an untimed one of the same call, so caches are as warm for all.

A turn is some calls, one behind the other: on a GPU a CUDA graph of them between two events where they can be captured
(what Python takes to launch a short call is more than the call takes), else the calls themselves in a queue. On a CPU a
turn is one call.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

BATCH = 4e-3  # seconds of a turn, about
MOST_CALLS = 64  # of a turn
MOST_BYTES = 4 << 30  # of results that a graph keeps
ROTATED = 0.05  # seconds: a turn that takes less with all sets of inputs has them all
CAPTURED = 2e-3  # seconds: a call that takes longer hides its launch, and is not captured
BUDGET = 0.6  # seconds of all turns of a call in turns with others, about
FEWEST, MOST = 2, 15  # rounds
PERIOD = 0.5  # seconds of nothing else
WALL_BATCH = 0.03  # seconds of a turn by the wall clock: its end, where host and device meet, does not count
PAUSE = 0.01  # before an untimed turn on a CPU: OpenMP's threads spin some milliseconds after a call of PyTorch's
CPU_BUDGET, CPU_FEWEST, CPU_MOST = 0.75, 5, 25
PERCENTILES = (20, 50, 80)
MOST_SETS = 8

Call = Callable[[], Any]


class Turn(Protocol):
    """Some calls one behind the other.

    Attributes
    ----------
    calls : int
    how : str
        What is timed, in words.
    """

    calls: int
    how: str

    def warm(self) -> None:
        """The calls, untimed."""

    def seconds(self) -> float:
        """Time of one of the calls."""


# ---- how often -----------------------------------------------------------------------------------------------


def input_sets(input_bytes: int, cache_bytes: int) -> int:
    """Sets of inputs of which together twice the L2 is exceeded: none is still there when its turn comes again."""
    return min(MOST_SETS, 2 * cache_bytes // max(input_bytes, 1) + 1)


def calls_of(seconds: float, sets: int = 1, result_bytes: int = 0, batch: float = BATCH) -> int:
    """Calls of a turn, from the time of one: a multiple of the sets of inputs where that is not too long."""
    most = max(1, min(MOST_CALLS, MOST_BYTES // max(result_bytes, 1)))
    calls = max(1, min(math.ceil(batch / max(seconds, 1e-9)), most))
    return -(-calls // sets) * sets if seconds * sets < ROTATED else calls


def rounds_of(seconds: float, budget: float = BUDGET, fewest: int = FEWEST, most: int = MOST) -> int:
    """Rounds in which a turn of so many seconds, and an untimed one before it, takes part."""
    return max(fewest, min(most, int(budget / max(2 * seconds, 1e-9))))


def quantiles(seconds: Sequence[float]) -> list[float]:
    """p20, p50 and p80 in microseconds."""
    return [round(float(p) * 1e6, 3) for p in np.percentile(seconds, PERCENTILES)]


# ---- in which order ------------------------------------------------------------------------------------------


def alternate(turns: Mapping[str, Turn], rounds: Mapping[str, int]) -> dict[str, list[float] | Exception]:
    """Times of each turn, all taking turns; one that fails is out, with its exception instead of times.

    The order of a round is drawn, the same in every run: in a fixed one each would always follow the same other.
    """
    found: dict[str, list[float] | Exception] = {name: [] for name in turns}
    drawn = random.Random(0)
    for n in range(max(rounds.values(), default=0)):
        for name, turn in drawn.sample(list(turns.items()), len(turns)):
            times = found[name]
            if isinstance(times, Exception) or n >= rounds[name]:
                continue
            try:
                turn.warm()
                times.append(turn.seconds())
            except Exception as error:
                found[name] = error
    return found


def sustained(turn: Turn, period: float = PERIOD, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Times of a while of nothing else: the second half of them."""
    times, end = [], clock() + period
    while len(times) < 2 or clock() < end:
        times.append(turn.seconds())
    return times[len(times) // 2 :]


# ---- by which clock ------------------------------------------------------------------------------------------


class CupyQueue:
    """A stream of CuPy's, for our kernels and for what is written in CuPy."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def __enter__(self) -> CupyQueue:
        self.stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.__exit__(*error)

    def mark(self) -> Any:
        event = self._cuda.Event()
        event.record(self.stream)
        return event

    def between(self, start: Any, end: Any) -> float:
        end.synchronize()
        return self._cuda.get_elapsed_time(start, end) / 1e3

    def capture(self, calls: Sequence[Call]) -> Call:
        """What replays a CUDA graph of the calls, which have been called before."""
        with self:
            for call in dict.fromkeys(calls):
                call()
            self.stream.synchronize()
            self.stream.begin_capture()
            try:
                kept = [call() for call in calls]
            finally:
                graph = self.stream.end_capture()
        return lambda kept=kept: graph.launch(self.stream)


class TorchQueue:
    """A stream of PyTorch's."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self.stream = torch.cuda.Stream()
        self._inside: list[Any] = []

    def __enter__(self) -> TorchQueue:
        self._inside.append(self._cuda.stream(self.stream))
        self._inside[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.pop().__exit__(*error)

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def between(self, start: Any, end: Any) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def capture(self, calls: Sequence[Call]) -> Call:
        """What replays a CUDA graph of the calls, which have been called before."""
        graph = self._cuda.CUDAGraph()
        with self:
            for call in dict.fromkeys(calls):
                call()
            self.stream.synchronize()
            # Other libraries' threads may do meanwhile what a capture of the whole process would not stand. Not by
            # torch.cuda.graph, which collects garbage and gives all free memory back before
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                kept = [call() for call in calls]
            finally:
                graph.capture_end()

        def replay(kept: Any = kept) -> None:
            with self:
                graph.replay()

        return replay


class Queued:
    """Calls in a queue, between two events."""

    how = "queue"

    def __init__(self, queue: Any, calls: Sequence[Call]) -> None:
        self._queue, self._calls, self.calls = queue, calls, len(calls)

    def warm(self) -> None:
        with self._queue:
            for call in self._calls:
                call()

    def seconds(self) -> float:
        with self._queue:
            start = self._queue.mark()
            for call in self._calls:
                call()
            return self._queue.between(start, self._queue.mark()) / self.calls


class Replayed:
    """Replay of a CUDA graph of calls, between two events."""

    how = "graph"

    def __init__(self, queue: Any, calls: Sequence[Call]) -> None:
        self._queue, self._replay, self.calls = queue, queue.capture(calls), len(calls)

    def warm(self) -> None:
        self._replay()

    def seconds(self) -> float:
        start = self._queue.mark()
        self._replay()
        return self._queue.between(start, self._queue.mark()) / self.calls


class Walled:
    """Many calls by the wall clock, until the last is done: for a library whose stream cannot be asked for."""

    how = "wall clock of queued calls"

    def __init__(self, wait: Callable[[Any], Any], calls: Sequence[Call]) -> None:
        self._wait, self._calls, self.calls = wait, calls, len(calls)

    def warm(self) -> None:
        self._wait(self._calls[0]())

    def seconds(self) -> float:
        result, start = None, time.perf_counter()
        for call in self._calls:
            result = call()
        self._wait(result)
        return (time.perf_counter() - start) / self.calls


class Called:
    """One call on the CPU."""

    how, calls = "wall clock", 1

    def __init__(self, call: Call, pause: float = PAUSE) -> None:
        self._call, self._pause = call, pause

    def warm(self) -> None:
        """The call, untimed: without it a call of some milliseconds begins with waking its threads."""
        time.sleep(self._pause)
        self._call()

    def seconds(self) -> float:
        start = time.perf_counter()
        self._call()
        return time.perf_counter() - start
