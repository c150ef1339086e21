"""Chains against an enumeration of all cuts of small random graphs, and shapes that real models have."""

from itertools import combinations

import numpy as np
import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.profiling.imported.chain_cuts import cut_into_blocks


def cut(edges):
    nodes = sorted({node for edge in edges for node in edge})
    return [("".join(sorted(block.nodes)), block.leaving) for block in cut_into_blocks(nodes, edges)]


def pairs(text):
    return [tuple(edge) for edge in text.split()]


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        pytest.param("ab bc", [("a", "a"), ("b", "b"), ("c", "c")], id="a chain"),
        pytest.param("ab bc ac cd", [("a", "a"), ("bc", "c"), ("d", "d")], id="a residual"),
        pytest.param("ab ac bd cd de", [("a", "a"), ("bcd", "d"), ("e", "e")], id="branches"),
        # b, c read two inputs; the longer tower is cut, the other one waits for the join.
        pytest.param("ab bc cx yx", [("a", "a"), ("b", "b"), ("c", "c"), ("xy", "x")], id="two towers"),
        # An auxiliary output belongs to where it starts.
        pytest.param("ab bc bz cd", [("a", "a"), ("bz", "b"), ("c", "c"), ("d", "d")], id="a side output"),
        # Each cell reads the two before it.
        pytest.param("ab ac bc bd cd ce de", [("a", "a"), ("bcde", "e")], id="two cells back"),
    ],
)
def test_known_shapes_are_cut_where_one_tensor_crosses(edges, expected):
    assert cut(pairs(edges)) == expected


def random_graph(seed):
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 8))
    names = [f"n{index}" for index in random.permutation(size)]
    share = random.uniform(0.2, 0.7)
    edges = [pair for pair in combinations(names, 2) if random.random() < share]
    return names, edges


def reach(start, edges):
    reached = {start}
    while more := {after for before, after in edges if before in reached} - reached:
        reached |= more
    return reached


def most_layers(names, edges):
    """Try all sets of nodes that hold their predecessors."""
    backwards = [(after, before) for before, after in edges]
    sinks = [name for name in names if not any(before == name for before, _ in edges)]
    counts = [len(reach(sink, backwards)) for sink in sinks]
    if counts.count(max(counts)) > 1:
        return None
    leads_to_output = reach(sinks[counts.index(max(counts))], backwards)
    cuts = []
    for size in range(1, len(names)):
        for chosen in combinations(names, size):
            inside = set(chosen)
            if any(after in inside and before not in inside for before, after in edges):
                continue
            sources = {
                before for before, after in edges if before in inside and after in leads_to_output - inside
            }
            if len(sources) == 1:
                cuts.append((inside, sources.pop()))
    longest = {}
    for index, (inside, source) in enumerate(cuts):
        before = [longest[i] for i in range(index) if cuts[i][0] < inside and cuts[i][1] != source]
        longest[index] = 1 + max(before, default=0)
    return 1 + max(longest.values(), default=0)


def test_no_chain_has_more_layers_and_every_cut_has_one_tensor():
    num_checked = 0
    for seed in range(600):
        names, edges = random_graph(seed)
        both_ways = edges + [(after, before) for before, after in edges]
        if len(reach(names[0], both_ways)) < len(names) or (expected := most_layers(names, edges)) is None:
            continue
        blocks = cut_into_blocks(names, edges)
        num_checked += 1

        assert len(blocks) == expected
        assert sorted(node for block in blocks for node in block.nodes) == sorted(names)
        position = {node: index for index, block in enumerate(blocks) for node in block.nodes}
        for before, after in edges:
            assert position[before] <= position[after]
        backwards = [(after, before) for before, after in edges]
        leads_to_output = reach(blocks[-1].leaving, backwards)
        for index, block in enumerate(blocks[:-1]):
            crossing = {
                before
                for before, after in edges
                if position[before] <= index < position[after] and after in leads_to_output
            }
            assert crossing == {block.leaving}
    assert num_checked > 200


def test_a_cycle_is_named():
    with pytest.raises(ConfigurationError, match=r"no cycle, but has: [bcd] -> [bcd] -> [bcd] -> [bcd]"):
        cut(pairs("ab bc cd db de"))


def test_parts_that_no_edge_joins_are_named():
    with pytest.raises(ConfigurationError, match="no edge joins c and 1 others to a; is the graph cut off"):
        cut(pairs("ab cd"))
