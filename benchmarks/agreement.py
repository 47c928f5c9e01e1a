"""Cost of the comparison of calls at sums: ``python benchmarks/agreement.py``.

Each row is timed with `varcomm.init(agreement=...)` on and off, in turns. The last row has Python's
time of an eager call alone: what it takes to add a call to the log of a group.
"""

import argparse
import time
from functools import partial

import torch
import torch.distributed as dist
from measuring import arguments, median, slowest, spread, table, turns_of

import varcomm as vc
from varcomm.data_parallel import sum_gradients
from varcomm.transport.call_log import CallLog, word_of

SUMS = {"sum, 4 B": 1, "sum, 1 KiB": 256, "sum, 16 KiB": 4096}  # fp32
HIDDEN = 256


def step(model, x):
    model(x).square().sum().backward()
    sum_gradients(model)
    model.zero_grad()


def calls():
    """Return the calls that are timed, by name."""
    made = {name: partial(vc.all_reduce, torch.ones(count)) for name, count in SUMS.items()}
    made["all_gather_v, 1 KiB"] = partial(vc.all_gather_v, torch.ones(256), [256] * vc.init().size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(4)])
    made["a step with sum_gradients"] = partial(step, model, torch.ones(8, HIDDEN))
    return made


def seconds(call, count):
    """Return the seconds of a call, the median of some."""
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return median(found)


def on_ranks(rank, turns, count):
    """Return the seconds of each turn with the comparison and without, by call."""
    torch.set_num_threads(1)
    found = {name: {True: [], False: []} for name in calls()}
    for name, call in calls().items():
        for turn in range(turns):
            for agreement in turns_of((True, False), turn):
                vc.init(agreement=agreement)
                seconds(call, 5)  # calls are prepared again
                dist.barrier()
                found[name][agreement].append(seconds(call, count))
    return found


def of_log(turns, count):
    """Return the microseconds in which a call is added to a log."""
    log, entry, found = CallLog(), ("all_gather_v", word_of("all_gather_v")), []
    for _ in range(turns):
        begin = time.perf_counter()
        for _ in range(count):
            log.add(entry)
        found.append((time.perf_counter() - begin) / count)
    return 1e6 * median(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = arguments(parser, ranks=2, turns=21, count=200)
    found = vc.launch(on_ranks, options.ranks, options.turns, options.count)
    rows = []
    for name in found[0]:
        on, off = (
            slowest([each[name][agreement] for each in found]) for agreement in (True, False)
        )
        rows.append([name, f"{1e6 * median(on):.1f}", f"{1e6 * median(off):.1f}", spread(on, off)])
    rows.append(["a call in the log", f"{of_log(options.turns, 10_000):.2f}", "0", ""])
    table(["call", "on, us", "off, us", "on / off (quartiles)"], rows)


if __name__ == "__main__":
    main()
