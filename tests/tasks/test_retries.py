import importlib
import pkgutil

import pytest
from prefect import Task, flow

import tasks
from heterps_core.errors import ProvisioningError
from tasks.steps import REPEATABLE, Step

REPEATED = {"refresh prices", "end orphans", "close dead records", "publish report"}


def all_tasks():
    found = {}
    for module in pkgutil.walk_packages(tasks.__path__, "tasks."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Step):
                found[value.task.name] = value.task
    return found


def test_only_what_may_be_repeated_is_tried_again_and_never_at_the_same_moment():
    retried = {name: one for name, one in all_tasks().items() if one.retries}

    assert set(retried) == REPEATED
    assert all(one.retry_jitter_factor > 0 and one.retry_delay_seconds for one in retried.values())


@pytest.mark.parametrize(
    "name", ["train", "provision", "register model", "record plan", "measure device types"]
)
def test_what_costs_or_writes_twice_is_not(name):
    assert all_tasks()[name].retries == 0


@pytest.mark.usefixtures("prefect_server")
def test_a_task_that_fails_twice_ends_well_and_one_that_fails_on_is_reported():
    attempts = []

    def ask(ends_after):
        attempts.append(1)
        if len(attempts) < ends_after:
            raise ProvisioningError("no answer")
        return "prices"

    @flow
    def night(ends_after):
        # The waits are not what is tested.
        asked = Task(ask, **{**REPEATABLE, "retry_delay_seconds": 0.01})
        return asked(ends_after)

    assert night(3) == "prices"
    attempts.clear()
    with pytest.raises(ProvisioningError, match="no answer"):
        night(9)
    assert len(attempts) == 3
