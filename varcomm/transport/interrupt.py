"""Ctrl-C that waits while something is done that must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["interrupt_later"]


@contextmanager
def interrupt_later() -> Iterator[None]:
    """Hold Ctrl-C back, and let it do what it does after the block; for what takes no time.

    Signals are handled in the main thread alone: elsewhere there is nothing to hold back.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pressed = []
    signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)
