"""The commands and programs of the documents: all are parsed, and most run after a real night."""

import gzip
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import boto3
import pandas as pd
import pytest
from botocore import xform_name

from flows import parameters
from flows.cli import COMMANDS, FLOWS, _parser, main
from flows.command_line import _parser_for
from flows.parameters import BackfillParameters, TrainParameters
from flows.service.schedule import BACKFILL_CTR, DEPLOYMENTS
from heterps_core.data.features import FeatureSpec
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import DataSchema
from heterps_core.profiling.measurement.layer_profiler import trace_model
from heterps_core.profiling.measuring_process import ProfileRequest
from tasks.sources import ClickSource
from tests.documents import commands, help_examples, python_blocks
from tests.heterps_core.data.history.event_rows import joined
from tests.paths import PROJECT

ALL_COMMANDS = list(commands())
BLOCKS = dict(python_blocks())

SHORT_SEARCH = "--scheduler exact --budget-evaluations 64"
RUN_AS = {
    ("heterps", "train"): f"heterps train --data clicks --no-baseline {SHORT_SEARCH}",
    ("heterps", "logs", "-f"): "heterps logs",
}
"""Commands that run long or without an end, and a shorter form that the story runs."""

FEWER = {"20000": "4000"}
"""Numbers of rows in the documents, and those that the story runs with."""

OF_OPERATING = ("doctor", "status", "logs", "runs", "explain", "cost", "stop", "tidy", "sweep", "champion")


def parsed_flow(model, words):
    values = vars(_parser_for(model, program="x").parse_args(words))
    values.pop("parameters", None)
    return model.of(values)


