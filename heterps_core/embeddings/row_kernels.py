"""Look-ups and row updates in C++, compiled at first use where a compiler is at hand; else torch does the same.

The library is kept by the content of its sources, the compiler's flags and the processor. It uses torch's threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.embeddings.bags import Bags
from heterps_core.embeddings.row_range import RowRange

logger = logging.getLogger(__name__)

HOME_VARIABLE = "HETERPS_HOME"
_SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("row_kernels.cpp", "row_lists.cpp", "id_kernels.cpp")
)
_FLAGS = ("-O3", "-fno-math-errno", "-std=c++17", "-fopenmp", "-fPIC", "-shared")
_BUILD_TIMEOUT_S = 120


class _Table(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("num_rows", c_int64),
        ("width", c_int64),
        ("changed", c_void_p),
        ("l2", c_float),
    )


class _Shard(ctypes.Structure):
    _fields_ = (("is_cut", c_int64), ("first_row", c_int64))


class _Bags(ctypes.Structure):
    _fields_ = (("starts", c_void_p), ("num_bags", c_int64))


class _Part(ctypes.Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("gradients", c_void_p),
        ("num_samples", c_int64),
        ("num_slots", c_int64),
        ("sample_stride", c_int64),
        ("bags", _Bags),
    )


class RowKernels:
    """The functions of the compiled library, for contiguous float32 tables on the CPU.

    Shapes: R rows of the table, D width of a row, B samples, S rows that a sample looks up; with bags, as in `Bags`.
    """

    def __init__(self, library: Path) -> None:
        self.library = loaded = ctypes.CDLL(str(library))
        self._gather = loaded.heterps_gather
        self._gather.argtypes = (POINTER(_Table), c_void_p, *[c_int64] * 2, c_void_p, *[c_int64] * 2)
        self._pool = loaded.heterps_pool
        self._pool.argtypes = (*self._gather.argtypes[:4], POINTER(_Bags), *self._gather.argtypes[4:])
        self._updates = {
            "sgd": _typed(loaded.heterps_sgd, num_states=0, num_constants=0),
            "adagrad": _typed(loaded.heterps_adagrad, num_states=1, num_constants=1),
            "adam": _typed(loaded.heterps_adam, num_states=3, num_constants=3),
        }
        self._changed = loaded.heterps_changed
        self._changed.argtypes = (c_void_p, c_int64, c_void_p)
        self._gather.restype = self._pool.restype = self._changed.restype = c_int64

    def gather(self, weight_RD: Tensor, rows_BS: Tensor, out_BX: Tensor, bags: Bags | None = None) -> None:
        """Copy rows [B, S], int64, into columns [B, S * D], float32 or bfloat16, which may be of a wider tensor.

        With bags the sums of their rows are written, [B, G * D].

        Raises:
            IndexError: A row is not in the table; what was written is undefined.
        """
        rows_BS = rows_BS.contiguous()
        bags = None if bags is None else bags.of(rows_BS)
        bad = (self._gather if bags is None else self._pool)(
            byref(_table(weight_RD)),
            rows_BS.data_ptr(),
            *rows_BS.shape,
            *(() if bags is None else (byref(_bags(bags, rows_BS)),)),
            out_BX.data_ptr(),
            out_BX.stride(0),
            out_BX.dtype is torch.bfloat16,
        )
        _check_range(bad, (rows_BS,), len(weight_RD))

    def update(
        self,
        rule: str,
        weight_RD: Tensor,
        states: Sequence[Tensor],
        parts: Sequence[tuple[Tensor, Tensor]],
        *,
        learning_rate: float,
        l2: float = 0.0,
        constants: Sequence[float] = (),
        shard: RowRange | None = None,
        bags: Bags | None = None,
        changed_R: Tensor | None = None,
    ) -> None:
        """Sum the gradients of repeated rows and update each row once, in place.

        Parts, marks of changed rows and `l2` are those of `RowOptimizer.update_repeated`; states and constants are in
        the order of the rule.

        Raises:
            IndexError: A row is not in the table, and there is no larger one; nothing is updated then.
        """
        rows = [rows_BS.contiguous() for rows_BS, _ in parts]
        gradients = [_with_dense_rows(gradients_BX) for _, gradients_BX in parts]
        described = (_Part * len(parts))(
            *(
                _Part(
                    rows_BS.data_ptr(), part.data_ptr(), *rows_BS.shape, part.stride(0), _bags(bags, rows_BS)
                )
                for rows_BS, part in zip(rows, gradients, strict=True)
            )
        )
        bad = self._updates[rule](
            byref(_table(weight_RD, changed_R, l2)),
            byref(_Shard(shard is not None, 0 if shard is None else shard.first)),
            described,
            len(parts),
            gradients[0].dtype is torch.bfloat16,
            *(state.data_ptr() for state in states),
            learning_rate,
            *constants,
        )
        _check_range(bad, rows, len(weight_RD))

    def take_changed(self, changed_R: Tensor) -> Tensor:
        """Return the rows [U] that are marked, ascending, and clear the marks; each is 0 or 1 in one byte."""
        count = self._changed(changed_R.data_ptr(), len(changed_R), None)
        rows_U = torch.empty(count, dtype=torch.int64, device=CPU)
        self._changed(changed_R.data_ptr(), len(changed_R), rows_U.data_ptr() if count else None)
        return rows_U


def kernels_for(weight_RD: Tensor) -> RowKernels | None:
    """Return the kernels where they can work on this table."""
    fits = weight_RD.device.type == "cpu" and weight_RD.dtype == torch.float32 and weight_RD.is_contiguous()
    return row_kernels() if fits else None


@functools.cache
def row_kernels() -> RowKernels | None:
    """Return the compiled kernels, or None where they cannot be built here; the log says why, once."""
    try:
        return RowKernels(build(_cache_folder()))
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        output = getattr(error, "stderr", None)
        reason = output.strip().splitlines()[0] if output and output.strip() else error
        logger.warning("embedding rows are updated by torch, about half as fast as by a kernel: %s", reason)
        return None


def compiled_functions(declare: Callable[[ctypes.CDLL], None]) -> Any:
    """Return the library that holds the kernels, once `declare` has set the types of some of its functions.

    None where it cannot be built here.
    """
    kernels = row_kernels()
    return None if kernels is None else _declared(kernels.library, declare)


@functools.cache
def _declared(library: ctypes.CDLL, declare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL:
    declare(library)
    return library


def compiler_flags(machine: str, *, processor: str = "native") -> tuple[str, ...]:
    """Return the flags for a machine, as `platform.machine` names it, and a processor, as g++ and clang++ name it.

    On Arm -mcpu chooses instructions and their schedule, and clang++ knows no -march=native; on x86 -march does both.

    Example:
        >>> compiler_flags("aarch64")[-1], compiler_flags("x86_64", processor="icelake-server")[-1]
        ('-mcpu=native', '-march=icelake-server')
    """
    option = "-mcpu" if machine in ("aarch64", "arm64") else "-march"
    return (*_FLAGS, f"{option}={processor}")


def build(folder: Path) -> Path:
    """Compile the library into a folder, unless it is there, and return its path.

    Processes may build at the same time: each writes a file of its own and renames it.

    Raises:
        OSError: There is no compiler, or the folder cannot be written.
        subprocess.SubprocessError: The compiler failed or took longer than two minutes.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (g++, clang++ or $CXX) was found")
    sources, flags = [source.read_bytes() for source in _SOURCES], compiler_flags(platform.machine())
    identity = repr((sources, flags, compiler, platform.machine(), _processor())).encode()
    library = folder / f"row_kernels-{hashlib.sha256(identity).hexdigest()[:16]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=folder) as own:
        built = Path(own) / library.name
        subprocess.run(
            [compiler, *flags, *map(str, _SOURCES), "-o", str(built)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
        )
        built.replace(library)
    return library


def _cache_folder() -> Path:
    """Return a folder that only this user writes: code is loaded from it."""
    home = os.environ.get(HOME_VARIABLE)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heterps"
    folder = Path(home).resolve() / "kernels" if home else cache
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        # For this process alone; it stays after its end, like every loaded library.
        return Path(tempfile.mkdtemp(prefix="heterps-kernels-"))


def _processor() -> str:
    """Return what tells processors of unlike instruction sets apart."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    told_apart = ("flags", "Features", "model name", "CPU implementer", "CPU part")
    return "".join(sorted({line for line in lines if line.startswith(told_apart)}))


def _typed(function: Any, *, num_states: int, num_constants: int) -> Any:
    function.argtypes = (
        POINTER(_Table),
        POINTER(_Shard),
        POINTER(_Part),
        *[c_int64] * 2,
        *[c_void_p] * num_states,
        *[c_float] * (1 + num_constants),
    )
    function.restype = c_int64
    return function


def _table(weight_RD: Tensor, changed_R: Tensor | None = None, l2: float = 0.0) -> _Table:
    changed = 0 if changed_R is None else changed_R.data_ptr()
    return _Table(weight_RD.data_ptr(), *weight_RD.shape, changed, l2)


def _bags(bags: Bags | None, rows_BS: Tensor) -> _Bags:
    own = None if bags is None else bags.of(rows_BS)
    return _Bags(0, 0) if own is None else _Bags(own.starts.data_ptr(), own.num_bags)


def _with_dense_rows(gradients_BX: Tensor) -> Tensor:
    return gradients_BX if gradients_BX.stride(1) == 1 else gradients_BX.contiguous()


def _check_range(bad: int, rows: Sequence[Tensor], num_rows: int) -> None:
    if bad >= 0:
        row = int(torch.cat([part.reshape(-1) for part in rows])[bad])
        raise IndexError(f"row {row} is out of range for a table shard of {num_rows} rows")
