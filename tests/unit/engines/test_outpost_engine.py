"""The engine of outposts, when the user interrupts its waiting."""

import contextlib
import signal

import pytest

from syncline.engines.outposts.engine import OutpostEngine


class Interrupted(OutpostEngine):
    """Ctrl-C comes `after_s` after the last that it does before it waits."""

    after_s = 0.0

    def _trouble(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.after_s)


def test_ctrl_c_comes_through_at_whatever_moment_of_the_waiting():
    with contextlib.closing(Interrupted("127.0.0.1")) as engine:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            for microseconds in [*range(1, 200)] * 2:
                engine.after_s = microseconds / 1e6
                with pytest.raises(KeyboardInterrupt):
                    engine.gather(1, lambda text: None)
        finally:
            signal.signal(signal.SIGALRM, before)