@pytest.mark.parametrize("command", [*ALL_COMMANDS, *help_examples()], ids=str)
def test_a_command_of_the_documents_is_understood(command):
    program, name, *words = command.words
    if program == "heterps" and name in FLOWS and "--help" not in words:
        if words:
            parsed_flow(getattr(parameters, FLOWS[name][2]), words)
    elif program == "heterps":
        assert name in {*COMMANDS, *FLOWS}
        if words and name in COMMANDS:
            _parser(asked=name).parse_args([name, *words])
    elif program == "make":
        targets = re.search(r"^\.PHONY: (.*)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)[1].split()
        assert name in targets
        variables = dict(word.split("=", 1) for word in words)
        assert variables.keys() <= {"DATA", "SCHEMA", "MODEL", "ARGS"}
        parsed_flow(TrainParameters, variables.get("ARGS", "").split())
    elif program == "python":
        assert name == "-m"
        assert find_spec(words[0])
    elif program == "aws":
        check_aws(name, *words)
    elif (name, *words[:1]) == ("deployment", "run"):
        assert words[1] in DEPLOYMENTS
        model = BackfillParameters if words[1] == BACKFILL_CTR else TrainParameters
        assert {each.partition("=")[0] for each in words if "=" in each} <= model.model_fields.keys()


def check_aws(service, operation, *words):
    """Check that AWS has the operation, with the parameters that stand there; `wait` has waiters of that name."""
    if (service, operation) in AWS_ALONE:
        return
    client = boto3.client({"s3api": "s3"}.get(service, service), region_name="us-east-1")
    if operation == "wait":
        assert words[0].replace("-", "_") in client.waiter_names
        operation = client.get_waiter(words[0].replace("-", "_")).config.operation
    else:
        operation = client.meta.method_to_api_mapping[operation.replace("-", "_")]
    members = client.meta.service_model.operation_model(operation).input_shape.members
    known = {*OF_ALL, *(xform_name(name, "-") for name in members)}
    assert {word.removeprefix("--") for word in words if word.startswith("--")} <= known


AWS_ALONE = {("s3", "mb"), ("sso", "login"), ("configure", "--profile")}
"""Commands of the AWS CLI that are no operation of their service."""

OF_ALL = {"region", "profile", "output", "query"}
"""Options of each of its commands."""


def test_the_documents_hold_commands_of_each_kind():
    assert len(ALL_COMMANDS) > 80
    assert {command.words[0] for command in ALL_COMMANDS} == {"aws", "heterps", "make", "prefect", "python"}


@pytest.mark.slow
@pytest.mark.parametrize("place", [place for place, source in BLOCKS.items() if "class " in source])
def test_a_model_of_the_documents_is_traced_into_layers(place, tmp_path, monkeypatch):
    module = f"my_models_{place.rpartition(':')[2]}"
    (tmp_path / f"{module}.py").write_text(BLOCKS[place])
    monkeypatch.syspath_prepend(tmp_path)
    model = re.findall(r"^class (\w+)", BLOCKS[place], re.MULTILINE)[-1]
    pooling = ("sum", "sequence" if "sequences" in BLOCKS[place] else "sum")
    features = FeatureSpec(num_dense=2, slot_rows=(10, 20), slot_lengths=(1, 3), slot_poolings=pooling)

    graph = trace_model(ProfileRequest(model=f"{module}:{model}", features=features, batch_size=4))

    assert len(graph.layers) > 3


def test_the_history_of_data_is_as_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (PROJECT / "docs" / "DATA.md").read_text()
    Path("heterps.toml").write_text(re.search(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1])
    [block] = [source for place, source in BLOCKS.items() if "DATA" in place]
    exec(block, {})
    schema = DataSchema.load(Path("heterps.toml"))

    dataset = prepare_dataset("rows.parquet", schema=schema, out_dir="prepared")

    assert joined(dataset) == [[("5", "buy"), ("3", "view")], []]
    ClickSource(data="rows.parquet", schema_file="heterps.toml").check_columns()


def run(command):
    """Run a command of the documents in this process, in the current folder."""
    _, *words = RUN_AS[command].split() if command in RUN_AS else command
    words = [FEWER.get(word, word) for word in words]
    assert main(words) == 0, words


@pytest.fixture(scope="module")
def night(tmp_path_factory, prefect_server, workspace_of_runs):
    """The folder in which the commands of TUTORIAL have run in their order."""
    folder = tmp_path_factory.mktemp("tutorial")
    adult = "39,Private,77516,Bachelors,13,Single,Clerk,Child,White,Male,{},0,40,Cuba,{}"
    rows = [adult.format(number % 7 * 100, ">50K" if number % 4 == 0 else "<=50K") for number in range(400)]
    (folder / "adult.csv.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
    shutil.copy(PROJECT / "docs" / "examples" / "night.problem.json", folder / "problem.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HETERPS_HOME", str(workspace_of_runs(folder / ".heterps").root))
        for words in (command.words for command in ALL_COMMANDS if "TUTORIAL" in command.place):
            is_train, has_days = words == ("heterps", "train"), (folder / "clicks").exists()
            is_trained = any((folder / ".heterps" / "runs").glob("*"))
            is_shown_alone = words[1] in ("init", "make-days", "check-data", "predict", "explain", "cost")
            if (is_shown_alone and len(words) > 2) or (
                words in RUN_AS and has_days and is_train != is_trained
            ):
                run(words)
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_OPERATING)
def test_the_commands_of_operating_answer_after_a_night(night, name, capsys):
    for command in ALL_COMMANDS:
        if "OPERATING" in command.place and command.words[:2] == ("heterps", name):
            words = command.words if "aws" not in command.words else command.words[:2]
            if len(words) > 2 or name in ("status", "champion", "runs", "sweep", "tidy", "logs"):
                run(words)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_the_plan_of_readme_is_made_and_simulated(night):
    for name in ("plan", "simulate"):
        [command] = [
            each for each in ALL_COMMANDS if each.words[:2] == ("heterps", name) and "AWS" not in each.place
        ]
        run(command.words)

    assert (night / "plan.json").exists()


@pytest.mark.slow
def test_the_champion_predicts_as_readme_says(night):
    [block] = [source for place, source in BLOCKS.items() if "README" in place and "load_champion" in source]
    names = {"frame": pd.read_parquet(night / "probabilities.parquet")}
    table = pd.read_csv(night / "clicks" / "day=2026-11-03" / "clicks.tsv.gz", sep="\t", header=None)
    names["frame"] = table.iloc[:, 1:].set_axis(
        [*(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27))], axis=1
    )

    exec(block, names)

    assert len(names["probabilities"]) == len(table)
