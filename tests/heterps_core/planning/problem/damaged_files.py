"""Problem files as they arrive by accident: valid ones at the edges of what is allowed, and damaged ones.

A file is drawn as a valid document, which is then damaged in its numbers and its structure, written, and damaged once
more as text. Every part is a hypothesis strategy, so that a file that does harm is shrunk to its cause.
"""

import copy
import json

from hypothesis import strategies as st

from tests.builders import make_problem

ODD_NUMBERS = [
    *(-1, -1e-30, -0.0, 0, 0.5, 1, 1.5, 3),
    *(5e-324, 1e-300, 1e-18, 1e18, 1.0000001e18, 1e300, -1e300, 10**400, -(10**400), 2**63, 10**18),
    *(float("nan"), float("inf"), float("-inf"), True, False),
]
ODD_VALUES = [None, "", "x", "12", "NaN", "١٢", "1" * 400, [], {}, [[[]]], [1], {"x": 1}, {"cpu": 1}]
ODD_NAMES = ["", "x", "cpu", "gpu_a", "Cpu ", "layers", "\x00", "\ud800", "🙂" * 30]
EXTREMES = [1e-18, 1e-9, 1e-3, 1, 1e3, 1e9, 1e18]
"""What a positive number may be; the cost of the contract holds products of five of them."""

OUTER_FIELDS = ["num_samples", "num_epochs", "throughput_floor_samples_per_s"]
LAYER_BYTES = ["state_bytes", "output_bytes_per_sample"]
UNIT_NUMBERS = ["price_usd_per_hour", "memory_bytes", "bandwidth_bytes_per_s"]
FRACTIONS = ["compute_parallel_fraction", "communication_parallel_fraction"]
TERMS = {
    "startup_seconds": 120.0,
    "teardown_seconds": 60.0,
    "search_and_profiling_usd": 0.5,
    "storage_usd_per_hour": 0.1,
    "crossing_usd": 0.02,
    "checkpoint_seconds": 2.0,
    "restart_seconds": 300.0,
}


def with_optional_fields(*, num_layers, num_types):
    """Return a valid problem that has every optional field, as a JSON document."""
    document = make_problem(0, num_layers=num_layers, num_types=num_types).to_json()
    for unit in document["device_types"].values():
        unit.update(
            interruptions_per_hour=0.05,
            instances=_instances(unit),
            communication_relative_spread=0.5,
        )
    for layer in document["layers"]:
        layer["compute_relative_spread"] = {"cpu": 0.1}
    return {**document, "extra_costs": dict(TERMS)}


@st.composite
def documents(draw):
    """Return a valid problem, with any of the optional fields, as a JSON document."""
    problem = make_problem(
        draw(st.integers(0, 20)),
        num_layers=draw(st.integers(1, 6)),
        num_types=draw(st.integers(1, 4)),
        scarce=draw(st.booleans()),
        floor_samples_per_s=draw(st.sampled_from([0.0, 100.0, 20_000.0, 1e7])),
    )
    document = problem.to_json()
    for unit in document["device_types"].values():
        if draw(st.booleans()):
            unit["interruptions_per_hour"] = 0.05
        if draw(st.booleans()):
            unit["instances"] = _instances(unit)
    if draw(st.booleans()):
        terms = draw(st.lists(st.sampled_from(sorted(TERMS)), unique=True))
        document["extra_costs"] = {name: TERMS[name] for name in terms}
    for layer in document["layers"]:
        if draw(st.booleans()):
            layer["compute_relative_spread"] = {"cpu": 0.1}
    return document


