"""What test_triton.py runs in a process of its own, where Triton compiles its kernels for cards that are not here."""

import pytest
from triton_targets import needs

STACK = 64
SHARED = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""What a block may have of shared memory, in KB, by capability."""


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("kind", ["none", "table", "level"])
def test_the_machine_code_fits_the_card(kind, capability):
    for own in needs(kind, capability):
        assert own.stack <= STACK, own
        assert own.shared <= 1024 * SHARED[capability], own
        assert not own.has_atomic, own
        assert not own.has_tf32, own
