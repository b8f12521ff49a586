"""One thread at a time in the engines, and none kept out by one that turns them again and again."""

import _thread
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from timing import wait_until

from underpaint.turnstile import Turnstile


def begin(*calls: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def end(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a thread was kept out"


def test_one_at_a_time() -> None:
    turnstile, inside, most = Turnstile(), 0, 0

    def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.0005)
        inside -= 1

    def hold() -> None:
        for _ in range(20):
            with turnstile:
                work()

    def turn() -> None:
        for _ in range(20):
            turnstile.turn(work)

    end(begin(*[hold] * 4, *[turn] * 4))
    assert most == 1


def test_a_turn_is_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    turnstile, turns = Turnstile(), 0
    began, goes_on = threading.Event(), threading.Event()

    def work() -> None:
        nonlocal turns
        turns += 1
        began.set()
        assert goes_on.wait(30)

    first = begin(lambda: turnstile.turn(work))
    assert began.wait(30)
    assert turnstile.turning
    waiting, wait_for = [], turnstile._changed.wait_for

    def watched(condition: Callable[[], bool]) -> bool:
        waiting.append(condition)
        return wait_for(condition)

    monkeypatch.setattr(turnstile._changed, "wait_for", watched)
    others = begin(*[lambda: turnstile.turn(work)] * 8)
    wait_until(lambda: len(waiting) == 8)
    goes_on.set()
    end([*first, *others])
    assert turns == 1
    assert not turnstile.turning


def test_whoever_holds_goes_before_the_next_turn() -> None:
    """Twenty who come in the middle of a turn, of a thread that turns without end."""
    turnstile, turns, seen = Turnstile(), 0, []
    began, goes_on, stop = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        nonlocal turns
        turns += 1
        began.set()
        assert goes_on.wait(30)

    def turn() -> None:
        while not stop.is_set():
            turnstile.turn(work)

    def hold() -> None:
        with turnstile:
            seen.append(turns)

    turning = begin(turn)
    assert began.wait(30)
    holding = begin(*[hold] * 20)
    wait_until(lambda: turnstile._num_waiting == 20)
    goes_on.set()
    end(holding)
    stop.set()
    end(turning)
    assert seen == [1] * 20


def test_a_turn_that_breaks_is_over() -> None:
    turnstile = Turnstile()

    def broken() -> None:
        raise ValueError("it broke")

    for _ in range(2):
        with pytest.raises(ValueError, match="it broke"):
            turnstile.turn(broken)
    with turnstile:
        assert not turnstile.turning


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Also where the tests run in the background of a script, whose shell has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_anywhere_leaves_the_way_open() -> None:
    """The main thread is interrupted again and again, and goes through once more, as whoever waits for an order does to
    drop it. Nothing is left that it or another would wait for."""
    turnstile, done, seed = Turnstile(), False, random.Random(1)
    goes = threading.Event()

    def interrupt() -> None:
        while goes.wait(30) and not done:
            goes.clear()
            time.sleep(seed.random() * 0.0004)
            if not done:
                _thread.interrupt_main()

    def turn_without_end() -> None:
        goes.set()
        while True:
            turnstile.turn(lambda: None)

    def pass_through() -> None:
        turnstile.turn(lambda: None)
        with turnstile:
            pass

    interrupting = begin(interrupt)
    for _ in range(100):
        with pytest.raises(KeyboardInterrupt):
            turn_without_end()
        with turnstile:
            pass
        end(begin(pass_through))
    done = True
    goes.set()
    end(interrupting)
