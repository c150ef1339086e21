import pytest

from flows.serve import choose_addresses, main
from heterps_core.errors import ConfigurationError
from infra.workspace import Workspace


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1"])
def test_refuses_what_is_no_port(tmp_path, monkeypatch, port):
    monkeypatch.setenv("HETERPS_MLFLOW_PORT", port)

    with pytest.raises(ConfigurationError, match="HETERPS_MLFLOW_PORT must be a port"):
        choose_addresses(Workspace(root=tmp_path))


def test_refuses_one_port_for_two_services(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_PREFECT_PORT", "4711")
    monkeypatch.setenv("HETERPS_MLFLOW_PORT", "4711")

    with pytest.raises(ConfigurationError, match="are both 4711"):
        choose_addresses(Workspace(root=tmp_path))


def test_an_error_is_one_line_and_an_exit_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HETERPS_TIMEZONE", "Mars/Olympus")

    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: HETERPS_TIMEZONE must be a name")
    assert captured.out == ""


def test_help_is_shown_and_nothing_started(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    assert ended.value.code == 0
    assert "HETERPS_PREFECT_PORT" in capsys.readouterr().out
