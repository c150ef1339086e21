import os

from heterps_core.profiling.machine import software_versions, this_machine


def test_this_machine_stays_the_same_machine():
    machine = this_machine()

    assert machine.fingerprint() == this_machine().fingerprint()
    assert 1 <= machine.num_cores <= os.cpu_count()
    assert machine.processor


def test_versions_are_those_of_the_imported_packages():
    import numpy
    import torch

    versions = software_versions()

    assert versions["numpy"] == numpy.__version__
    assert versions["torch"] == torch.__version__
