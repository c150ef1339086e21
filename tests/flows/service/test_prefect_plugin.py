import pytest

from flows.service.prefect_plugin import is_prefect_command, with_full_deployment_name


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("deployment run train-ctr", "deployment run train-ctr/train-ctr"),
        ("deployment inspect sweep-orphans", "deployment inspect sweep-orphans/sweep-orphans"),
        ("deployments run train-ctr", "deployments run train-ctr/train-ctr"),
        ("--profile team deployment run train-ctr", "--profile team deployment run train-ctr/train-ctr"),
        ("deployment run --watch train-ctr", "deployment run --watch train-ctr/train-ctr"),
        ("deployment run -p seed=3 train-ctr", "deployment run -p seed=3 train-ctr/train-ctr"),
        ("deployment run --param=seed=3 train-ctr", "deployment run --param=seed=3 train-ctr/train-ctr"),
        ("deployment run train-ctr --tag x", "deployment run train-ctr/train-ctr --tag x"),
    ],
)
def test_completes_a_bare_deployment_name(typed, meant):
    assert with_full_deployment_name(typed.split()) == meant.split()


@pytest.mark.parametrize(
    "typed",
    [
        "deployment run train-ctr/train-ctr",
        "deployment run other/nightly",
        "deployment run --id 4f1c",
        "deployment run",
        "deployment ls",
        "deployment delete train-ctr",
        "flow-run inspect train-ctr",
        "deployment schedule ls train-ctr",
        "server start",
        "",
    ],
)
def test_leaves_every_other_command_alone(typed):
    assert with_full_deployment_name(typed.split()) == typed.split()


@pytest.mark.parametrize(
    ("argv", "original", "expected"),
    [
        (["/venv/bin/prefect", "version"], ["python", "/venv/bin/prefect", "version"], True),
        (["-m", "version"], ["python", "-m", "prefect", "version"], True),
        (["/x/prefect/__main__.py", "version"], ["python", "-m", "prefect", "version"], True),
        (["-m"], ["python", "-m", "flows.service.serve"], False),
        (["-m", "prefect"], ["python", "-m", "pytest", "prefect"], False),
        (["train.py"], ["python", "train.py"], False),
        (["-c"], ["python", "-c", "import prefect"], False),
    ],
)
def test_acts_only_inside_the_prefect_command(argv, original, expected):
    assert is_prefect_command(argv, original) is expected
