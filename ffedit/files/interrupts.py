"""Delay of an interrupt (Ctrl-C) until an accumulation is complete."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def delay_interrupt() -> Iterator[None]:
    """Delay an interrupt until the end of the block, so that what the block adds is added completely or not at all."""
    ours = threading.current_thread() is threading.main_thread()  # only this thread is interrupted or may set a handler
    before = signal.getsignal(signal.SIGINT)
    if not ours or before is None:
        yield
        return
    waiting: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting:
        signal.raise_signal(signal.SIGINT)
