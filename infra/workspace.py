"""The one folder that holds everything this machine keeps, and the run store where it meets rented machines.

All state in one place means that a run can be found by its id alone, that a sweeper on the same
machine sees what a dead flow left, and that deleting one folder undoes everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import stat
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from heterps_core.errors import ConfigurationError, ProvisioningError
from heterps_core.json_file import replace_json
from heterps_core.training.storage.store import check_store_location
from infra.loopback_guard import ROOT, another_account_listens

LAUNCH_SEPARATOR = "."

LOOPBACK = "127.0.0.1"
"""By which processes of this machine, and none beside them, reach one another."""

HOME_VARIABLE = "HETERPS_HOME"

TRACKING_VARIABLE = "HETERPS_TRACKING_URI"

DEFAULT_FOLDER_NAME = ".heterps"

SERVICE_TIMEOUT_S = 10.0
"""A server on a busy machine may take seconds to answer; where there is none, its port refuses at once."""

RUN_KEY_BYTES = 32
"""As long as the tags of HMAC-SHA256 (RFC 2104, section 3)."""

SERVICE_USER = "heterps"
PASSWORD_BYTES = 18

_USER_AND_PASSWORD = re.compile(r"[!-9;-~]+:[!-~]+")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceAddresses:
    """Where `make serve` answers, as the serving supervisor wrote it down."""

    prefect_url: str
    """Prefect UI, without a slash at the end, like the next."""

    mlflow_url: str
    supervisor_pid: int

    @property
    def prefect_api_url(self) -> str:
        """Address for PREFECT_API_URL."""
        return f"{self.prefect_url}/api"


class _Below:
    """A path below the root of a workspace."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, workspace: Workspace, owner: type[Workspace]) -> Path:
        return workspace.root / self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """Paths below one root; nothing is created before `create` is called."""

    root: Path
    """Absolute."""

    data_directory = _Below("data")
    profiles_directory = _Below("profiles")
    runs_directory = _Below("runs")
    price_folder = _Below("prices")
    """Refreshed prices, which `infra/prices` writes."""

    keys_directory = _Below("keys")
    """What authenticates the files of each run; readable by this user alone."""

    ledger_path = _Below("ledger.sqlite")
    fleet_lock_path = _Below("fleet.lock")
    """Held by the process whose machines are alive."""

    leases_directory = _Below("leases")
    tracking_path = _Below("mlflow.db")
    """MLflow's database, where no other store is named. File stores are refused by MLflow 3."""

    records_directory = _Below("records")
    """Records of runs that are not in MLflow: a run still goes on, or the store did not answer at its end."""

    artifacts_directory = _Below("mlartifacts")
    prefect_home = _Below("prefect")
    """PREFECT_HOME: the database of Prefect's server and its storage."""

    logs_directory = _Below("logs")
    services_path = _Below("services.json")
    deployments_path = _Below("deployments.json")
    """What Prefect held of the deployments after they were registered last."""

    cloud_name_path = _Below("name")
    password_path = _Below("password")
    """The user:password of the servers of this workspace; readable by this user alone."""

    @classmethod
    def locate(
        cls, environment: Mapping[str, str] = os.environ, *, current_directory: Path | None = None
    ) -> Workspace:
        """Return the workspace that HETERPS_HOME names, else `.heterps` under the current directory.

        Raises:
            ConfigurationError: The path exists and is not a folder, or HETERPS_TRACKING_URI names no server.
        """
        tracking = environment.get(TRACKING_VARIABLE, "").strip()
        if tracking and not tracking.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"{TRACKING_VARIABLE} must be the address of an MLflow server such as http://mlflow.example:5000; "
                f"unset it to record runs in the workspace"
            )
        named = environment.get(HOME_VARIABLE, "").strip()
        base = current_directory or Path.cwd()
        root = (base / Path(named or DEFAULT_FOLDER_NAME).expanduser()).resolve()
        if root.exists() and not root.is_dir():
            raise ConfigurationError(
                f"the workspace must be a folder, but {root} is a file; "
                f"set {HOME_VARIABLE} to a folder, which may be a new one"
            )
        return cls(root=root)

    def create(self) -> Workspace:
        """Make the folders that are missing and return this workspace; may be called again.

        Raises:
            ConfigurationError: A folder cannot be made or written.
        """
        try:
            is_own = not self.root.exists() or self._is_own()
            self.cloud_name()
            for folder in (
                self.data_directory,
                self.profiles_directory,
                self.runs_directory,
                self.artifacts_directory,
                self.prefect_home,
                self.logs_directory,
            ):
                folder.mkdir(parents=True, exist_ok=True)
            if is_own:
                self._close_to_others()
        except OSError as error:
            raise ConfigurationError(
                f"the workspace must be a folder that can be written, but {error.filename or 'it'} is refused: "
                f"{error.strerror or error}; set {HOME_VARIABLE} to another folder"
            ) from error
        if not os.access(self.root, os.W_OK):
            raise ConfigurationError(
                f"the workspace must be a folder that can be written, but {self.root} is read-only; "
                f"set {HOME_VARIABLE} to another folder"
            )
        return self

    def _is_own(self) -> bool:
        """Tell whether the folder is a workspace already, or holds no folder of something else, as /srv does."""
        names = {path.name: path.is_dir() for path in self.root.iterdir()}
        return not any(names.values()) or bool(
            names.keys() & {self.ledger_path.name, self.tracking_path.name}
        )

    def _close_to_others(self) -> None:
        """Let other accounts of this machine read nothing: neither databases nor the files that name a run's nodes.

        A folder that several accounts share, such as /tmp, stays as it is.
        """
        status = self.root.stat()
        if status.st_uid == os.geteuid() and status.st_mode & 0o077 and not status.st_mode & stat.S_ISVTX:
            self.root.chmod(0o700)

    def password(self) -> str:
        """Return the user:password that the servers of this workspace ask for; drawn at the first call.

        Raises:
            ConfigurationError: The file holds another text; with an empty one the servers would ask nobody.
            OSError: The workspace cannot be written.
        """
        drawn = f"{SERVICE_USER}:{secrets.token_urlsafe(PASSWORD_BYTES)}"
        kept = _kept_secret(self.password_path, drawn.encode()).decode(errors="replace").strip()
        if not _USER_AND_PASSWORD.fullmatch(kept):
            raise ConfigurationError(
                f"{self.password_path} must hold user:password in ASCII letters, digits and signs, but does not; "
                f"delete it, and heterps serve draws a new one"
            )
        return kept

    def cloud_name(self) -> str:
        """Return the name by which a cloud tells the machines of this workspace from those of others.

        It is drawn at the first use.

        Raises:
            ConfigurationError: The workspace belongs to another account.
            OSError: It cannot be written.
        """
        drawn = f"w-{secrets.token_hex(4)}"
        return _kept_secret(self.cloud_name_path, drawn.encode()).decode().strip()

    def run_folder(self, run_id: str) -> Path:
        """Return the folder where the flow's host and the nodes of one run meet.

        Raises:
            ConfigurationError: The id is no plain name, and could lead out of the workspace.
        """
        check_run_id(run_id, longest=128)
        return self.runs_directory / run_id

    def run_key(self, run_id: str) -> bytes:
        """Return the key that authenticates what the nodes of a run write; drawn at the first call.

        Only this user can read it, nodes see none of its folder, and it stays the same when the run is resumed.

        Raises:
            ConfigurationError: The id is no plain name.
            OSError: The workspace cannot be written.
        """
        path = self.keys_directory / self.run_folder(run_id).name
        return _kept_secret(path, secrets.token_bytes(RUN_KEY_BYTES))

    def forget_run_key(self, run_id: str) -> None:
        """Delete the key of a run that cannot be resumed any more; a missing one is no error."""
        (self.keys_directory / self.run_folder(run_id).name).unlink(missing_ok=True)

    @property
    def tracking_uri(self) -> str:
        """MLflow's store: the server that HETERPS_TRACKING_URI names, else a SQLite file here.

        MLFLOW_TRACKING_URI is not asked: it may be set for another project, and MLflow sets it itself.
        """
        return os.environ.get(TRACKING_VARIABLE, "").strip().rstrip("/") or f"sqlite:///{self.tracking_path}"

    @property
    def has_own_tracking(self) -> bool:
        """Whether runs are recorded in this workspace."""
        return self.tracking_uri == f"sqlite:///{self.tracking_path}"

    def write_services(self, addresses: ServiceAddresses) -> None:
        """Write the addresses for other processes; a reader never sees half a file."""
        replace_json(self.services_path, asdict(addresses))

    def forget_services(self) -> None:
        """Remove the addresses; nothing happens where there are none."""
        self.services_path.unlink(missing_ok=True)

    def running_services(self) -> ServiceAddresses | None:
        """Return the addresses of services that answer now, else None.

        The file alone proves nothing, as it stays when the supervisor is killed.
        """
        addresses = self.recorded_services()
        if addresses and answers(f"{addresses.prefect_api_url}/health", timeout_s=SERVICE_TIMEOUT_S):
            return addresses
        return None

    def recorded_services(self) -> ServiceAddresses | None:
        """Return the addresses as last written, whether they answer or not; none that another account has taken."""
        try:
            addresses = ServiceAddresses(**json.loads(self.services_path.read_text()))
            port = urlsplit(addresses.prefect_url).port
        except (OSError, ValueError, TypeError):
            return None
        return None if port and another_account_listens(port) else addresses


