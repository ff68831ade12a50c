"""How many bytes L2 fetches at a time for the rows that TMA reads."""

from __future__ import annotations

import pytest

from cuflash.cuda.driver import L2_128B, L2_256B, l2_promotion


@pytest.mark.parametrize(
    ("address", "head_dim", "once", "expected"),
    [
        (0, 64, False, L2_256B),
        (0, 80, False, L2_256B),
        (0, 72, False, L2_128B),  # rows of 144 bytes begin within sectors
        (16, 64, False, L2_128B),
        (0, 64, True, L2_128B),
    ],
)
def test_bytes_that_l2_fetches(address: int, head_dim: int, once: bool, expected: int) -> None:
    row_bytes = 2 * head_dim
    assert l2_promotion(address, (row_bytes, 100 * row_bytes, 400 * row_bytes), once) == expected
