import http.server
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from heterps_core.errors import ConfigurationError
from infra.workspace import ServiceAddresses, Workspace


def test_is_a_hidden_folder_under_the_current_directory(tmp_path):
    assert Workspace.locate({}, current_directory=tmp_path).root == tmp_path / ".heterps"


@pytest.mark.parametrize(("named", "found"), [("state", "state"), ("a/../b", "b"), ("  ", ".heterps")])
def test_follows_the_environment_variable(tmp_path, named, found):
    workspace = Workspace.locate({"HETERPS_HOME": named}, current_directory=tmp_path)

    assert workspace.root == tmp_path / found


def test_creates_nothing_before_it_is_asked_to(tmp_path):
    workspace = Workspace.locate({}, current_directory=tmp_path)
    assert workspace.run_folder("run-1").is_relative_to(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_creates_its_folders_and_may_be_asked_again(tmp_path):
    workspace = Workspace(root=tmp_path / "new" / "home").create().create()

    names = {path.name for path in workspace.root.iterdir()}
    assert names == {"data", "profiles", "runs", "mlartifacts", "prefect", "logs", "name"}


def test_refuses_a_file_in_its_place(tmp_path):
    (tmp_path / ".heterps").write_text("")

    with pytest.raises(ConfigurationError, match=r"must be a folder.*set HETERPS_HOME"):
        Workspace.locate({}, current_directory=tmp_path)


def test_says_which_folder_cannot_be_made(tmp_path):
    (tmp_path / "data").write_text("in the way")

    with pytest.raises(ConfigurationError, match=r"data is refused: File exists"):
        Workspace(root=tmp_path).create()


@pytest.mark.parametrize("run_id", ["", "..", "../other", "a/b", "-x", "a" * 129])
def test_refuses_a_run_id_that_could_lead_out(tmp_path, run_id):
    with pytest.raises(ConfigurationError, match="run id"):
        Workspace(root=tmp_path).run_folder(run_id)


def test_the_key_of_a_run_stays_the_same_and_only_its_owner_may_read_it(tmp_path):
    workspace = Workspace(root=tmp_path / "home")

    keys = [workspace.run_key("r1"), Workspace(root=tmp_path / "home").run_key("r1"), workspace.run_key("r2")]

    assert keys[0] == keys[1] != keys[2]
    assert {len(key) for key in keys} == {32}
    files = [path for path in workspace.root.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.parent.stat().st_mode) for path in files} == {0o700}
    # Nodes read and write the folder of their run.
    assert not any(path.is_relative_to(workspace.runs_directory) for path in files)


def test_processes_that_draw_the_key_of_a_run_at_once_get_the_same(tmp_path):
    with ThreadPoolExecutor(8) as at_once:
        keys = set(at_once.map(lambda _: Workspace(root=tmp_path).run_key("r1"), range(8)))

    assert len(keys) == 1
    assert [path.name for path in (tmp_path / "keys").iterdir()] == ["r1"]


def test_a_forgotten_key_is_drawn_again(tmp_path):
    workspace = Workspace(root=tmp_path)
    first = workspace.run_key("r1")

    workspace.forget_run_key("r1")
    workspace.forget_run_key("r1")

    assert workspace.run_key("r1") != first


def test_a_password_that_an_editor_ended_with_a_line_break_is_the_same(tmp_path):
    workspace = Workspace(root=tmp_path)
    drawn = workspace.password()
    workspace.password_path.write_text(f"{drawn}\n")

    assert workspace.password() == drawn


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"secret", b":secret", b"heterps:", b"heterps:\xff", b"a b:c d"]
)
def test_a_file_without_a_password_opens_no_server(tmp_path, content):
    workspace = Workspace(root=tmp_path)
    workspace.password_path.write_bytes(content)

    with pytest.raises(ConfigurationError, match=r"must hold user:password.*delete it"):
        workspace.password()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a second account needs root")
@pytest.mark.parametrize("draw", [Workspace.password, lambda workspace: workspace.run_key("r1")])
def test_a_secret_that_another_account_has_laid_down_is_not_used(draw):
    with TemporaryDirectory() as open_to_all:
        workspace = Workspace(root=Path(open_to_all))
        (workspace.root / "keys").mkdir()
        for path in (workspace.root, workspace.root / "keys"):
            path.chmod(0o1777)
        for path in (workspace.password_path, workspace.root / "keys" / "r1"):
            path.write_text("evil:evil")
            os.chown(path, 1234, 1234)
        os.seteuid(65_534)
        try:
            with pytest.raises(
                ConfigurationError, match=r"belongs to the one of number 1234.*set HETERPS_HOME"
            ):
                draw(workspace)
        finally:
            os.seteuid(0)


@pytest.fixture
def health_server():
    class AlwaysHealthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), AlwaysHealthy)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_knows_the_services_that_answer(tmp_path, health_server):
    workspace = Workspace(root=tmp_path)
    addresses = ServiceAddresses(
        prefect_url=health_server, mlflow_url="http://127.0.0.1:1", supervisor_pid=os.getpid()
    )
    workspace.write_services(addresses)

    assert workspace.running_services() == addresses


def test_forgets_services_that_no_longer_answer(tmp_path):
    workspace = Workspace(root=tmp_path)
    workspace.write_services(
        ServiceAddresses(prefect_url="http://127.0.0.1:1", mlflow_url="http://127.0.0.1:1", supervisor_pid=1)
    )

    assert workspace.recorded_services() is not None
    assert workspace.running_services() is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"other": 1}'])
def test_ignores_a_damaged_note_of_services(tmp_path, content):
    workspace = Workspace(root=tmp_path)
    workspace.services_path.write_text(content)

    assert workspace.running_services() is None
    workspace.forget_services()
    workspace.forget_services()


@pytest.mark.parametrize("uri", ["postgresql://team:secret@host/mlflow", "mlflow.example:5000", "file:/runs"])
def test_refuses_a_store_of_runs_that_is_no_server_and_does_not_repeat_its_password(tmp_path, uri):
    with pytest.raises(ConfigurationError, match="HETERPS_TRACKING_URI must be the address") as error:
        Workspace.locate({"HETERPS_TRACKING_URI": uri}, current_directory=tmp_path)

    assert "secret" not in str(error.value)


def test_runs_are_recorded_here_or_at_the_teams_server_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://another-project.example")
    monkeypatch.delenv("HETERPS_TRACKING_URI", raising=False)
    workspace = Workspace(root=tmp_path)
    assert (workspace.tracking_uri, workspace.has_own_tracking) == (f"sqlite:///{tmp_path}/mlflow.db", True)

    monkeypatch.setenv("HETERPS_TRACKING_URI", "https://mlflow.example/")

    assert (workspace.tracking_uri, workspace.has_own_tracking) == ("https://mlflow.example", False)


def test_a_folder_with_other_files_keeps_its_rights_and_a_workspace_is_closed_to_other_accounts(tmp_path):
    shared, earlier, new = (tmp_path / name for name in ("srv", "earlier", "new"))
    (shared / "photos").mkdir(parents=True)
    earlier.mkdir()
    (earlier / "mlflow.db").touch()
    for folder in (shared, earlier):
        folder.chmod(0o755)

    modes = [
        stat.S_IMODE(Workspace(root=root).create().root.stat().st_mode) for root in (shared, earlier, new)
    ]

    assert modes == [0o755, 0o700, 0o700]
