import subprocess
import sys
from pathlib import Path

TELL_THREADS = """
import ctypes, multiprocessing, os, threading
from heterps_core.training.node import worker_processes

def tell(numbers):
    import torch
    torch.set_num_threads(3)
    maps = open("/proc/self/maps").read().split()
    openmp = ctypes.CDLL(next(path for path in maps if "gomp" in path or "iomp" in path))
    beside = threading.Thread(target=lambda: numbers.put(openmp.omp_get_max_threads()))
    beside.start()
    beside.join()
    numbers.put(openmp.omp_get_max_threads())

if __name__ == "__main__":
    # Forked workers find OpenMP loaded.
    worker_processes._IMPORTED_BEFORE = ("torch",)
    worker_processes.prepare_to_fork()
    context = multiprocessing.get_context("forkserver")
    numbers = context.Queue()
    context.Process(target=tell, args=(numbers,)).start()
    print(numbers.get(timeout=50), numbers.get(timeout=50), os.environ["OMP_NUM_THREADS"])
"""


def test_of_a_worker_only_the_main_thread_takes_several_cores_for_a_compiled_loop(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(TELL_THREADS)

    reported = subprocess.run(
        [sys.executable, str(tmp_path / "run.py")],
        env={"OMP_NUM_THREADS": "2", "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    # What this process and its others take stays as it was.
    assert reported.stdout.split() == ["1", "3", "2"]


COUNT_FILES = """
import multiprocessing, os, resource
from heterps_core.training.node import worker_processes

def count(numbers):
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
    numbers.put(len(files))

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))
    worker_processes._IMPORTED_BEFORE = ()
    worker_processes.prepare_to_fork()
    context = multiprocessing.get_context("forkserver")
    numbers = context.Queue()
    context.Process(target=count, args=(numbers,)).start()
    print(numbers.get(timeout=50))
"""


def test_a_worker_opens_more_files_than_the_soft_limit_of_its_node(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(COUNT_FILES)

    counted = subprocess.run(
        [sys.executable, str(tmp_path / "run.py")],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )

    assert counted.stdout.split() == ["300"]


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
        timeout=300,
        check=True,
    )

    # The worker was begun: it ends itself, as nobody names a run to it.
    assert ended.stdout.split() == ["1", str(folder)]
    assert "HETERPS_RUN_DIR" in (tmp_path / "workers.log").read_text()