@st.composite
def extreme_documents(draw):
    """Return a problem whose values keep their rules and nothing else: 1e-18, 1e18, caps of 1, no parallel part."""
    document = draw(documents())
    positive = st.sampled_from(EXTREMES)
    not_negative = st.sampled_from([0, *EXTREMES])
    count = st.sampled_from([1, 2, 1_000_000])
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(
            st.sampled_from(["outer", "batch", "bytes", "seconds", "unit", "cap", "fraction", "term"])
        )
        layer = draw(st.sampled_from(document["layers"]))
        unit = draw(st.sampled_from(list(document["device_types"].values())))
        if kind == "outer":
            document[draw(st.sampled_from(OUTER_FIELDS))] = draw(positive)
        elif kind == "batch":
            name = draw(st.sampled_from(["batch_size", "profile_batch_size"]))
            document[name] = draw(st.sampled_from([1, 7, 10**9, 10**18]))
        elif kind == "bytes":
            layer[draw(st.sampled_from(LAYER_BYTES))] = draw(not_negative)
        elif kind == "seconds":
            seconds = layer[draw(st.sampled_from(["compute_seconds", "communication_seconds"]))]
            seconds.update(dict.fromkeys(seconds, draw(not_negative)))
        elif kind == "unit":
            unit.pop("instances", None)
            unit[draw(st.sampled_from(UNIT_NUMBERS))] = draw(positive)
        elif kind == "cap":
            unit["max_units"] = draw(count)
        elif kind == "fraction":
            unit[draw(st.sampled_from(FRACTIONS))] = draw(st.sampled_from([0, 1e-18, 0.5, 1 - 1e-16, 1]))
        else:
            terms = document.setdefault("extra_costs", {})
            terms[draw(st.sampled_from(sorted(TERMS)))] = draw(not_negative)
            unit["interruptions_per_hour"] = draw(not_negative)
    return document


@st.composite
def damaged_documents(draw):
    """Return a document with one to three of its nodes changed, removed, renamed, doubled or moved."""
    document = draw(st.one_of(documents(), extreme_documents()))
    for _ in range(draw(st.integers(1, 3))):
        places = list(places_in(document))
        if not places:
            break
        node, key = draw(st.sampled_from(places))
        action = draw(st.sampled_from(["number", "number", "value", "remove", "rename", "double", "move"]))
        if action == "remove":
            del node[key]
        elif action == "rename" and isinstance(node, dict):
            node[draw(st.sampled_from(ODD_NAMES))] = node.pop(key)
        elif action == "double":
            if isinstance(node, list):
                node.append(copy.deepcopy(node[key]))
            else:
                node[draw(st.sampled_from(ODD_NAMES))] = copy.deepcopy(node[key])
        elif action == "move":
            other, other_key = draw(st.sampled_from(places))
            node[key] = copy.deepcopy(other[other_key])
        else:
            node[key] = copy.deepcopy(
                draw(st.sampled_from(ODD_NUMBERS if action == "number" else ODD_VALUES))
            )
    return document


@st.composite
def problem_files(draw):
    """Return the bytes of a problem file that may be damaged in any way."""
    document = draw(st.one_of(extreme_documents(), damaged_documents(), damaged_documents()))
    text = json.dumps(document, ensure_ascii=draw(st.booleans()))
    action = draw(
        st.sampled_from(["none", "none", "none", "cut", "flip", "encode", "nest", "double key", "replace"])
    )
    if action == "nest":
        depth = draw(st.sampled_from([1, 50, 2_000, 200_000]))
        text = "[" * depth + text + "]" * depth
    elif action == "double key":
        text = '{"num_epochs": 1, ' + text[1:]
    elif action == "replace":
        text = draw(
            st.sampled_from(["", " ", "{}", "[]", "null", "0", '"x"', "nan", "{" * 100_000, text + text])
        )
    elif action == "encode":
        encoding = draw(st.sampled_from(["utf-8-sig", "utf-16", "utf-32", "latin-1", "cp037"]))
        return text.encode(encoding, errors="replace")
    content = text.encode("utf-8", errors="surrogatepass")
    if action == "cut":
        return content[: draw(st.integers(0, len(content)))]
    if action == "flip":
        flipped = bytearray(content)
        for _ in range(draw(st.integers(1, 4))):
            flipped[draw(st.integers(0, len(flipped) - 1))] ^= draw(st.integers(1, 255))
        return bytes(flipped)
    return content


def _instances(unit):
    price = unit["price_usd_per_hour"]
    return [
        {"name": "small", "units": 1, "price_usd_per_hour": price},
        {"name": "large", "units": 4, "price_usd_per_hour": 4.5 * price},
    ]


def places_in(node):
    """Yield each node of a document as the container that holds it and its key there."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from places_in(node[key])
