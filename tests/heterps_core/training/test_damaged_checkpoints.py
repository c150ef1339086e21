"""What is damaged or forged in a checkpoint is never loaded: all workers go back to the one before, and say why."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from heterps_core.data.features import FeatureSpec
from heterps_core.errors import CheckpointError
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import (
    TrainingCursor,
    load_latest_checkpoint,
    step_to_resume_from,
)
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.storage.run_directory import RunDirectory
from tests.checkpoints import save_checkpoint
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

SECRET = b"the key of this run"
STEPS = (10, 20)
OLDER, NEWEST = (f"checkpoints/{step:08d}" for step in STEPS)


def build(num_replicas: int) -> StageModel:
    config = TrainingConfig(batch_size=8, num_microbatches=1, num_epochs=1, seed=1)
    features = FeatureSpec(num_dense=2, slot_rows=(3_001, 3_000))
    group = dist.group.WORLD if num_replicas > 1 else None
    return build_stage_model(
        "ctrdnn", features, config, [Stage(0, 7, "cpu", num_replicas)], StagePlace(group=group)
    )


def save_both(rank: int, folder: str) -> None:
    """Write two checkpoints, in which all weights are the number of the step."""
    model = build(2)
    for step in STEPS:
        model.tables["embedding"].weight_RD.fill_(step)
        save_checkpoint(
            RunDirectory(folder, secret=SECRET), model, TrainingCursor(step=step), group=dist.group.WORLD
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_in_processes(save_both, 2, str(folder))
    return folder


def data_file_of_rank_1(folder: Path) -> Path:
    return sorted(path for path in (folder / NEWEST).iterdir() if path.suffix in (".bin", ".distcp"))[-1]


def flip_64_bits(folder: Path) -> Path:
    path = data_file_of_rank_1(folder)
    content = bytearray(path.read_bytes())
    for index in range(64):
        content[len(content) // 2 + 4 * index] ^= 0x40
    path.write_bytes(content)
    return path


def cut_off(folder: Path) -> Path:
    path = data_file_of_rank_1(folder)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def cut_off_whole_blocks(folder: Path) -> Path:
    path = data_file_of_rank_1(folder)
    path.write_bytes(path.read_bytes()[: 2 * 65_536])
    return path


def empty(folder: Path) -> Path:
    path = data_file_of_rank_1(folder)
    path.write_bytes(b"")
    return path


def remove(folder: Path) -> Path:
    path = data_file_of_rank_1(folder)
    path.unlink()
    return path


def manifest_of(folder: Path) -> Path:
    return folder / NEWEST / "manifest.json"


def empty_the_manifest(folder: Path) -> Path:
    manifest_of(folder).write_bytes(b"")
    return manifest_of(folder)


def cut_off_the_manifest(folder: Path) -> Path:
    manifest_of(folder).write_bytes(manifest_of(folder).read_bytes()[:200])
    return manifest_of(folder)


def other_bytes_with_matching_hashes(folder: Path) -> Path:
    """As one does who can write to the run store but does not have the run's key."""
    path = data_file_of_rank_1(folder)
    path.write_bytes(bytes(path.stat().st_size))
    blocks = range(0, path.stat().st_size, 65_536)
    hashes = b"".join(hashlib.sha256(path.read_bytes()[at : at + 65_536]).digest() for at in blocks)
    path.with_name(f"{path.name}.sha256").write_bytes(hashes)
    return path.with_name(f"{path.name}.sha256")


def sign_with_another_key(folder: Path) -> Path:
    sign(folder, json.loads(manifest_of(folder).read_text())["document"], key=b"another")
    return manifest_of(folder)


def take_the_tag_off(folder: Path) -> Path:
    manifest_of(folder).write_text(json.dumps(json.loads(manifest_of(folder).read_text())["document"]))
    return manifest_of(folder)


def put_the_older_manifest_in_its_place(folder: Path) -> Path:
    shutil.copyfile(folder / OLDER / "manifest.json", manifest_of(folder))
    return manifest_of(folder)


def lead_out_of_the_folder(folder: Path) -> Path:
    """Even a node of the run, which has its key, names no other files."""
    document = json.loads(manifest_of(folder).read_text())["document"]
    document = json.loads(json.dumps(document).replace("rank-00001.bin", "../../../rank-00001.bin"))
    sign(folder, document, key=SECRET)
    return manifest_of(folder)


def lead_to_another_folder(folder: Path) -> Path:
    document = json.loads(manifest_of(folder).read_text())["document"]
    document["layers"][0]["folder"] = "../../elsewhere"
    sign(folder, document, key=SECRET)
    return manifest_of(folder)


def sign(folder: Path, document: dict, *, key: bytes) -> None:
    """RFC 2104 over the place of the manifest and its document in one line."""
    content = json.dumps(document, sort_keys=True, separators=(",", ":"))
    tag = hmac.digest(key, f"{NEWEST}/manifest.json\n{content}".encode(), "sha256").hex()
    manifest_of(folder).write_text(json.dumps({"hmac_sha256": tag, "document": document}))


