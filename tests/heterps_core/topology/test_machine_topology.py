import copy

import pytest

from heterps_core.errors import ConfigurationError, MalformedDocumentError
from heterps_core.topology.machine_topology import MachineTopology, load_topology
from tests.heterps_core.topology.builders import make_topology, save_topology

DOCUMENT = {
    "machines": [
        {
            "hostname": "a",
            "addr": "10.0.0.1",
            "port": 6170,
            "devices": [
                {
                    "global_id": 0,
                    "local_id": 0,
                    "type": "GPU",
                    "model": "A100-SXM4-40GB",
                    "sp_gflops": 19500,
                    "dp_gflops": 9700,
                    "memory": 40,
                },
                {"global_id": 1, "local_id": 0, "type": "NIC"},
            ],
            "links": [
                {
                    "source_global_id": 0,
                    "target_global_id": 1,
                    "type": "PHB",
                    "bandwidth": 12,
                    "latency": 0.0057,
                },
                {
                    "source_global_id": 1,
                    "target_global_id": 3,
                    "type": "NET",
                    "bandwidth": 1,
                    "latency": 0.028,
                },
            ],
        },
        {
            "hostname": "b",
            "addr": "10.0.0.2",
            "devices": [
                {"global_id": 2, "local_id": 0, "type": "CPU", "model": "x", "sp_gflops": 200, "memory": 4},
                {"global_id": 3, "local_id": 0, "type": "NIC"},
            ],
            "links": [],
        },
    ]
}


def test_units_of_the_file_become_those_of_the_core():
    topology = MachineTopology.from_json(DOCUMENT)

    card, nic = topology.machines[0].devices
    assert (card.type, card.model, card.computes, nic.computes) == ("GPU", "A100-SXM4-40GB", True, False)
    assert [link.bandwidth_bytes_per_s for link in topology.links()] == [12e9, 1e9]
    assert topology.machine_of() == {0: 0, 1: 0, 2: 1, 3: 1}


def test_comes_back_from_its_file(tmp_path):
    topology = make_topology(
        [["gpu-t4", "gpu-t4"], ["cpu-c5"]], inside_bytes_per_s=[12e9, 3e9], network_bytes_per_s=[1e9, 2e9]
    )
    save_topology(topology, tmp_path / "cluster.json")

    assert load_topology(tmp_path / "cluster.json") == topology


def with_value(path, value):
    """Return the document with one value changed, or removed where it is None."""
    document = copy.deepcopy(DOCUMENT)
    *parents, last = path
    place = document
    for key in parents:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return document


FIRST = ("machines", 0)
CARD = (*FIRST, "devices", 0)
BRIDGE = (*FIRST, "links", 0)


@pytest.mark.parametrize(
    ("path", "value", "field", "problem"),
    [
        (("machines",), None, "machines", "is missing"),
        (("machines",), [], "machines", "at least one machine"),
        (("machines",), {}, "machines", "must be a list"),
        (FIRST, 7, "machines[0]", "must be a JSON object"),
        ((*FIRST, "hostname"), "", "machines[0].hostname", "must be a text"),
        ((*FIRST, "hostname"), "b", "machines", "must differ in hostname, but b"),
        ((*FIRST, "hostname"), ["b"], "machines[0].hostname", "must be a text"),
        ((*FIRST, "devices"), [], "machines[0].devices", "at least one device"),
        ((*CARD, "global_id"), 3, "machines[1].devices[1].global_id", "unique over all machines"),
        ((*CARD, "global_id"), -1, "machines[0].devices[0].global_id", "whole number from 0"),
        ((*CARD, "global_id"), True, "machines[0].devices[0].global_id", "whole number from 0"),
        ((*CARD, "global_id"), [0], "machines[0].devices[0].global_id", "whole number from 0"),
        ((*CARD, "local_id"), 1.5, "machines[0].devices[0].local_id", "whole number from 0"),
        ((*CARD, "type"), "TPU", "machines[0].devices[0].type", "must be one of CPU, GPU"),
        ((*CARD, "type"), ["GPU"], "machines[0].devices[0].type", "must be one of CPU, GPU"),
        ((*CARD, "model"), None, "machines[0].devices[0].model", "is missing"),
        ((*FIRST, "links"), None, "machines[0].links", "is missing"),
        ((*BRIDGE, "source_global_id"), 2, "machines[0].links[0].source_global_id", "of another one"),
        ((*BRIDGE, "target_global_id"), 9, "machines[0].links[0].target_global_id", "id of a device, got 9"),
        ((*BRIDGE, "target_global_id"), 0, "machines[0].links[0].target_global_id", "another device"),
        ((*BRIDGE, "target_global_id"), {}, "machines[0].links[0].target_global_id", "whole number"),
        ((*BRIDGE, "bandwidth"), 0, "machines[0].links[0].bandwidth", "must be positive"),
        ((*BRIDGE, "bandwidth"), 10**400, "machines[0].links[0].bandwidth", "must be at most"),
    ],
)
def test_names_the_field_that_breaks_its_rule(path, value, field, problem):
    with pytest.raises(MalformedDocumentError, match=problem) as caught:
        MachineTopology.from_json(with_value(path, value))

    assert caught.value.field == field


def test_refuses_a_link_twice():
    document = copy.deepcopy(DOCUMENT)
    document["machines"][0]["links"].append(document["machines"][0]["links"][0])

    with pytest.raises(MalformedDocumentError, match="only link from 0 to 1"):
        MachineTopology.from_json(document)


def test_refuses_machines_that_compute_nothing():
    machine = {"hostname": "a", "addr": "a", "links": []}
    machine["devices"] = [{"global_id": 0, "local_id": 0, "type": "NIC"}]

    with pytest.raises(MalformedDocumentError, match="at least one device that computes"):
        MachineTopology.from_json({"machines": [machine]})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "must be UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"machines": ' + b"9" * 5_000 + b"}", "holds a number that cannot be read"),
        (b'{"machines": [], "machines": []}', "stands twice"),
        (b"[]", "must be a JSON object"),
    ],
)
def test_a_broken_file_is_no_traceback(tmp_path, content, problem):
    path = tmp_path / "cluster.json"
    path.write_bytes(content)

    with pytest.raises(MalformedDocumentError, match=problem):
        load_topology(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot read the cluster file"):
        load_topology(tmp_path / "none.json")
