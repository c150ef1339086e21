"""What a user sets of the training arrives at the workers and at the profile: held against plain PyTorch."""

import json
from dataclasses import asdict

import pytest

from flows.parameters import TrainParameters
from flows.train_ctr import train_ctr
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.storage.verified_files import read_unverified_json
from heterps_core.training.training_run import read_training_run
from infra.workspace import HOME_VARIABLE, Workspace
from tasks.records.past_runs import past_trainings
from tests.heterps_core.training.reference import run_plainly

ENGINE = {
    "dense_optimizer": "sgd",
    "dense_learning_rate": 0.03,
    "embedding_optimizer": "sgd",
    "embedding_learning_rate": 0.7,
    "num_threads": 2,
    "dense_l2": 0.02,
    "embedding_l2": 0.01,
    "clip_norm": 0.1,
    "warmup_steps": 4,
}
SIZES = {"hidden_widths": [24, 12], "embedding_dim": 4, "model_settings": {"dropout": 0.0}}


def test_the_defaults_are_those_of_the_engine():
    own = TrainingConfig(batch_size=4, num_microbatches=1, num_epochs=1, seed=0)

    values = TrainParameters(batch_size=4).values_for(TrainingConfig)

    # By default the number of steps decides, the model, and the links of the plan.
    assert values.pop("update_mode") is None
    assert values.pop("dense_learning_rate") is None
    assert values.pop("wire_dtype") is None
    assert tuple(values.pop("embedding_folders")) == own.embedding_folders
    assert tuple(values.pop("label_weights")) == own.label_weights
    assert values.items() <= asdict(own).items()


@pytest.mark.weekly
@pytest.mark.usefixtures("prefect_server")
def test_a_run_is_profiled_and_trained_with_what_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    write_click_stream(tmp_path / "clicks.tsv", num_rows=2_000, seed=0)

    run_id = train_ctr(
        data=str(tmp_path / "clicks.tsv"),
        scheduler="exact",
        budget_evaluations=64,
        batch_size=64,
        provider="local",
        device_types=["cpu-c7i", "gpu-t4"],
        model="ctrdnn",
        precision="float32",
        **ENGINE,
        **SIZES,
    )

    workspace = Workspace(root=tmp_path / "home")
    directory = RunDirectory(str(workspace.run_folder(run_id)))
    job = TrainingJob.from_json(read_unverified_json(directory, "job.json"))
    assert ENGINE.items() <= asdict(job.config).items()
    [recorded] = past_trainings(workspace, most=1)
    assert {
        f"training.{name}": str(value) for name, value in ENGINE.items()
    }.items() <= recorded.parameters.items()
    assert job.model == "ctrdnn(hidden_widths=24-12, embedding_dim=4, dropout=0.0)"
    trained, plain = read_training_run(directory), run_plainly(job)
    assert [step.loss for step in trained.steps] == pytest.approx(plain.losses, abs=2e-6)
    assert trained.quality.auc == pytest.approx(plain.quality.auc, abs=1e-5)
    assert plain.losses != pytest.approx(run_plainly(replace_rate(job, 0.04)).losses, abs=1e-4)
    profiles = [json.loads(path.read_text()) for path in workspace.profiles_directory.glob("local-cpu-*")]
    assert {(each["model"], each["num_threads"]) for each in profiles} == {(job.model, 2)}


def replace_rate(job, rate):
    """Return the job with another learning rate of the dense layers, from which its losses must differ."""
    document = job.to_json()
    document["config"]["dense_learning_rate"] = rate
    return TrainingJob.from_json(document)
