"""Ctrl-C that is held back comes after the block, and nothing else changes."""

import signal
import threading

import pytest

from varcomm.transport.interrupt import interrupt_later


@pytest.fixture
def handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_it_comes_after_the_block(handler):
    done = []

    def work():
        with interrupt_later():
            signal.raise_signal(signal.SIGINT)
            done.append("the block")
        done.append("what follows")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the block"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_who_ignores_it_goes_on_ignoring_it(handler):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupt_later():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_have_nothing_to_hold_back(handler):
    found = []

    def run():
        with interrupt_later():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [handler]
