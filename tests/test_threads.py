"""Threads and processes: concurrent calls give the bits they give alone, after a fork too."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from test_forward import kernels, make, normal
from test_properties import all_of
from tolerances import assert_close

import rawflash as rf
from rawflash.backends.numba_cpu import launch


def cases(backend, algorithm):
    """Calls of different sizes and dtypes, so that threads that share a workspace would show."""
    common = dict(backend=backend, algorithm=algorithm)
    return [
        make(B=1, Hq=4, Hkv=2, Tq=90, d=16, causal=True, **common),
        make(B=2, Hq=2, Tq=33, Tk=120, d=8, dv=5, dtype="float64", dropout=0.3, **common),
        make(B=2, Hq=2, Tq=65, d=24, dtype="float16", window=(20, 5), sinks=normal(2), **common),
        make(B=3, Hq=1, Tq=40, d=8, bias=normal(1, 40, 40), softcap=3.0, **common),
    ]


def assert_same_bits(results, expected):
    assert results.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(results[name], expected[name], err_msg=name)


@kernels
def test_concurrent_calls_give_the_bits_they_give_alone(backend, algorithm):
    calls = cases(backend, algorithm)
    alone = [all_of(case, deterministic=True) for case in calls]
    n = 4
    start = threading.Barrier(n)

    def work(first):
        start.wait()
        for turn in range(6):
            at = (first + turn) % len(calls)
            assert_same_bits(all_of(calls[at], deterministic=True), alone[at])
        return True

    with ThreadPoolExecutor(n) as pool:
        assert list(pool.map(work, range(n))) == [True] * n


@kernels
def test_threads_on_one_problem(backend, algorithm):
    """The same arrays read by several threads at once, each writing its own results."""
    case = cases(backend, algorithm)[0]
    expected = all_of(case)
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(lambda _: all_of(case), range(12)):
            assert_same_bits(results, expected)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
def test_the_number_of_threads_does_not_change_the_answer(algorithm):
    before = numba.get_num_threads()
    try:
        for case in cases("numba_cpu", algorithm):
            reference, results = case.reference(), {}
            for n in range(1, numba.config.NUMBA_NUM_THREADS + 1):
                numba.set_num_threads(n)
                results[n] = all_of(case)
                for name, array in results[n].items():
                    assert_close(name, array, reference)
                numba.set_num_threads(n)
                assert_same_bits(all_of(case), results[n])
    finally:
        numba.set_num_threads(before)


def test_many_calls_at_once_do_not_crowd_the_cores(monkeypatch):
    """Six Python threads call; no more kernels run at any time than Numba may have threads."""
    limit, lock = 2, threading.Lock()
    monkeypatch.setattr(launch, "_cores", threading.Semaphore(limit))
    running = most = 0
    done = []

    def kernel(counter, worker, pieces, name):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        while True:
            with lock:
                piece, counter[0] = int(counter[0]), counter[0] + 1
            if piece >= pieces:
                break
            time.sleep(0.002)
            done.append((name, piece))
        with lock:
            running -= 1

    def call(name):
        launch.run(kernel, 20, 20, name)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(call, range(6))) == [None] * 6
    assert most == limit and running == 0
    assert sorted(done) == [(name, piece) for name in range(6) for piece in range(20)]


@kernels
def test_a_pullback_may_be_called_on_another_thread(backend, algorithm):
    case = cases(backend, algorithm)[0]
    expected = all_of(case)
    out, pullback = rf.attention_vjp(case.q, case.k, case.v, **case.options)
    with ThreadPoolExecutor(1) as pool:
        gradients = pool.submit(pullback, case.dout, dlse=case.dlse).result()
    np.testing.assert_array_equal(out, expected["out"])
    for name, gradient in zip(case.wrt, gradients, strict=True):
        np.testing.assert_array_equal(gradient, expected["d" + name])


@kernels
def test_an_error_on_one_thread_does_not_disturb_the_others(backend, algorithm):
    case = cases(backend, algorithm)[0]
    expected = all_of(case)

    def work(n):
        if n % 2:
            with pytest.raises(rf.ProblemError):
                rf.attention(case.q, case.k[..., :3], case.v, backend=backend)
            return expected
        return all_of(case)

    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(work, range(12)):
            assert_same_bits(results, expected)


def _in_child(connection, case):
    try:
        connection.send(all_of(case))
    except BaseException as error:
        connection.send(repr(error))
        raise
    finally:
        connection.close()


#: A call when Python no longer starts threads: the pool is shut down, or it is too late to make one.
LATE = """
import atexit, sys, threading, time
import numpy as np
import rawflash as rf

q = np.random.default_rng(0).standard_normal((1, 4, 64, 8)).astype(np.float32)
expected = rf.attention(q, q, q, backend="numpy_tiled")

def late():
    if sys.argv[1] == "thread":
        threading.main_thread().join()
        time.sleep(0.2)
    np.testing.assert_allclose(rf.attention(q, q, q, backend="numba_cpu"), expected, atol=1e-5)
    print("as ever")

if sys.argv[2] == "again":
    rf.attention(q, q, q, backend="numba_cpu")
threading.Thread(target=late).start() if sys.argv[1] == "thread" else atexit.register(late)
"""


@pytest.mark.parametrize("first", ["first", "again"])
@pytest.mark.parametrize("where", ["thread", "atexit"])
def test_calls_as_python_ends(where, first):
    environment = os.environ | {"NUMBA_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", LATE, where, first], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout == "as ever\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_while_another_thread_starts_the_pool():
    """That thread's lock is not the child's, which has nobody to give it back."""
    case = cases("numba_cpu", "fa2")[0]
    with launch._pool_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = multiprocessing.get_context("fork").Process(target=all_of, args=(case,))
        child.start()
    child.join(60)
    assert child.exitcode == 0
    child.kill()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@kernels
def test_a_forked_child_computes_the_same_bits(backend, algorithm):
    """A child has the parent's memory and none of its threads: a pool must be started anew."""
    case = cases(backend, algorithm)[0]
    expected = all_of(case)  # threads are running now
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(sender, case))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12: forking with threads is what is tested
        child.start()
    sender.close()
    try:
        assert receiver.poll(60), "the child hangs"
        results = receiver.recv()
        assert not isinstance(results, str), results
        assert_same_bits(results, expected)
        child.join(60)
        assert child.exitcode == 0
    finally:
        if child.is_alive():
            child.kill()
            child.join()
    assert_same_bits(all_of(case), expected)  # and the parent goes on
