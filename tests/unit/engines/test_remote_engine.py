"""The remote engine, when the user interrupts its start."""

import contextlib
import signal

import pytest

from syncline.engines.remote.engine import RemoteEngine


class Interrupted(RemoteEngine):
    """Ctrl-C arrives `after_s` after the last call before it waits."""

    after_s = 0.0

    def _startup_problem(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self.after_s)


def test_ctrl_c_interrupts_the_wait_for_agents_at_any_moment():
    with contextlib.closing(Interrupted("127.0.0.1")) as engine:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            for microseconds in [*range(1, 200)] * 2:
                engine.after_s = microseconds / 1e6
                with pytest.raises(KeyboardInterrupt):
                    engine.reserve(1, lambda text: None)
        finally:
            signal.signal(signal.SIGALRM, before)
