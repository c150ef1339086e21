"""The last words of the worker that failed first are reported, among those of several."""

from dataclasses import replace

from heterps_core.cluster import Cluster, Node
from heterps_core.hardware import Market
from heterps_core.training.monitor import follow_training
from heterps_core.training.node.failures import WorkerFailure, root_cause, write_failure
from heterps_core.training.node.node_life import write_end
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.transport.rank_layout import LostWorkerError, RankLayout


def failure(rank: int, failed_at_s: float, **others: object) -> WorkerFailure:
    values: dict[str, object] = {
        "stage": rank,
        "replica": 0,
        "step": 7,
        "attempt": 1,
        "error_type": "LostWorkerError",
        "message": f"reported by {rank}",
        "exit_status": 6,
        "is_cause": False,
        "is_mistake": False,
    }
    return WorkerFailure(rank=rank, failed_at_s=failed_at_s, **(values | others))  # type: ignore[arg-type]


def reported(tmp_path, *failures: WorkerFailure) -> WorkerFailure | None:
    run = RunDirectory(str(tmp_path))
    for each in failures:
        write_failure(run, each)
    return root_cause(run)


def test_an_error_comes_before_the_losses_that_it_caused(tmp_path):
    cause = failure(2, 9.0, is_cause=True, error_type="ValueError")

    assert (
        reported(tmp_path, failure(0, 5.0, lost=(1, 1, 0)), failure(1, 6.0, lost=(2, 2, 0)), cause) == cause
    )


def test_a_loss_that_is_no_number_comes_before_the_gradients_that_it_spoils(tmp_path):
    spoiled = failure(0, 5.0, is_cause=True, error_type="SpoiledGradientsError")
    waiting = failure(2, 4.0, lost=(1, 1, 0))

    assert reported(tmp_path / "one", spoiled, waiting) == spoiled
    loss = failure(1, 6.0, is_cause=True, error_type="TrainingError")
    assert reported(tmp_path / "both", spoiled, waiting, loss) == loss


def test_in_a_row_of_waiting_workers_the_one_that_nobody_heard_of_is_missed(tmp_path):
    # 3 stands still; 2 waits for it, 1 for 2, and 0 for 1.
    waiting = [
        failure(0, 5.0, lost=(1, 1, 0)),
        failure(1, 6.0, lost=(2, 2, 0)),
        failure(2, 7.0, lost=(3, 3, 0)),
    ]

    assert reported(tmp_path, *waiting) == waiting[2]


def test_a_later_attempt_counts(tmp_path):
    later = failure(0, 20.0, attempt=2)

    assert reported(tmp_path, failure(1, 5.0, is_cause=True), later) == later
    assert reported(tmp_path / "empty") is None


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


def end(run: RunDirectory, node_id: str, *, generation: int = 1) -> None:
    """Let a node tell that its workers failed."""
    write_end(run, node_id, exit_status=1, log_tail="its log", generation=generation)


def test_the_log_of_the_silent_worker_is_shown(tmp_path):
    run = RunDirectory(str(tmp_path))
    cluster = make_cluster()
    lost = LostWorkerError(RankLayout(((0,), (2, 1))), 1, limit_s=20.0, has_ended=False)
    write_failure(run, failure(0, 1.0, message=str(lost), lost=lost.lost, is_loss=True))
    end(run, "a")
    end(run, "b")
    run.write_bytes("nodes/c/workers.log", b"what the silent one said last")

    lost = follow_training(run, cluster, on_progress=lambda progress: None)

    assert isinstance(lost, MachinesLost)
    assert lost.message.startswith(
        "worker 0 (stage 0, replica 0) failed after step 7: worker 1 (stage 1, replica 1) must answer within 20 s, "
        "but it is silent"
    )
    assert "its log is nodes/c/workers.log" in lost.message
    assert lost.message.endswith("what the silent one said last")
    assert lost.node_ids == ("c",)


def test_who_left_no_last_words_is_named_where_the_others_cannot_tell_whom_they_miss(tmp_path):
    """Two replicas that sum their gradients by messages: gloo does not say whose are missing."""
    run = RunDirectory(str(tmp_path))
    for rank, stage in ((0, 0), (1, 1)):
        write_failure(run, failure(rank, 1.0, stage=stage, message="another worker is silent", is_loss=True))
    end(run, "a")
    end(run, "b")

    lost = follow_training(run, make_cluster(), on_progress=lambda progress: None)

    assert isinstance(lost, MachinesLost)
    assert (
        "after step 7: another worker is silent; no word came from stage 1, replica 1 on node c"
        in lost.message
    )


def test_an_own_error_of_a_worker_loses_no_machine_though_others_have_not_ended_yet(tmp_path):
    run = RunDirectory(str(tmp_path))
    own = {"is_cause": True, "error_type": "ValueError", "message": "cursed"}
    write_failure(run, failure(0, 1.0, step=4, attempt=0, is_mistake=True, message="of a generation before"))
    write_failure(run, failure(1, 1.0, **own))
    end(run, "b")

    lost = follow_training(run, make_cluster(), on_progress=lambda progress: None)

    assert isinstance(lost, MachinesLost)
    assert "after step 7: cursed" in lost.message
    assert lost.node_ids == ()
    assert lost.signature == "ValueError at stage 1 after step 7: cursed"


def test_what_an_end_in_an_earlier_generation_said_does_not_count(tmp_path):
    run = RunDirectory(str(tmp_path))
    write_failure(run, failure(0, 1.0, lost=(1, 1, 0), is_loss=True, attempt=2))
    end(run, "a", generation=2)
    end(run, "b", generation=1)
    end(run, "c", generation=2)

    lost = follow_training(run, replace(make_cluster(), generation=2), on_progress=lambda progress: None)

    assert isinstance(lost, MachinesLost)
    assert lost.node_ids == ("b",)
