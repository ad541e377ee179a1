"""Ctrl-C never cuts through an optimiser step unless it comes twice."""

import signal
import threading
from collections.abc import Callable

import pytest

from tessera_cli.distill.training.interrupt import DeferredInterrupt


def press_ctrl_c(times: int, then: Callable[[], object]) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)
    then()


def test_a_first_interrupt_waits_for_the_end_of_the_step():
    told: list[str] = []
    ctrl_c = DeferredInterrupt(lambda: told.append("waiting"))
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c.installed(), pytest.raises(KeyboardInterrupt), ctrl_c.step():
        press_ctrl_c(1, then=lambda: told.append("end of step"))
    assert told == ["waiting", "end of step"]
    assert not ctrl_c.forced
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_cuts_through_and_says_so():
    ctrl_c = DeferredInterrupt(lambda: None)
    with ctrl_c.installed(), pytest.raises(KeyboardInterrupt), ctrl_c.step():
        press_ctrl_c(2, then=lambda: pytest.fail("the second one did not cut through"))
    assert ctrl_c.forced


def test_between_steps_an_interrupt_is_immediate():
    ctrl_c = DeferredInterrupt(lambda: pytest.fail("nothing is to wait for"))
    with ctrl_c.installed(), pytest.raises(KeyboardInterrupt):
        press_ctrl_c(1, then=lambda: pytest.fail("it did not cut through"))
    assert not ctrl_c.forced


def test_outside_the_main_thread_nothing_is_changed():
    seen = []

    def work() -> None:
        with DeferredInterrupt(lambda: None).installed() as ctrl_c, ctrl_c.step():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
