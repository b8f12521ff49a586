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
        self._lock = threading.Lock()  # taken itself, not through the condition, whose methods Ctrl-C may cut in two
        self._changed = threading.Condition(self._lock)
        # Threads, not flags: Ctrl-C may keep one from letting go, and then it finds itself here when it comes again.
        self._holder: int | None = None
        self._turner: int | None = None
        self._num_waiting = 0
        self._num_turns = 0

    @property
    def turning(self) -> bool:
        return self._turner is not None

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: self._holder in (None, me))
                self._holder = me
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()  # a turn may wait for whoever gives up waiting

    def __exit__(self, *_: object) -> None:
        self._holder = None
        with self._lock:
            self._changed.notify_all()

    def turn(self, work: Callable[[], None]) -> None:
        """Do ``work``, holding the engines; or, where another thread is at that, wait until it has done its own."""
        me = threading.get_ident()
        try:
            with self._lock:
                if self._turner not in (None, me):
                    others = self._num_turns
                    self._changed.wait_for(lambda: self._num_turns != others)
                    return
                self._turner = me
            self._wait_behind_holders(me)
            with self:
                work()
        finally:
            if self._turner == me:
                self._turner = None
                self._num_turns += 1
                with self._lock:
                    self._changed.notify_all()

    def _wait_behind_holders(self, me: int) -> None:
        with self._lock:
            self._changed.wait_for(lambda: self._holder in (None, me) and not self._num_waiting)
