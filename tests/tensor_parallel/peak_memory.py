"""What memory code needs at its peak, told by the allocator itself."""

from torch.autograd.profiler import profile


class Peak:
    """Count the most bytes that live at once, of those that a block takes on the CPU.

    Each allocation and each release of torch's allocator is an event of the profiler, also those
    inside of kernels, which nobody sees in Python.
    """

    def __enter__(self):
        self._profile = profile(use_device=None, profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        events = self._profile.kineto_results.events()
        changes = sorted(
            (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
        )
        self.bytes = live = 0
        for _, change in changes:
            live += change
            self.bytes = max(self.bytes, live)


def peak_of(fn, *args):
    """Return the peak of a call, with its result still alive, and the result."""
    with Peak() as peak:
        result = fn(*args)
    return peak.bytes, result
