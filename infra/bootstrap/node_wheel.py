"""The wheel that a node runs: the core as it is installed here, as a flow's host may have no source tree.

It is in the run directory before any machine is launched, and its hash in the user data: a node runs nothing else.
The same files give the same bytes (times are fixed), so a resumed run finds its wheel unchanged.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import heterps_core
from heterps_core.errors import ConfigurationError
from heterps_core.training.storage.run_directory import RunDirectory

WHEEL_FOLDER = "code"
SUFFIXES = (".py", ".cpp", ".typed")
_EARLIEST_TIME = (1980, 1, 1, 0, 0, 0)
"""Of a zip file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWheel:
    """A wheel, where nodes find it and what it must be."""

    key: str
    """In the run directory."""

    sha256: str
    content: bytes


def build_node_wheel(model: str = "") -> NodeWheel:
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
    record = [f"{name},sha256={_record_hash(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EARLIEST_TIME), content, zipfile.ZIP_DEFLATED)
    content = buffer.getvalue()
    return NodeWheel(
        key=f"{WHEEL_FOLDER}/heterps-{version}-py3-none-any.whl",
        sha256=hashlib.sha256(content).hexdigest(),
        content=content,
    )


def publish_node_wheel(run: RunDirectory, model: str) -> NodeWheel:
    """Put the wheel for a model into a run directory."""
    wheel = build_node_wheel(model)
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
    paths = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return {f"{name}/{path.relative_to(root).as_posix()}": path.read_bytes() for path in paths}


def _record_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
