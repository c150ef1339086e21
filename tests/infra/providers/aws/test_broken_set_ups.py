"""Set-ups in which no night can run, or one costs more than it must: the doctor names each with the way out."""

import re

import pytest

from infra.checks import CheckState
from tests.infra.providers.aws.set_up import ABORTED, main_table, set_up

MISSING, NOTE = CheckState.MISSING, CheckState.NOTE


@pytest.fixture
def account(server):
    with set_up(server) as account:
        yield account


DEFAULT_ROUTE = {"DestinationCidrBlock": "0.0.0.0/0"}


def setting(**settings):
    return lambda account: account.settings.update(settings)


def variable(value):
    return lambda account: account.shell.setenv("HETERPS_RUN_STORE", value)


def refusal(service, operation, code, message="as the test wants it"):
    return lambda account: account.refuse(service, operation, code, message)


def image(**facts):
    def change(parsed):
        for each in parsed["Images"]:
            each.update(facts)

    return lambda account: account.alter("DescribeImages", change)


def quota(code, vcpus):
    return lambda account: account.set_quota(code, vcpus)


def subnets_of_two_networks(account):
    ec2 = account.server.own_client
    network = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    other = ec2.create_subnet(VpcId=network, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
    account.settings["subnet_ids"] = (ec2.describe_subnets()["Subnets"][0]["SubnetId"], other)


def no_default_network(account):
    account.alter("DescribeSubnets", lambda parsed: parsed.update(Subnets=[]))


def no_way_out(account):
    ec2 = account.server.own_client
    ec2.delete_route(RouteTableId=main_table(ec2), **DEFAULT_ROUTE)


def private_addresses(account):
    def change(parsed):
        for subnet in parsed["Subnets"]:
            subnet["MapPublicIpOnLaunch"] = False

    account.alter("DescribeSubnets", change)


def nat(account):
    def change(parsed):
        for table in parsed["RouteTables"]:
            table["Routes"] = [{**DEFAULT_ROUTE, "NatGatewayId": "nat-1"}]

    account.alter("DescribeRouteTables", change)


def disabled_key(account):
    account.answer("ec2", "GetEbsDefaultKmsKeyId", lambda body: {"KmsKeyId": "own"})
    account.answer("kms", "DescribeKey", lambda body: {"KeyMetadata": {"KeyState": "Disabled"}})


def profile_without_role(account):
    account.server.own_iam.create_instance_profile(InstanceProfileName="ready")
    account.settings["instance_profile"] = "ready"


def machines_of_another(account):
    tags = [{"Key": key, "Value": "theirs"} for key in ("heterps:run-id", "heterps:workspace")]
    account.server.own_client.run_instances(
        MinCount=1, MaxCount=1, TagSpecifications=[{"ResourceType": "instance", "Tags": tags}]
    )


def bucket_elsewhere(account):
    s3 = account.server.client("s3", region="eu-west-1")
    s3.create_bucket(Bucket="far", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    account.shell.setenv("HETERPS_RUN_STORE", "s3://far/heterps")


def own_key_of_bucket(account):
    rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": "own"}}
    account.client_of("s3").put_bucket_encryption(
        Bucket="runs", ServerSideEncryptionConfiguration={"Rules": [rule]}
    )


def versions(account):
    account.client_of("s3").put_bucket_versioning(
        Bucket="runs", VersioningConfiguration={"Status": "Enabled"}
    )


def lifecycle(*rules):
    return lambda account: account.set_lifecycle(*rules)


ORGANISATION = "with an explicit deny in a service control policy"

BROKEN = {
    "credentials that expired": (
        refusal("ec2", "DescribeInstances", "ExpiredToken"),
        ("AWS credentials", MISSING, "aws sso login"),
    ),
    "a clock that is wrong": (
        refusal("ec2", "DescribeInstances", "RequestExpired"),
        ("AWS credentials", MISSING, "timedatectl"),
    ),
    "an image that does not exist": (
        setting(image_ids=("ami-00000000000000000",)),
        ("AWS image of x86_64", MISSING, "HETERPS_AWS_IMAGE names .*; add the id|add the id"),
    ),
    "an image of Arm alone, and no plan for x86": (
        image(Architecture="arm64"),
        ("AWS image of x86_64", NOTE, "an x86_64 machine image|x86_64 nodes need"),
    ),
    "a snapshot larger than the disk": (
        image(BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 60}}]),
        ("AWS image of x86_64", MISSING, "fit the disk of 40 GB.*has 60 GB.*root volume is smaller"),
    ),
    "a subnet that does not exist": (
        setting(subnet_ids=("subnet-0123",)),
        ("AWS network", MISSING, "InvalidSubnetID.NotFound.*id of a subnet"),
    ),
    "subnets of two networks": (
        subnets_of_two_networks,
        ("AWS network", MISSING, "must be of one network.*name those of one"),
    ),
    "no default network": (no_default_network, ("AWS network", MISSING, "aws ec2 create-default-vpc")),
    "a network without a way to S3": (
        no_way_out,
        ("way to S3", MISSING, "us-east-1a.*has no endpoint.*create-vpc-endpoint"),
    ),
    "an internet gateway, and no public addresses": (
        private_addresses,
        ("way to S3", MISSING, "public address.*create-vpc-endpoint"),
    ),
    "traffic to S3 through NAT": (nat, ("way to S3", CheckState.OK, "0.045 USD a GB.*create-vpc-endpoint")),
    "no quota of machines": (
        quota("L-1216C47A", 1.0),
        (
            "quota of on-demand",
            MISSING,
            "must be 2 vCPUs.* is 1; .*request-service-quota-increase.*L-1216C47A",
        ),
    ),
    "no quota of spot machines": (
        quota("L-34B43A08", 0.0),
        ("quota of spot", NOTE, "All Standard .*Spot.* must be 2 .* is 0; .*L-34B43A08"),
    ),
    "no quota of cards": (
        quota("L-DB2E81BA", 0.0),
        ("quota of on-demand G and VT", NOTE, "must be 4 .*L-DB2E81BA"),
    ),
    "no quota of cards on spot": (
        quota("L-3819A6DF", 0.0),
        ("quota of spot G and VT", NOTE, "All G and VT Spot.* must be 4 .*L-3819A6DF"),
    ),
    "a quota of large cards on spot below their smallest machine": (
        quota("L-7212CCBC", 64.0),
        ("quota of spot P", NOTE, "must be 96 .* is 64; .*L-7212CCBC"),
    ),
    "no quota of large cards": (
        quota("L-417A185B", 8.0),
        ("quota of on-demand P", NOTE, "must be 16 .* is 8; .*L-417A185B.* 192"),
    ),
    "a key of volumes that is disabled": (
        disabled_key,
        ("key of volumes", MISSING, "is Disabled.*aws kms enable-key"),
    ),
    "machines that the organisation refuses": (
        refusal("ec2", "RunInstances", "UnauthorizedOperation", ORGANISATION),
        ("AWS may launch", MISSING, "service control policy.*ask its administrator"),
    ),
    "a fleet that the policy refuses": (
        refusal("ec2", "CreateFleet", "UnauthorizedOperation"),
        ("AWS may launch", MISSING, "UnauthorizedOperation.*infra/iam"),
    ),
    "a group that the policy refuses": (
        refusal("ec2", "CreateSecurityGroup", "UnauthorizedOperation"),
        ("AWS may launch", MISSING, "UnauthorizedOperation.*infra/iam"),
    ),
    "roles that cannot be seen": (
        refusal("iam", "ListRoles", "AccessDenied"),
        ("AWS may see node roles", MISSING, "AccessDenied.*infra/iam"),
    ),
    "no boundary": (
        setting(node_boundary=None),
        ("rights of nodes", MISSING, "export HETERPS_AWS_NODE_BOUNDARY=arn:aws:iam::"),
    ),
    "a boundary that does not exist": (
        setting(node_boundary="arn:aws:iam::123456789012:policy/none"),
        ("rights of nodes", MISSING, "NoSuchEntity.*aws iam get-policy"),
    ),
    "a profile that does not exist": (
        setting(instance_profile="none"),
        ("rights of nodes", MISSING, "NoSuchEntity.*HETERPS_AWS_INSTANCE_PROFILE"),
    ),
    "a profile without a role": (
        profile_without_role,
        ("rights of nodes", MISSING, "ready has none.*add-role-to-instance-profile"),
    ),
    "machines of another workspace": (
        machines_of_another,
        ("machines there", NOTE, "1 of workspace theirs.*HETERPS_AWS_WORKSPACE=theirs heterps sweep"),
    ),
    "a bucket that does not exist": (
        variable("s3://none/heterps"),
        ("bucket", MISSING, "there is no none.*aws s3 mb s3://none"),
    ),
    "a bucket of another region": (
        bucket_elsewhere,
        ("bucket", MISSING, r"far is in eu-west-1.*\?region=eu-west-1"),
    ),
    "a bucket with a key of one's own": (
        own_key_of_bucket,
        ("bucket's encryption", MISSING, "encrypts with own,.*put-bucket-encryption"),
    ),
    "a lifecycle rule that deletes runs": (
        lifecycle(ABORTED, {"ID": "old", "Expiration": {"Days": 3}}),
        ("bucket's rules", NOTE, "3 days old.*off the prefix"),
    ),
    "a rule of two conditions that deletes runs": (
        lifecycle(
            ABORTED, {"Filter": {"And": {"Prefix": "heterps/", "Tags": []}}, "Expiration": {"Days": 3}}
        ),
        ("bucket's rules", NOTE, "3 days old.*off the prefix"),
    ),
    "old versions that are kept": (
        versions,
        ("bucket's rules", NOTE, "old versions.*NoncurrentVersionExpiration"),
    ),
    "no run store": (variable(""), ("run store", MISSING, "export HETERPS_RUN_STORE=s3://")),
    "a run store with credentials": (
        variable("s3://AKIA:hush@runs/heterps"),
        ("run store", MISSING, "must hold no credentials"),
    ),
}


