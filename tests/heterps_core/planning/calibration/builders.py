"""Answered predictions of synthetic nights."""

from heterps_core.planning.calibration.run_speed import AnsweredPrediction, RunSpeed, StageSpeed


def answers(ratios, *, path=("machine", "ctrdnn", "1 + 1"), first_night=0):
    """Predictions of one second each that took `ratios` seconds, a night each."""
    return [
        AnsweredPrediction(
            run_id=f"night-{first_night + index:03d}",
            path=path,
            predicted_seconds=1.0,
            measured_seconds=ratio,
        )
        for index, ratio in enumerate(ratios)
    ]


def make_speed(run_id="20261121-0230-00000001", *, is_dry_run=False, measured_step_seconds=0.012, factor=1.0):
    """A plan of two stages; the first was predicted at 8 ms and took 10 ms."""
    return RunSpeed(
        run_id=run_id,
        model="ctrdnn",
        hardware="cpu-c7i | gpu-t4",
        is_dry_run=is_dry_run,
        predicted_step_seconds=0.010,
        correction_factor=factor,
        measured_step_seconds=measured_step_seconds,
        stages=(
            StageSpeed(
                device_type="cpu-c7i", num_replicas=2, predicted_seconds=0.008, measured_seconds=0.010
            ),
            StageSpeed(device_type="gpu-t4", num_replicas=1, predicted_seconds=0.010, measured_seconds=None),
        ),
    )
