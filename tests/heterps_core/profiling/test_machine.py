import os

import pytest

from heterps_core.profiling import machine
from heterps_core.profiling.machine import multiplies_bfloat16, software_versions, this_machine


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


def test_versions_are_those_of_the_imported_packages():
    import numpy
    import torch

    versions = software_versions()

    assert versions["numpy"] == numpy.__version__
    assert versions["torch"] == torch.__version__
