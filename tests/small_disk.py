"""A real file system of a few hundred kilobytes that can be filled to its last byte."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CAN_MOUNT = os.geteuid() == 0


@dataclass(frozen=True, kw_only=True)
class SmallDisk:
    """A mounted file system."""

    path: Path

    def fill(self) -> None:
        """Write until nothing more can be written."""
        with (self.path / "filling").open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4_096))
                except OSError:
                    return

    def empty(self) -> None:
        """Give back what `fill` took."""
        (self.path / "filling").unlink(missing_ok=True)

    def set_read_only(self, is_read_only: bool = True) -> None:
        """Let nothing be written any more, as the kernel does after an error of the disk, or let it again."""
        options = f"remount,{'ro' if is_read_only else 'rw'}"
        subprocess.run(["mount", "-o", options, str(self.path)], check=True)


@contextmanager
def mounted(path: Path, *, size: str = "400k") -> Iterator[SmallDisk]:
    """Mount a tmpfs at a path.

    Raises:
        OSError: It is not allowed here.
    """
    path.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, check=False
    )
    if done.returncode:
        raise OSError(done.stderr.decode().strip())
    try:
        yield SmallDisk(path=path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
