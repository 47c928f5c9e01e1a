"""What memory is allocated while something runs."""

from torch.profiler import ProfilerActivity, profile


def allocated(fn, least=0):
    """Bytes of each piece of memory of `least` bytes or more, those that torch's own code takes
    for itself included; ascending.
    """
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        fn()
    events = profiled.profiler.kineto_results.events()
    sizes = (event.nbytes() for event in events if event.name() == "[memory]")  # < 0: given back
    return sorted(size for size in sizes if size > 0 and size >= least)
