import base64
import subprocess
from datetime import UTC, datetime

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.plans.provisioning_plan import TableDisk
from infra.providers.aws.launch import MachineSettings
from infra.providers.aws.launch_template import DISK_GB
from infra.providers.aws.provider import AwsEc2Provider
from tests.infra.builders import plan, with_disks


def template_of(client):
    (template,) = client.describe_launch_templates()["LaunchTemplates"]
    (version,) = client.describe_launch_template_versions(LaunchTemplateId=template["LaunchTemplateId"])[
        "LaunchTemplateVersions"
    ]
    return template, version["LaunchTemplateData"]


def script_of(client):
    return base64.b64decode(template_of(client)[1]["UserData"]).decode()


def test_machines_are_protected_by_their_template(launch, client):
    launch()

    _, data = template_of(client)

    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    (disk,) = data["BlockDeviceMappings"]
    assert disk["DeviceName"] == "/dev/sda1"
    assert (disk["Ebs"]["Encrypted"], disk["Ebs"]["DeleteOnTermination"]) == (True, True)
    assert "KeyName" not in data
    assert "IamInstanceProfile" not in data


def test_machines_have_room_for_rows_of_tables_and_tell_what_it_costs(launch, client, provider, ledger):
    disk = TableDisk(gigabytes=300, mib_per_s=250, usd_per_hour=0.04)
    bought = with_disks(plan(), disk, disk)

    launch(bought)

    _, data = template_of(client)
    (volume,) = data["BlockDeviceMappings"]
    assert (volume["Ebs"]["VolumeSize"], volume["Ebs"]["Throughput"]) == (DISK_GB + 300, 250)
    assert volume["Ebs"]["Iops"] == 3000
    # The ledger has it, and where that is lost the machines themselves.
    assert {entry.disk_usd_per_hour for entry in ledger.entries()} == {0.04}
    assert {instance.terms.disk_usd_per_hour for instance in provider.list_instances()} == {0.04}
    assert provider.billed_usd_per_hour(bought) == pytest.approx(
        provider.billed_usd_per_hour(plan()) + 2 * 0.04
    )


