"""Whether this machine can rent on AWS: everything that an account tells free of charge, without buying."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import ARCHITECTURES
from infra.checks import Check, CheckState
from infra.providers.aws.account import Account, Question
from infra.providers.aws.bucket_questions import BUCKET_QUESTIONS, STORE_QUESTION
from infra.providers.aws.launch_questions import LAUNCH_QUESTIONS
from infra.providers.aws.launch_template import DISK_GB
from infra.providers.aws.node_role import is_in_s3
from infra.providers.aws.queries import find_images
from infra.workspace import RUN_STORE_VARIABLE

if TYPE_CHECKING:
    from infra.providers.aws.launch import MachineSettings


def access_checks(machines: MachineSettings, *, client_of: Callable[[str], Any]) -> Iterator[Check]:
    """Check with AWS that a launch would succeed.

    Nothing is launched. A security group and a launch template, which cost nothing, are made and deleted for a dry
    run of AWS. Making a role is not tried, as IAM knows no dry run.

    Args:
        machines: Settings of a launch.
        client_of: Returns the client of a service, the same one each time.
    """
    account = Account(client_of=client_of, machines=machines)
    credentials = Question(what="AWS credentials", ask=_credentials, is_right=True).check(account)
    yield credentials
    if credentials.state is CheckState.OK:
        yield from _image_checks(account)
        yield from (question.check(account) for question in LAUNCH_QUESTIONS)
        if is_in_s3(os.environ.get(RUN_STORE_VARIABLE, "")):
            yield from (question.check(account) for question in BUCKET_QUESTIONS)
    yield STORE_QUESTION.check(account)


def _credentials(account: Account) -> str:
    account.ec2.describe_instances(MaxResults=5)
    return f"accepted in {account.region}"


def _image_checks(account: Account) -> Iterator[Check]:
    """Yield a check for each architecture; one image is enough, as plans leave out the device types of the other."""
    checks = [
        Question(what=f"AWS image of {name}", ask=partial(_fitting_image, architecture=name)).check(account)
        for name in ARCHITECTURES
    ]
    has_one = any(check.state is CheckState.OK for check in checks)
    for check in checks:
        is_note = has_one and check.state is CheckState.MISSING
        yield replace(check, state=CheckState.NOTE) if is_note else check


def _fitting_image(account: Account, *, architecture: str) -> str:
    image = find_images(account.ec2, account.machines.image_ids, needed=[architecture])[architecture]
    image_id, root = image["ImageId"], image.get("RootDeviceName")
    disks = (disk["Ebs"] for disk in image.get("BlockDeviceMappings", ()) if disk.get("DeviceName") == root)
    size_gb = max((disk.get("VolumeSize", 0) for disk in disks), default=0)
    if size_gb > DISK_GB:
        raise ConfigurationError(
            f"the snapshot of an image must fit the disk of {DISK_GB} GB that machines get, and that of "
            f"{image_id} has {size_gb} GB; make the image from an instance whose root volume is smaller"
        )
    return image_id
