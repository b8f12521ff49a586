"""Who may touch the engines, and when: many threads want them turned, and one at a time can.

A plain lock is not enough. The thread that lets it go has it again before any other wakes, so that one painting keeps
all others from being heard; and of N threads in line, each would learn what it waits for at its own turn, one in N.
"""

import threading
from collections.abc import Callable


class Turnstile:
    """``with`` it, the engines are held: for what takes a moment. ``turn`` is for what takes long and is done again
    and again; whoever wants to hold them goes before the next turn, and a turn is for all who wait for one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = False
        self._num_waiting = 0
        self._turning = False
        self._num_turns = 0

    @property
    def turning(self) -> bool:
        return self._turning

    def __enter__(self) -> None:
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._held)
                self._held = True
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()  # a turn may wait for whoever gives up waiting

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def turn(self, work: Callable[[], None]) -> None:
        """Do ``work``, holding the engines; or, where another thread is at that, wait until it has done its own."""
        with self._changed:
            if self._turning:
                others = self._num_turns
                self._changed.wait_for(lambda: self._num_turns != others)
                return
            self._turning = True
        try:
            self._wait_behind_holders()
            with self:
                work()
        finally:
            with self._changed:
                self._turning = False
                self._num_turns += 1
                self._changed.notify_all()

    def _wait_behind_holders(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._held and not self._num_waiting)