def test_machines_of_other_stages_have_no_room_for_rows_and_do_not_pay_for_it(
    launch, client, provider, ledger
):
    bought = with_disks(plan(), None, TableDisk(gigabytes=300, mib_per_s=250, usd_per_hour=0.04))

    launch(bought)

    by_name = {
        template["LaunchTemplateName"]: client.describe_launch_template_versions(
            LaunchTemplateId=template["LaunchTemplateId"]
        )["LaunchTemplateVersions"][0]["LaunchTemplateData"]
        for template in client.describe_launch_templates()["LaunchTemplates"]
    }
    sizes = {
        name: data["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] for name, data in sorted(by_name.items())
    }
    assert list(sizes.values()) == [DISK_GB, DISK_GB + 300]
    assert [name.endswith("/tables-300-250") for name in sizes] == [False, True]
    assert {entry.stage: entry.disk_usd_per_hour for entry in ledger.entries()} == {0: 0.0, 1: 0.04}
    terms = [instance.terms for instance in provider.list_instances()]
    assert {each.stage: each.disk_usd_per_hour for each in terms} == {0: 0.0, 1: 0.04}
    assert provider.billed_usd_per_hour(bought) == pytest.approx(provider.billed_usd_per_hour(plan()) + 0.04)

    provider.terminate("r1")

    assert client.describe_launch_templates()["LaunchTemplates"] == []


def test_a_volume_is_given_the_operations_without_which_ebs_refuses_its_throughput(launch, client):
    disk = TableDisk(gigabytes=300, mib_per_s=850, usd_per_hour=0.04)
    launch(with_disks(plan(), disk, disk))

    (volume,) = template_of(client)[1]["BlockDeviceMappings"]

    # At most 0.25 MiB/s for each (Amazon EBS User Guide).
    assert volume["Ebs"]["Iops"] >= 850 / 0.25


def test_the_security_group_lets_in_only_itself(launch, client):
    launch()

    (group_id,) = template_of(client)[1]["SecurityGroupIds"]
    (group,) = client.describe_security_groups(GroupIds=[group_id])["SecurityGroups"]

    (rule,) = group["IpPermissions"]
    assert rule["IpProtocol"] == "-1"
    assert [pair["GroupId"] for pair in rule["UserIdGroupPairs"]] == [group_id]
    assert (rule["IpRanges"], rule["Ipv6Ranges"], rule["PrefixListIds"]) == ([], [], [])


def test_lease_and_run_are_on_the_template_and_its_machines(launch, client):
    before = datetime.now(UTC)
    launch(lease_s=600.0)

    template, data = template_of(client)
    tags = {tag["Key"]: tag["Value"] for tag in template["Tags"]}
    on_disk = {spec["ResourceType"]: spec["Tags"] for spec in data["TagSpecifications"]}

    assert (tags["heterps:run-id"], tags["heterps:workspace"]) == ("r1", "default")
    assert set(on_disk) >= {"instance", "volume"}
    lease = {tag["Key"]: tag["Value"] for tag in on_disk["instance"]}["heterps:lease-until"]
    assert 590 < (datetime.fromisoformat(lease) - before).total_seconds() < 620


def test_image_and_subnet_are_those_that_were_given(server, launch, wire, client):
    subnet = client.describe_subnets()["Subnets"][0]["SubnetId"]
    image = client.describe_images()["Images"][0]["ImageId"]
    machines = MachineSettings(image_ids=(image,), subnet_ids=(subnet,))

    launch(provider=AwsEc2Provider(client, machines))

    _, data = template_of(client)
    assert data["ImageId"] == image
    assert "IamInstanceProfile" not in data  # a folder needs no role
    subnets = {
        value
        for request in wire.of("CreateFleet")
        for key, value in request.items()
        if key.endswith("SubnetId")
    }
    assert subnets == {subnet}


def test_user_data_is_the_bootstrap_script_without_a_node(launch, client):
    launch()
    script = script_of(client)

    assert script.startswith(
        "#!/usr/bin/env bash\nexport HETERPS_DRY_RUN=0\nexport HETERPS_LEASE_S=600\nexport HETERPS_LIFETIME_S=100\n"
    )
    assert "export HETERPS_RUN_ID=r1\n" in script
    assert "export HETERPS_NODE_ID" not in script
    assert "set -- -m heterps_core.training.node\n" in script
    assert len(script.encode()) < 16_384  # the limit of EC2
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_instance_sets_its_shutdown_clock_before_anything_else(launch, client, tmp_path):
    """The user data as it was sent, run with commands that write down how they were called."""
    launch()
    calls = tmp_path / "calls"
    for name in ("shutdown", "python"):
        tool = tmp_path / name
        tool.write_text(f'#!/bin/sh\necho "{name} $@" >> {calls}\n')
        tool.chmod(0o755)
    lines = [
        f"export HETERPS_PYTHON={tmp_path}/python" if line.startswith("export HETERPS_PYTHON=") else line
        for line in script_of(client).splitlines()
    ]

    subprocess.run(["bash", "-c", "\n".join(lines)], check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})

    called = calls.read_text().splitlines()
    assert called[0] == "shutdown -P +2"  # 100 s, rounded up to minutes
    assert called[-2:] == ["python -m heterps_core.training.node", "shutdown -P now"]


def test_template_goes_with_its_run_and_the_security_group_with_the_next_sweep(launch, provider, client):
    launch()
    provider.terminate("r1")
    assert client.describe_launch_templates()["LaunchTemplates"] == []
    groups = client.describe_security_groups()["SecurityGroups"]
    assert len(groups) == 2  # the network's own, and the run's

    now = datetime.now(UTC)
    assert provider.remove_leftovers(now=now) == ()  # it may be of a launch under way
    later = now.replace(year=now.year + 1)
    assert len(provider.remove_leftovers(now=later)) == 1
    assert provider.remove_leftovers(now=later) == ()


def test_what_a_living_run_needs_is_no_leftover(launch, provider, client):
    launch()
    now = datetime.now(UTC)

    assert provider.remove_leftovers(now=now.replace(year=now.year + 1)) == ()
    assert len(client.describe_launch_templates()["LaunchTemplates"]) == 1


@pytest.mark.parametrize("workspace", ["", "a b", "x" * 33, "-a"])
def test_refuses_a_workspace_that_cannot_be_part_of_a_name(workspace):
    with pytest.raises(ConfigurationError, match="1 to 32 letters"):
        MachineSettings(workspace=workspace)
