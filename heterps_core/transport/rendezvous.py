"""The store at which the workers of a generation find one another; the first worker of one machine holds it.

It listens on that machine's own address, and takes entries from members of the run alone: each connection begins with
a proof of the run's key at both ends (HMAC-SHA256 of two random challenges, RFC 2104). torch's own store listens on
all interfaces and trusts whoever connects. gloo trusts whoever is first to connect to a worker; so the members of a
group prove the key over the connections that gloo has made, before they exchange anything else.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

PROOF_LIMIT_S = 10.0
"""Longest time of a whole proof of the key, however slowly its bytes come, or of a connection's start."""

_RETRY_INTERVAL_S = 0.2

_CHALLENGE_BYTES = _TAG_BYTES = hashlib.sha256().digest_size
_HOST, _MEMBER = b"host", b"member"
_SESSION = "session"
_CLOSED = "its connection is closed"

MOST_UNPROVEN = 64
"""Connections whose proof is awaited at a time, lest strangers use up the files that a worker may have open."""

logger = logging.getLogger(__name__)


class _RendezvousStore(Store):
    """A member's connection with the store; torch calls its methods, and needs it for as long as its groups live.

    Args:
        messages: The connection, proven.
        limit: Longest wait for an entry, where none is given.
    """

    def __init__(self, messages: BinaryIO, limit: timedelta) -> None:
        super().__init__()
        self._messages, self._limit = messages, limit
        self._calling = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        """Write an entry."""
        self._call("set", key, (value if isinstance(value, bytes) else value.encode()).hex())

    def get(self, key: str) -> bytes:
        """Return an entry, once it is there; raises as `wait`."""
        self.wait([key])
        return bytes.fromhex(self._call("get", key))

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        """Return once all entries are there.

        Raises:
            DistStoreError: They were not in time.
            DistNetworkError: The store has ended.
        """
        limit_s = (self._limit if limit is None else limit).total_seconds()
        if not self._call("wait", list(keys), limit_s):
            raise dist.DistStoreError(f"{', '.join(keys)} must be in the store within {limit_s:.0f} s")

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all entries are there."""
        return bool(self._call("wait", list(keys), 0.0))

    def add(self, key: str, amount: int) -> int:
        """Add to a count, and return it."""
        return int(self._call("add", key, amount))

    def proof_key(self, key: bytes) -> bytes:
        """Return the key of proofs by this store alone, as a resumed run has its key and generation again."""
        return _tag(key, self.get(_SESSION))

    def has_extended_api(self) -> bool:
        """Tell that there are no other operations."""
        return False

    def clone(self) -> Store:
        """Return this same store, which several threads may use."""
        return self

    def _call(self, operation: str, *arguments: object) -> Any:
        try:
            with self._calling:
                _send(self._messages, [operation, *arguments])
                return _receive(self._messages)
        except (OSError, EOFError) as error:
            raise dist.DistNetworkError(f"the store of the workers has ended: {error}") from error


class _Entries:
    """Entries of the members; values are hexadecimal digits."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> str:
        return self._values[key]

    def wait(self, keys: Sequence[str], limit_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._values.keys() >= set(keys), limit_s)

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            count = int(bytes.fromhex(self._values.get(key, "")) or b"0") + amount
            self.set(key, str(count).encode().hex())
            return count


def open_store(
    host: str, port: int, *, key: bytes, generation: int, is_host: bool, limit: timedelta
) -> _RendezvousStore:
    """Return the store of a generation, which has nothing of those before.

    A worker may be earlier than the one that holds the store: it then meets nobody, or the store of the generation
    before, whose proof is another, and tries again.

    Args:
        host: Address of the machine that holds it, which listens there alone.
        key: Of the run.
        is_host: This process holds it, to its end.
        limit: Longest wait for it, and for an entry.

    Raises:
        DistNetworkError: It was not there in time, or another program has its port.
    """
    until_s = time.monotonic() + limit.total_seconds()
    try:
        if is_host:
            _hold(socket.create_server((host, port), backlog=1024), key=key, generation=generation)
        while True:
            try:
                with socket.create_connection((host, port), timeout=PROOF_LIMIT_S) as connection:
                    messages = _proven(connection, key, generation, own=_MEMBER, other=_HOST)
                    connection.settimeout(limit.total_seconds() + PROOF_LIMIT_S)
                    return _RendezvousStore(messages, limit)
            except (OSError, EOFError):
                if time.monotonic() >= until_s:
                    raise
                time.sleep(_RETRY_INTERVAL_S)
    except (OSError, EOFError) as error:
        raise dist.DistNetworkError(
            f"workers must meet at {host}:{port}, where the first of generation {generation} listens and proves the "
            f"run's key, but within {limit.total_seconds():.0f} s: {error}"
        ) from error