DAMAGES: tuple[Callable[[Path], Path], ...] = (
    flip_64_bits,
    cut_off,
    cut_off_whole_blocks,
    empty,
    remove,
    empty_the_manifest,
    cut_off_the_manifest,
    other_bytes_with_matching_hashes,
    sign_with_another_key,
    take_the_tag_off,
    put_the_older_manifest_in_its_place,
    lead_out_of_the_folder,
    lead_to_another_folder,
)


class Messages(logging.Handler):
    """Keeps what is logged, in processes without pytest."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def load_each(
    rank: int, folders: list[str], num_replicas: int
) -> list[tuple[object, float, float, list[str]]]:
    """Return for each folder the step to go on from, the bounds of this replica's rows, and what was said."""
    found = []
    for folder in folders:
        model, messages = build(num_replicas), Messages()
        logging.getLogger("heterps_core").addHandler(messages)
        weight = model.tables["embedding"].weight_RD
        try:
            cursor = load_latest_checkpoint(RunDirectory(folder, secret=SECRET), model)
            outcome: object = cursor and cursor.step
        except CheckpointError as error:
            outcome = f"CheckpointError: {error}"
        logging.getLogger("heterps_core").removeHandler(messages)
        found.append((outcome, weight.min().item(), weight.max().item(), messages.said))
    return found


@pytest.fixture(scope="module")
def loaded(saved, tmp_path_factory) -> dict[str, tuple[str, list]]:
    """By the damage: the damaged file, and what each of two replicas loaded."""
    folder = tmp_path_factory.mktemp("damaged")
    files = {}
    for damage in DAMAGES:
        shutil.copytree(saved, folder / damage.__name__)
        files[damage.__name__] = damage(folder / damage.__name__)
    results = run_in_processes(load_each, 2, [str(folder / name) for name in files], 2)
    return {
        name: (str(file.relative_to(folder / name)), list(each))
        for (name, file), *each in zip(files.items(), *results, strict=True)
    }


def test_the_newest_is_loaded_where_nothing_is_damaged(saved):
    assert run_in_processes(load_each, 2, [str(saved)], 2) == [[(20, 20.0, 20.0, [])]] * 2


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_all_replicas_go_back_to_the_checkpoint_before_it_and_name_the_file(loaded, damage):
    """Only the second replica reads the damaged file of rows, and the first must not go on from another step."""
    file, replicas = loaded[damage.__name__]

    for step, lowest, highest, said in replicas:
        assert (step, lowest, highest) == (10, 10.0, 10.0)
        [line] = said
        assert line.startswith("the checkpoint of step 20 is not used: ")
        assert file in line


def test_where_none_is_whole_the_run_ends_on_one_line_that_names_the_file(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    for step in (OLDER, NEWEST):
        (tmp_path / "run" / step / "manifest.json").write_bytes(b"")

    [(outcome, *_)] = load_each(0, [str(tmp_path / "run")], 1)

    assert outcome == (
        f"CheckpointError: one of the checkpoints 00000010, 00000020 must be whole and of this model, but none is: "
        f"{OLDER}/manifest.json in {tmp_path / 'run'} must be JSON, but is damaged: Expecting value: line 1 column 1 "
        f"(char 0); start a new run"
    )


def test_a_run_without_a_whole_manifest_is_refused_before_machines_are_rented_for_it(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    run = RunDirectory(str(tmp_path / "run"), secret=SECRET)

    assert step_to_resume_from(run) == 20
    empty_the_manifest(tmp_path / "run")
    assert step_to_resume_from(run) == 10
    (tmp_path / "run" / OLDER / "manifest.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"manifest.json .* is damaged: .*; start a new run$"):
        step_to_resume_from(run)
    assert step_to_resume_from(RunDirectory(str(tmp_path / "new"))) == 0


def test_a_checkpoint_of_the_version_before_which_is_one_folder_is_loaded(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    document = json.loads(manifest_of(tmp_path / "run").read_text())["document"]
    [layer] = document.pop("layers")
    for rows in layer["tensors"]["rows"]:
        del rows["numbers_offset"], rows["stop_row"]
    sign(tmp_path / "run", document | {"schema_version": 2, "tensors": layer["tensors"]}, key=SECRET)

    assert load_each(0, [str(tmp_path / "run")], 1) == [(20, 20.0, 20.0, [])]


class RunsCode:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_a_crafted_checkpoint_of_an_earlier_version_is_refused_and_runs_nothing(tmp_path):
    folder = tmp_path / NEWEST
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(RunsCode(tmp_path / "code ran")))
    manifest = {
        "schema_version": 1,
        "cursor": {"epoch": 0, "batch_index": 20, "step": 20},
        "bytes_per_file": {".metadata": (folder / ".metadata").stat().st_size},
    }
    manifest_of(tmp_path).write_text(json.dumps(manifest))

    [(outcome, *_)] = load_each(0, [str(tmp_path)], 1)

    assert not (tmp_path / "code ran").exists()
    assert "written by an earlier version of heterps" in outcome
    assert outcome.endswith("; start a new run")
