"""Of the last words of several workers, those of the one that began are told."""

import pytest

from heterps_core.cluster import Cluster, Node
from heterps_core.errors import InterruptedTrainingError, TrainingError
from heterps_core.hardware import Market
from heterps_core.training.monitor import follow_training
from heterps_core.training.node.failures import WorkerFailure, root_cause, write_failure
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.transport.rank_layout import LostWorkerError, RankLayout


def failure(rank: int, failed_at_s: float, **others: object) -> WorkerFailure:
    values: dict[str, object] = {
        "stage": rank,
        "replica": 0,
        "step": 7,
        "attempt": 0,
        "error_type": "LostWorkerError",
        "message": f"told by {rank}",
        "exit_status": 6,
        "is_cause": False,
        "is_mistake": False,
    }
    return WorkerFailure(rank=rank, failed_at_s=failed_at_s, **(values | others))  # type: ignore[arg-type]


def told(tmp_path, *failures: WorkerFailure) -> WorkerFailure | None:
    run = RunDirectory(str(tmp_path))
    for each in failures:
        write_failure(run, each)
    return root_cause(run)


def test_an_error_comes_before_the_losses_that_it_caused(tmp_path):
    cause = failure(2, 9.0, is_cause=True, error_type="ValueError")

    assert told(tmp_path, failure(0, 5.0, lost=(1, 1, 0)), failure(1, 6.0, lost=(2, 2, 0)), cause) == cause


def test_a_loss_that_is_no_number_comes_before_the_gradients_that_it_spoils(tmp_path):
    spoiled = failure(0, 5.0, is_cause=True, error_type="SpoiledGradientsError")
    waiting = failure(2, 4.0, lost=(1, 1, 0))

    assert told(tmp_path / "one", spoiled, waiting) == spoiled
    loss = failure(1, 6.0, is_cause=True, error_type="TrainingError")
    assert told(tmp_path / "both", spoiled, waiting, loss) == loss


def test_in_a_row_of_waiting_workers_the_one_that_nobody_heard_of_is_missed(tmp_path):
    # 3 stands still; 2 waits for it, 1 for 2, and 0 for 1.
    waiting = [
        failure(0, 5.0, lost=(1, 1, 0)),
        failure(1, 6.0, lost=(2, 2, 0)),
        failure(2, 7.0, lost=(3, 3, 0)),
    ]

    assert told(tmp_path, *waiting) == waiting[2]


def test_a_later_attempt_counts(tmp_path):
    later = failure(0, 20.0, attempt=1)

    assert told(tmp_path, failure(1, 5.0, is_cause=True), later) == later
    assert told(tmp_path / "empty") is None


def test_only_what_the_user_can_mend_is_not_tried_again():
    assert failure(0, 1.0, is_mistake=True, error_type="DataError").is_final
    assert not failure(0, 1.0, is_mistake=True, error_type="CheckpointError").is_final
    assert not failure(0, 1.0, error_type="ValueError").is_final


def make_cluster() -> Cluster:
    """The second replica of stage 1 is the only worker of the stage's second node."""
    nodes = tuple(
        Node(
            node_id=node_id,
            address="127.0.0.1",
            device_type="cpu",
            instance_type="local",
            market=Market.ON_DEMAND,
            stage=stage,
            num_workers=1,
            price_usd_per_hour=0.1,
            provider_instance_id="1",
        )
        for node_id, stage in (("a", 0), ("b", 1), ("c", 1))
    )
    return Cluster(run_id="r", provider="local", nodes=nodes, rendezvous="127.0.0.1:1", created_at="now")


def test_the_log_of_the_silent_worker_is_shown(tmp_path):
    run = RunDirectory(str(tmp_path))
    cluster = make_cluster()
    lost = LostWorkerError(RankLayout(((0,), (2, 1))), 1, limit_s=20.0, has_ended=False)
    write_failure(run, failure(0, 1.0, message=str(lost), lost=lost.lost))
    run.write_json(
        "nodes/a/exit.json",
        {"exit_status": 1, "log_tail": "the log of the waiting one", "is_mistake": False},
    )
    run.write_bytes("nodes/c/workers.log", b"what the silent one said last")

    with pytest.raises(TrainingError) as error:
        follow_training(run, cluster, on_progress=lambda progress: None)

    assert str(error.value).startswith(
        "worker 0 (stage 0, replica 0) failed after step 7: worker 1 (stage 1, replica 1) must answer within 20 s, "
        "but it is silent"
    )
    assert "its log is nodes/c/workers.log" in str(error.value)
    assert str(error.value).endswith("what the silent one said last")


def test_who_left_no_last_words_is_named_where_the_others_cannot_tell_whom_they_miss(tmp_path):
    """Two replicas that sum their gradients by messages: gloo does not say whose are missing."""
    run = RunDirectory(str(tmp_path))
    for rank, stage in ((0, 0), (1, 1)):
        write_failure(run, failure(rank, 1.0, stage=stage, message="another worker is silent", is_loss=True))
    run.write_json("nodes/a/exit.json", {"exit_status": 1, "log_tail": "", "is_mistake": False})

    with pytest.raises(InterruptedTrainingError) as error:
        follow_training(run, make_cluster(), on_progress=lambda progress: None)

    assert "after step 7: another worker is silent; no word came from stage 1, replica 1 on node c" in str(
        error.value
    )


def test_the_same_error_after_the_same_step_in_two_attempts_ends_for_good(tmp_path):
    run = RunDirectory(str(tmp_path))
    for attempt, step in ((0, 4), (1, 7)):
        cause = {"is_cause": True, "error_type": "ValueError", "message": "cursed"}
        write_failure(run, failure(1, 1.0, attempt=attempt, step=step, **cause))
    run.write_json("nodes/a/exit.json", {"exit_status": 1, "log_tail": "", "is_mistake": False})

    with pytest.raises(InterruptedTrainingError, match="after step 7: cursed"):
        follow_training(run, make_cluster(), on_progress=lambda progress: None)

    write_failure(run, failure(1, 1.0, attempt=2, step=7, **cause))
    with pytest.raises(
        TrainingError, match="cursed, as in the attempt before, so it is not tried again"
    ) as error:
        follow_training(run, make_cluster(), on_progress=lambda progress: None)
    assert not isinstance(error.value, InterruptedTrainingError)