def _kept_secret(path: Path, drawn: bytes) -> bytes:
    """Return what a file holds that only this user can read; `drawn` is written where there is none yet."""
    with contextlib.suppress(FileNotFoundError):
        return _own_secret(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(drawn)
        # Whole or not at all, and of two processes the first one's.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        Path(draft).unlink()
    return _own_secret(path)


def _own_secret(path: Path) -> bytes:
    """Return what a file of this user holds; in a folder that others may write, one may be another account's.

    Raises:
        ConfigurationError: It is.
    """
    with path.open("rb") as file:
        owner = os.fstat(file.fileno()).st_uid
        if os.geteuid() not in (owner, ROOT) and owner != ROOT:
            raise ConfigurationError(
                f"{path} must belong to the account that reads it, but belongs to the one of number {owner}, which "
                f"knows it; set {HOME_VARIABLE} to a folder of your own"
            )
        return file.read()


def run_of_launch(launch_id: str) -> str:
    """Return the run that a launch belongs to.

    Example:
        >>> run_of_launch("20261121-0430-1a2b3c.2")
        '20261121-0430-1a2b3c'
    """
    return launch_id.partition(LAUNCH_SEPARATOR)[0]


def check_run_id(run_id: str, *, longest: int = 64) -> None:
    """Check that a run id can be a file name; one of 64 characters can be a tag and a token too.

    Raises:
        ConfigurationError: It cannot.
    """
    if not _RUN_ID.fullmatch(run_id) or len(run_id) > longest:
        raise ConfigurationError(
            f"a run id must be 1 to {longest} letters, digits, '.', '_' or '-' and start with a letter or digit, "
            f"got {run_id!r}"
        )


def answers(url: str, *, timeout_s: float) -> bool:
    """Tell whether a GET of `url` is answered with a success status within `timeout_s` seconds."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return 200 <= int(response.status) < 300
    except (urllib.error.URLError, OSError, ValueError):
        return False


RUN_STORE_VARIABLE = "HETERPS_RUN_STORE"
"""For instance s3://bucket/heterps; not needed by nodes that are processes of this machine."""


def has_run_store() -> bool:
    """Tell whether one is named."""
    return bool(os.environ.get(RUN_STORE_VARIABLE))


def region_of_run_store() -> str | None:
    """Return the region that the run store's URI names; None where it names none."""
    return region_of(os.environ.get(RUN_STORE_VARIABLE))


def region_of(uri: str | None) -> str | None:
    """Return the region that the URI of a bucket names; None where it names none.

    Example:
        >>> region_of("s3://clicks/days?region=eu-west-1"), region_of("/srv/clicks")
        ('eu-west-1', None)
    """
    return dict(parse_qsl((uri or "").partition("?")[2])).get("region")


def location_in_store(run_id: str) -> str:
    """Return the URI of a run in the store.

    Raises:
        ConfigurationError: No store is named that other machines reach; or its URI holds credentials.
    """
    check_store_location(os.environ.get(RUN_STORE_VARIABLE, ""))
    # Options of the store, such as its region, follow a question mark.
    store, mark, options = os.environ.get(RUN_STORE_VARIABLE, "").partition("?")
    if "://" not in store:
        raise ConfigurationError(
            f"{RUN_STORE_VARIABLE} must be a URI that this machine and rented ones reach, got {store!r}; "
            f"export {RUN_STORE_VARIABLE}=s3://your-bucket/heterps"
        )
    return f"{store.rstrip('/')}/{run_id}{mark}{options}"


def free_loopback_port() -> int:
    """Return a TCP port of the loopback interface that was free a moment ago.

    Raises:
        ProvisioningError: There is none.
    """
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, 0))
        except OSError as problem:
            raise ProvisioningError(
                f"the workers need one free TCP port on {LOOPBACK} to find one another, and there is none "
                f"({problem}); end programs that hold many connections, or wait a minute"
            ) from problem
        return int(probe.getsockname()[1])
