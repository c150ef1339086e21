import gzip
import itertools
import json
from dataclasses import replace

import pytest

from heterps_core.hardware import DeviceKind, Market
from infra.prices.spot_charges import COUNTED, with_interruptions
from tests.infra.builders import offer
from tests.paths import PROJECT

PREEMPTIONS = PROJECT.parent / "shared" / "data" / "spot_traces" / "skypilot" / "preemption"


def test_an_offer_on_spot_without_a_rate_gets_an_assumed_one_that_says_so():
    on_demand, on_spot = with_interruptions([offer(), offer(market=Market.SPOT)])

    assert (on_demand.interruptions_per_hour, on_demand.interruptions_source) == (0.0, "")
    assert on_spot.interruptions_per_hour == pytest.approx(221 / 369.3)
    assert on_spot.interruptions_source.startswith("assumed")


def test_a_rate_that_is_known_is_kept():
    known = replace(offer(market=Market.SPOT), interruptions_per_hour=0.001, interruptions_source="own count")

    assert with_interruptions([known]) == [known]


def test_what_no_trace_is_like_is_taken_from_all_of_them():
    [assumed] = with_interruptions([replace(offer(market=Market.SPOT), cloud="azure")])

    assert assumed.interruptions_per_hour == pytest.approx((221 + 415 + 3) / (369.3 + 1_971.3 + 180.4))
    assert "none is of this kind" in assumed.interruptions_source


@pytest.mark.skipif(not PREEMPTIONS.exists(), reason="the recorded traces are not on this machine")
@pytest.mark.parametrize(
    ("pool", "folders"),
    [
        (("aws", DeviceKind.CPU), ["1-node/aws-04-19-2023"]),
        (("aws", DeviceKind.GPU), ["1-node/aws-04-22-2023", "4-node/aws-08-03-2023"]),
        (("gcp", DeviceKind.CPU), ["1-node/gcp-04-30-2023"]),
    ],
)
def test_the_assumed_rates_are_those_of_the_traces(pool, folders):
    falls, instance_hours = 0, 0.0
    for folder in folders:
        for path in sorted((PREEMPTIONS / folder).glob("*.json.gz")):
            document = json.loads(gzip.decompress(path.read_bytes()))
            counts = document["data"]
            falls += sum(max(0, before - after) for before, after in itertools.pairwise(counts))
            instance_hours += sum(counts[:-1]) * document["metadata"]["gap_seconds"] / 3_600

    assert (falls, pytest.approx(instance_hours, abs=0.1)) == COUNTED[pool]
