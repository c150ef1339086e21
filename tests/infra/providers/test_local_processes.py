import os

from infra.providers.local_processes import ProcessIdentity


def test_a_pid_that_was_used_again_is_not_taken_for_the_owner():
    now = ProcessIdentity.of(os.getpid())

    assert now.is_alive()
    assert not ProcessIdentity(pid=now.pid, created_at_s=now.created_at_s - 60).is_alive()