def prove_members(group: ProcessGroup, key: bytes, *, generation: int) -> None:
    """Check that at the other end of each of a group's connections is the member that it is said to be.

    Every member calls it, before anything else is exchanged.

    Args:
        key: `_RendezvousStore.proof_key`.

    Raises:
        DistNetworkError: One has not the run's key.
    """
    members = range(dist.get_world_size(group))
    own = dist.get_rank(group)

    def proof(sender: int, receiver: int) -> bytes:
        return _tag(key, f"{group.group_name} of {generation}: {sender} to {receiver}".encode())

    sent = torch.frombuffer(bytearray().join(proof(own, other) for other in members), dtype=torch.uint8)
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    for other, tag in zip(members, found.view(len(members), _TAG_BYTES), strict=True):
        if not hmac.compare_digest(tag.numpy().tobytes(), proof(other, own)):
            raise dist.DistNetworkError(
                f"member {other} of group {group.group_name} must prove the run's key, but did not: another program "
                f"has connected in its place; end programs of other users on this machine"
            )


def _hold(listener: socket.socket, *, key: bytes, generation: int) -> None:
    """Answer members from threads, to the end of this process."""
    entries = _Entries()
    entries.set(_SESSION, secrets.token_hex(_CHALLENGE_BYTES))
    unproven = threading.BoundedSemaphore(MOST_UNPROVEN)

    def answer(connection: socket.socket, address: object) -> None:
        with connection:
            try:
                messages = _proven(connection, key, generation, own=_HOST, other=_MEMBER)
            except (OSError, EOFError) as error:
                logger.warning("refused %s at the rendezvous: %s", address, error)
                return
            finally:
                unproven.release()
            connection.settimeout(None)
            try:
                while True:
                    operation, *arguments = _receive(messages)
                    _send(messages, getattr(entries, operation)(*arguments))
            except (OSError, EOFError):
                # A member has ended.
                return

    def accept() -> None:
        while True:
            unproven.acquire()
            try:
                connected = listener.accept()
                threading.Thread(target=answer, args=connected, name="member", daemon=True).start()
            except (OSError, RuntimeError) as error:
                unproven.release()
                logger.warning("the rendezvous cannot take a connection: %s", error)
                time.sleep(_RETRY_INTERVAL_S)

    threading.Thread(target=accept, name="rendezvous", daemon=True).start()


def _proven(connection: socket.socket, key: bytes, generation: int, *, own: bytes, other: bytes) -> BinaryIO:
    """Return a connection as a file of messages, which keeps it open, once both ends have proven the key.

    Raises:
        OSError: The other end did not.
        EOFError: It has closed the connection.
    """
    until_s = time.monotonic() + PROOF_LIMIT_S

    def receive(num_bytes: int) -> bytes:
        content = b""
        while len(content) < num_bytes:
            connection.settimeout(max(until_s - time.monotonic(), 0.0))
            part = connection.recv(num_bytes - len(content))
            if not part:
                raise EOFError(_CLOSED)
            content += part
        return content

    challenges = {own: secrets.token_bytes(_CHALLENGE_BYTES)}
    connection.sendall(challenges[own])
    challenges[other] = receive(_CHALLENGE_BYTES)
    asked = b"%d" % generation + challenges[_HOST] + challenges[_MEMBER]
    connection.sendall(_tag(key, own + asked))
    if not hmac.compare_digest(receive(_TAG_BYTES), _tag(key, other + asked)):
        raise ConnectionRefusedError("it has not proven the key of the run and its generation")
    return cast(BinaryIO, connection.makefile("rwb"))


def _tag(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")


def _send(messages: BinaryIO, message: object) -> None:
    messages.write(json.dumps(message).encode() + b"\n")
    messages.flush()


def _receive(messages: BinaryIO) -> Any:
    line = messages.readline()
    if not line.endswith(b"\n"):
        raise EOFError(_CLOSED)
    return json.loads(line)
