"""A process that scores pieces: `python -m syncline.serving.scoring.worker FD`, where FD is its end of a pipe.

Here: asking for pieces, until there are none. Not here: who gives them out (`processes.py`), and scoring one
(`piece_scorer.py`).
"""

from __future__ import annotations

import signal
import sys
from multiprocessing.connection import Connection

from syncline.compute.processes import die_with_parent
from syncline.serving.scoring.piece_scorer import PieceScorer


def work(connection: Connection) -> None:
    """Score the pieces that come through the pipe. An error is sent back through it."""
    try:
        scorer = PieceScorer(connection.recv())
        connection.send("ready")
        while (piece := connection.recv()) is not None:
            scorer.score(piece)
            connection.send("done")
    except (EOFError, ConnectionError):
        return  # the one that has started this process is gone
    except Exception as error:
        connection.send(error)


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that has started this process handles Ctrl-C
    work(Connection(int(sys.argv[1])))
