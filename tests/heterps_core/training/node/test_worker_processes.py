import subprocess
import sys
from pathlib import Path

RUN_ONE_WORKER = """
import os, sys
from pathlib import Path
from heterps_core.training.node import worker_processes
if __name__ == "__main__":
    worker_processes._IMPORTED_BEFORE = ()
    worker_processes.prepare_to_fork()
    status = worker_processes.run_workers([{}], log_path=Path(sys.argv[1]), is_over=lambda: False)
    print(status, os.environ["TMPDIR"])
"""


def test_workers_are_forked_where_the_temporary_folder_has_a_long_name(tmp_path: Path) -> None:
    """A socket's name has at most 107 characters; that of a node's folder may have more."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    (tmp_path / "run.py").write_text(RUN_ONE_WORKER)

    ended = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "workers.log")],
        env={"TMPDIR": str(folder), "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    # The worker was begun: it ends itself, as it is not told of a run.
    assert ended.stdout.split() == ["1", str(folder)]
    assert "HETERPS_RUN_DIR" in (tmp_path / "workers.log").read_text()
