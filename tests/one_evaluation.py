"""How often do results exceed the bound of the contract if E is the error of one evaluation of the dense formula?

``python tests/one_evaluation.py [--problems N] [--seed N] [--own]``: N drawn problems, forward and every gradient by
every CPU kernel. E starts from the out and lse that the backward call was given, or with ``--own`` from those of the
evaluation itself. One evaluation is a sample (rawflash/accuracy.py says more), so this is a count and no test.
"""

import argparse
from collections import defaultdict

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from strategies import problems
from test_forward import KERNELS

from rawflash import accuracy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=600)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--own", action="store_true")
    options = parser.parse_args()
    ratios, seen = defaultdict(list), 0

    @seed(options.seed)
    @settings(
        max_examples=options.problems, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(problems())
    def draw(case):
        nonlocal seen
        seen += 1
        case.wrt = ("q", "k", "v", *(name for name in ("bias", "sinks") if name in case.options))
        for backend, algorithm in KERNELS:
            run = dict(backend=backend, algorithm=algorithm)
            out, lse = case.forward(**run)
            results = {"out": out, "lse": lse}
            results |= {"d" + name: g for name, g in zip(case.wrt, case.backward(out, lse, **run), strict=True)}
            start = {} if options.own else dict(out=out, lse=lse)
            reference = case.reference(evaluations=1, **start)
            for name, result in results.items():
                ratio = accuracy.error_ratio(name, result, reference)
                ratios[backend, algorithm, case.q.dtype.name].append(ratio)
                if ratio > 1:
                    print(f"{backend} {algorithm} {case.q.dtype} {name}: {ratio:.3f}", case, flush=True)

    draw()
    print(f"{seen} problems")
    print(f"{'backend':<12} {'algorithm':<10} {'dtype':<9} results  worst  exceeding")
    for (backend, algorithm, dtype), found in sorted(ratios.items()):
        exceeding = np.sum(np.array(found) > 1)
        print(f"{backend:<12} {algorithm:<10} {dtype:<9} {len(found):>7}  {max(found):.3f}  {exceeding:>9}")


if __name__ == "__main__":
    main()
