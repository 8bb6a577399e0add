"""An interrupt (Ctrl-C) that waits until what is being added up is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def delay_interrupt() -> Iterator[None]:
    """Let an interrupt wait for the end of the block: what it adds up is added wholly or not at all."""
    ours = threading.current_thread() is threading.main_thread()  # no other thread is interrupted, or may ask not to be
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
