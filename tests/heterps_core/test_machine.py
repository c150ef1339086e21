import os

import pytest

from heterps_core import machine
from heterps_core.machine import multiplies_bfloat16, software_versions, this_machine


def test_this_machine_stays_the_same_machine():
    here = this_machine()

    assert here.fingerprint() == this_machine().fingerprint()
    assert 1 <= here.num_cores <= os.cpu_count()
    assert here.processor


@pytest.mark.parametrize(
    ("fields", "has_it"),
    [
        ({"flags": "fpu avx512f avx512_bf16"}, True),
        ({"flags": "fpu amx_bf16 amx_tile"}, True),
        ({"Features": "asimd bf16"}, True),
        ({"flags": "fpu avx512f"}, False),
        ({}, False),
    ],
)
def test_a_processor_multiplies_bfloat16_by_an_instruction_of_its_own(monkeypatch, fields, has_it):
    monkeypatch.setattr(machine, "_processor_fields", lambda: fields)

    assert multiplies_bfloat16() is has_it


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model name": "Xeon", "cpu family": "6", "model": "143"}, "Xeon (cpu family 6, model 143)"),
        ({"CPU implementer": "0x41", "CPU part": "0xd4f"}, "aarch64 (CPU implementer 0x41, CPU part 0xd4f)"),
        ({}, "aarch64"),
    ],
    ids=["x86", "Arm", "unknown"],
)
def test_processors_of_one_architecture_are_told_apart(monkeypatch, fields, name):
    monkeypatch.setattr(machine, "_processor_fields", lambda: fields)
    monkeypatch.setattr(machine.platform, "processor", lambda: "aarch64")

    assert this_machine().processor == name


def test_versions_are_those_of_the_imported_packages():
    import numpy
    import torch

    versions = software_versions()

    assert versions["numpy"] == numpy.__version__
    assert versions["torch"] == torch.__version__
