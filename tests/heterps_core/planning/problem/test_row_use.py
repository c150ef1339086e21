"""How many look-ups miss the most used rows, against sums over all rows."""

import numpy as np
import pytest

from heterps_core.models.model_graph import Layer, LayerKind
from heterps_core.planning.problem.row_use import ZIPF_EXPONENT, _cold_share, cold_bytes_per_sample


@pytest.mark.parametrize(
    ("num_rows", "hot_rows"), [(2, 1), (10, 0), (10, 7), (1_000, 2), (1_000, 1_000), (1_000_000, 500)]
)
def test_the_cold_share_is_that_of_the_sum_over_the_rows_that_are_not_hot(num_rows, hot_rows):
    uses = np.arange(1, num_rows + 1) ** -ZIPF_EXPONENT

    expected = uses[hot_rows:].sum() / uses.sum()

    assert _cold_share(num_rows, hot_rows / num_rows) == pytest.approx(expected, abs=3e-3)


def test_cold_bytes_hold_the_optimizer_state_of_all_columns():
    # 26 columns of 1,000 rows, 16 numbers and an accumulator each.
    layer = Layer(
        name="embedding",
        kind=LayerKind.EMBEDDING,
        is_sharded=True,
        parameter_bytes=26_000 * 64,
        optimizer_state_bytes=26_000 * 4,
        input_bytes_per_sample=0,
        output_bytes_per_sample=26 * 64,
        forward_flops_per_sample=0.0,
        looked_up_bytes_per_sample=26 * 64,
    )

    assert cold_bytes_per_sample(layer, 0.0) == pytest.approx(26 * 68)
    assert cold_bytes_per_sample(layer, 0.1) == pytest.approx(26 * 68 * _cold_share(1_000, 0.1))
    assert cold_bytes_per_sample(layer, 1.0) == 0
