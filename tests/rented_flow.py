"""`train-ctr` on a cloud whose machines cannot be had while a file is there: `python -m tests.rented_flow FILE ...`.

What stands behind FILE are the parameters of the flow.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import boto3
from botocore.awsrequest import AWSPreparedRequest, AWSResponse

from flows.command_line import main
from flows.parameters import TrainParameters
from tests.infra.moto_ec2 import refused_fleet

NO_CAPACITY = "UnfulfillableCapacity"


def refuse_fleets_while(is_full: Path) -> None:
    """Let EC2 answer to this process that no machine can be had, as long as a file is there."""

    def answer(request: AWSPreparedRequest, **_: Any) -> AWSResponse | None:
        return refused_fleet(request.url, NO_CAPACITY, message="no machines") if is_full.exists() else None

    boto3.setup_default_session()
    assert boto3.DEFAULT_SESSION is not None
    boto3.DEFAULT_SESSION.events.register("before-send.ec2.CreateFleet", answer)  # type: ignore[arg-type]


if __name__ == "__main__":
    refuse_fleets_while(Path(sys.argv.pop(1)))
    sys.exit(main("flows.train_ctr", TrainParameters))