@pytest.mark.parametrize(("broken", "expected"), BROKEN.values(), ids=BROKEN)
def test_a_broken_set_up_is_named_with_the_way_out_and_nothing_is_made(account, broken, expected):
    broken(account)
    before = account.made()
    what, state, words = expected

    found = account.check(what)

    assert found.state is state, found
    assert re.search(words, f"{found.found}; {found.fix}"), found
    assert account.made() == before
    assert "hush" not in str(found)


def test_credentials_that_are_refused_end_the_questions_to_aws(account):
    account.refuse("ec2", "DescribeInstances", "ExpiredToken")

    assert [check.what for check in account.checks()] == ["AWS credentials", "run store"]


def test_an_account_that_is_set_up_is_well_and_nothing_is_left(account, server):
    account.settings["image_ids"] = (
        account.client_of("ec2").describe_images(Owners=["self"])["Images"][0]["ImageId"],
        server.add_arm_image(),
    )
    before = account.made()

    found = {check.what: check for check in account.checks()}

    assert {check.state for check in found.values()} == {CheckState.OK}, found
    assert account.made() == before
    assert found["AWS may see node roles"].found == "allowed, /heterps/default/us-east-1/"
    assert "us-east-1a by internet" in found["way to S3"].found
    left = account.client_of("s3").list_objects_v2(Bucket="runs").get("Contents", [])
    assert {each["Key"] for each in left} <= {"heterps/"}  # a folder, which Arrow keeps


def test_what_only_the_doctor_asks_may_be_denied(account):
    account.refuse("service-quotas", "GetServiceQuota", "AccessDeniedException")
    account.refuse("ec2", "DescribeRouteTables", "UnauthorizedOperation")

    states = {check.what: check.state for check in account.checks()}

    assert states["quota of on-demand"] is states["way to S3"] is NOTE
    assert MISSING not in states.values()


def test_an_endpoint_of_s3_is_a_free_way_for_addresses_that_are_private(account, server):
    private_addresses(account)
    ec2 = server.own_client
    (network,) = ec2.describe_vpcs()["Vpcs"]
    ec2.create_vpc_endpoint(
        VpcId=network["VpcId"],
        ServiceName="com.amazonaws.us-east-1.s3",
        RouteTableIds=[main_table(ec2)],
        VpcEndpointType="Gateway",
    )

    found = {check.what: check for check in account.checks()}

    assert "us-east-1a by endpoint" in found["way to S3"].found
    assert "USD" not in found["way to S3"].found
