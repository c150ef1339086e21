"""A second process of a measurement: the other end of links, then a worker that trains beside the measured one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from heterps_core.errors import HeterpsError

_WORK, _WAIT = b"work", b"wait"


class Neighbour:
    """The second process, which waits at first.

    Args:
        connection: With it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let it take steps within the block, the first of which has ended when the block begins.

        Raises:
            HeterpsError: It has ended.
        """
        self._say(_WORK)
        yield
        self._say(_WAIT)

    def _say(self, word: bytes) -> None:
        try:
            self._connection.send_bytes(word)
            self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise HeterpsError("the process that trains beside the measured one has ended") from error


@contextmanager
def neighbour_process(prepare: Callable[[], Callable[[], object]]) -> Iterator[Neighbour]:
    """Fork the second process, and end it on every way out.

    A fork has loaded torch. No thread must run yet.

    Args:
        prepare: What the process does first; returns a function that takes a step.
    """
    context = multiprocessing.get_context("fork")
    own, its = context.Pipe()
    process = context.Process(target=_follow, args=(own, its, prepare))
    process.start()
    its.close()
    try:
        yield Neighbour(own)
    finally:
        process.kill()
        process.join()


def _follow(own: Connection, its: Connection, prepare: Callable[[], Callable[[], object]]) -> None:
    """Take steps while the measuring process says so; end when it has gone."""
    own.close()
    take_step, word = prepare(), _WAIT
    with suppress(EOFError, OSError):
        while True:
            if word == _WORK:
                take_step()
            if word == _WAIT or its.poll():
                word = its.recv_bytes()
                if word == _WORK:
                    take_step()
                its.send_bytes(word)
