"""Profiles that assume a role: boto3 finds the credentials, Arrow signs with them and has new ones in mid-read."""

import json
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import boto3
import pytest

from heterps_core import bucket_files
from heterps_core.training.storage.run_directory import RunDirectory
from infra import lent_credentials
from infra.lent_credentials import lend_credentials
from tests.infra.iam.evaluation import ACCOUNT_ID
from tests.moto_server import empty_cloud

CONFIG = f"""[profile base]
aws_access_key_id = base
aws_secret_access_key = base
[profile night]
role_arn = arn:aws:iam::{ACCOUNT_ID}:role/night
source_profile = base
duration_seconds = 900
"""
"""Credentials so short that boto3 has new ones at each request."""


@pytest.fixture(scope="module")
def aws():
    with empty_cloud() as environment:
        yield environment["AWS_ENDPOINT_URL"]


@pytest.fixture
def shell(tmp_path, monkeypatch, aws):
    """The environment of a person with a configuration file and no keys; every request asks for new credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in (lent_credentials._ADDRESS_VARIABLE, lent_credentials._TOKEN_VARIABLE):
        monkeypatch.setenv(name, "")  # for what the test sets to be undone
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(CONFIG)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_PROFILE", "night")
    monkeypatch.setattr(lent_credentials, "LENT_FOR", timedelta(seconds=1))
    for each in (lend_credentials, lent_credentials._found_by_boto3):
        each.cache_clear()
    yield monkeypatch
    for each in (lend_credentials, lent_credentials._found_by_boto3):
        each.cache_clear()


class Gate(BaseHTTPRequestHandler):
    """An S3 of one object that refuses keys which have expired, and those that sign nothing."""

    content = bytes(range(256)) * 4_096

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        key = self.headers.get("Authorization", "=anonymous/").partition("Credential=")[2].partition("/")[0]
        self.server.keys.append(key)
        if not key or key in self.server.expired:
            return self.send_error(403)
        start, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = self.content[int(start) : int(last) + 1 if last else None]
        self.send_response(206 if "Range" in self.headers else 200)
        for name, value in {
            "Content-Length": len(part),
            "Content-Range": f"bytes {start}-{last}/{len(self.content)}",
            "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT",
            "ETag": '"x"',
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        return self.wfile.write(part) if self.command == "GET" else None

    def log_message(self, *_):
        pass


@pytest.fixture
def gate():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gate)
    server.keys, server.expired = [], set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def options(port):
    return f"region=us-east-1&scheme=http&endpoint_override=127.0.0.1:{port}"


def test_arrow_writes_and_reads_with_the_role_that_boto3_assumes(shell, aws):
    boto3.Session(profile_name="base").client("s3", region_name="us-east-1").create_bucket(Bucket="runs")
    run = RunDirectory(f"s3://runs/heterps/night-1?{options(aws.rpartition(':')[2])}")

    run.write_bytes("job.json", b"{}")

    assert run.read_bytes("job.json") == b"{}"
    assert lent_credentials._found_by_boto3().method == "assume-role"


def test_credentials_that_expire_in_the_middle_of_a_read_are_replaced(shell, gate):
    files, _ = bucket_files.files_of(f"s3://runs/day.parquet?{options(gate.server_port)}")

    with files.open_input_file("runs/day.parquet") as file:
        first = file.read(1_000)
        used = set(gate.keys)
        gate.expired |= used
        second = file.read(1_000)

    assert first + second == Gate.content[:2_000]
    assert gate.keys[-1] not in used
    assert all(key.startswith("ASIA") for key in gate.keys)


def test_a_program_that_does_not_know_the_token_gets_none(shell):
    lend_credentials()
    shell.setenv(lent_credentials._TOKEN_VARIABLE, "another")
    address = lent_credentials.os.environ[lent_credentials._ADDRESS_VARIABLE]
    with pytest.raises(HTTPError, match="403"):
        urlopen(Request(address, headers={"Authorization": "guess"}))


@pytest.mark.parametrize(
    "variables",
    [{"AWS_ACCESS_KEY_ID": "own"}, {lent_credentials._ADDRESS_VARIABLE: "http://127.0.0.1:1/"}],
)
def test_nothing_is_lent_beside_keys_in_the_environment_or_another_lender(shell, variables):
    for name, value in variables.items():
        shell.setenv(name, value)

    lend_credentials()

    address = lent_credentials._ADDRESS_VARIABLE
    assert lent_credentials.os.environ.get(address) == variables.get(address)


def test_nothing_is_lent_where_boto3_finds_no_credentials(shell):
    shell.delenv("AWS_PROFILE")
    shell.setenv("AWS_CONFIG_FILE", "/dev/null")

    lend_credentials()

    assert lent_credentials._ADDRESS_VARIABLE not in lent_credentials.os.environ


class Metadata(BaseHTTPRequestHandler):
    """What an EC2 instance with a role answers its own programs."""

    def do_PUT(self):
        self.say("token")

    def do_GET(self):
        until = f"{datetime.now(UTC) + timedelta(hours=6):%Y-%m-%dT%H:%M:%SZ}"
        keys = {"AccessKeyId": "ASIAROLE", "SecretAccessKey": "s", "Token": "t", "Expiration": until}
        self.say("night" if self.path.endswith("/") else json.dumps(keys | {"Code": "Success"}))

    def say(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


def test_the_role_of_an_instance_is_lent_without_asking_the_lender_itself(shell):
    shell.delenv("AWS_PROFILE")
    shell.setenv("AWS_CONFIG_FILE", "/dev/null")
    shell.delenv("AWS_EC2_METADATA_DISABLED")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    shell.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")

    lend_credentials()
    environment = lent_credentials.os.environ
    token = {"Authorization": environment[lent_credentials._TOKEN_VARIABLE]}
    with urlopen(
        Request(environment[lent_credentials._ADDRESS_VARIABLE], headers=token), timeout=20
    ) as answer:
        lent = json.load(answer)

    assert lent["AccessKeyId"] == "ASIAROLE"
    server.shutdown()
    server.server_close()
