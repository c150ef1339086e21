"""How a node starts: the wheel that it runs, its variables, and its first script, as a process or a machine."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import math
import shlex
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import heterps_core
from heterps_core.errors import ConfigurationError
from heterps_core.training.node import (
    DRY_RUN_VARIABLE,
    KIND_VARIABLE,
    RUN_DIRECTORY_VARIABLE,
    RUN_KEY_VARIABLE,
)

if TYPE_CHECKING:
    from heterps_core.training.storage.run_directory import RunDirectory

RUN_ID_VARIABLE = "HETERPS_RUN_ID"

_WHEEL_FOLDER = "code"
_SUFFIXES = (".py", ".cpp", ".gz", ".toml", ".typed")
_EARLIEST_TIME = (1980, 1, 1, 0, 0, 0)

BOOTSTRAP_SCRIPT = Path(__file__).with_name("bootstrap.sh")

_TRAINING_NODE = ("-m", "heterps_core.training.node")
"""Arguments of Python that make a process a training node."""

DEFAULT_LIFETIME_S = 6 * 3600
"""After this a node ends itself at the latest; `infra.machines.lifecycle` sets less by plan and caps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _NodeWheel:
    """The core as it is installed here, as a flow's host may have no source tree.

    It is in the run directory before a machine is launched, and its hash in the user data: a node runs nothing else.
    The same files give the same bytes (times are fixed), so a resumed run finds its wheel unchanged.
    """

    key: str
    sha256: str
    content: bytes


def _build_node_wheel(model: str = "") -> _NodeWheel:
    """Pack the core into a wheel (PEP 427: a zip file with a METADATA, a WHEEL and a RECORD).

    The package of one's own model (package.module:function) goes along.
    """
    version = heterps_core.__version__
    info = f"heterps-{version}.dist-info"
    module, colon, _ = model.partition(":")
    files = {
        **_package_files(heterps_core.__name__),
        **(_package_files(module.partition(".")[0]) if colon else {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: heterps\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: heterps\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [_record_line(name, content) for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EARLIEST_TIME), content, zipfile.ZIP_DEFLATED)
    content = buffer.getvalue()
    return _NodeWheel(
        key=f"{_WHEEL_FOLDER}/heterps-{version}-py3-none-any.whl",
        sha256=hashlib.sha256(content).hexdigest(),
        content=content,
    )


def publish_node_wheel(run: RunDirectory, model: str) -> _NodeWheel:
    """Put the wheel for a model into a run directory."""
    wheel = _build_node_wheel(model)
    run.write_bytes(wheel.key, wheel.content)
    return wheel


def _package_files(name: str) -> dict[str, bytes]:
    """Return the files of an installed top-level package or module, by their names in a wheel.

    Raises:
        ConfigurationError: There is none of this name.
    """
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ConfigurationError(
            f"the package {name!r} of the model must be one that can be imported here, to be sent to the nodes; "
            f"install it, or start in the folder that holds it"
        )
    origin = Path(found.origin)
    if not found.submodule_search_locations:
        return {origin.name: origin.read_bytes()}
    root = origin.parent
    paths = sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    return {f"{name}/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}


def _record_line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bootstrap:
    """The settings with which every node of a run starts."""

    run_location: str
    """Where the flow's host and the nodes meet: a local path, or a URI such as s3://bucket/prefix."""

    data_folders: tuple[str, ...] = ()
    """Folders of buckets that nodes read rows from, such as clicks/raw; none where they are in the run directory."""

    python: str
    """Path of the interpreter on the node, with torch, numpy and pyarrow; and heterps, where there is no wheel."""

    arguments: tuple[str, ...] = _TRAINING_NODE
    lifetime_s: int = DEFAULT_LIFETIME_S
    run_key: bytes = field(default=b"", repr=False)
    """Proves that a process is of the run, and that its job, cluster and checkpoints are."""

    wheel: _NodeWheel | None = None
    """The code that the node takes from the run directory; None takes the installed one."""


def node_environment(
    bootstrap: Bootstrap, *, run_id: str, lease_s: float, is_process: bool, is_dry_run: bool
) -> dict[str, str]:
    """Return the environment variables that every node starts with, the same on every provider.

    Everything else it learns from cluster.json in the run directory; also who it is, where the provider
    starts many alike and does not set HETERPS_NODE_ID.
    """
    variables = {
        KIND_VARIABLE: "process" if is_process else "machine",
        DRY_RUN_VARIABLE: str(int(is_dry_run)),
        RUN_ID_VARIABLE: run_id,
        RUN_DIRECTORY_VARIABLE: bootstrap.run_location,
        "HETERPS_PYTHON": bootstrap.python,
        "HETERPS_LIFETIME_S": str(bootstrap.lifetime_s),
        "HETERPS_LEASE_S": str(math.ceil(lease_s)),
    }
    if bootstrap.run_key:
        variables[RUN_KEY_VARIABLE] = bootstrap.run_key.hex()
    if bootstrap.wheel is not None:
        variables["HETERPS_WHEEL"] = bootstrap.wheel.key
        variables["HETERPS_WHEEL_SHA256"] = bootstrap.wheel.sha256
    return variables


def user_data(environment: Mapping[str, str], arguments: tuple[str, ...]) -> str:
    """Return the bootstrap script with its variables and arguments written in, for a cloud's first boot."""
    script = BOOTSTRAP_SCRIPT.read_text()
    shebang, _, body = script.partition("\n")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return "\n".join([shebang, *exports, f"set -- {shlex.join(arguments)}", body])
