"""What test_triton.py runs in a process of its own, where Triton compiles its kernels for cards that are not here."""

import os
from itertools import product

import pytest
import torch
from triton_targets import KINDS, needs

STACK = 64
SHARED = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""What a block may have of shared memory, in KB, by capability."""

FEW = [(kind, capability, 64, torch.bfloat16) for kind in ("none", "table", "level") for capability in ((8, 0), (9, 0))]
CASES = FEW
if number := os.environ.get("LENGTHWISE_TRITON_CAPABILITY"):
    own = tuple(map(int, number.split(".")))
    CASES = [(kind, own, dim, dtype) for kind, dim, dtype in product(KINDS, (64, 128), (torch.bfloat16, torch.float32))]

FAR_TILE = 1040
"""Instructions a warp, table, 128 x 64, 64 wide, on capability 8.0; FlexAttention of torch 2.13 has 1,216."""


@pytest.mark.parametrize(("kind", "capability", "dim", "dtype"), CASES)
def test_the_machine_code_fits_the_card(kind, capability, dim, dtype):
    for found in needs(kind, capability, dim=dim, dtype=dtype):
        assert found.stack <= STACK, found
        assert found.shared <= 1024 * SHARED[capability], found
        assert not found.has_atomic, found
        assert not found.has_tf32, found
        if (kind, capability, found.kernel, dim) == ("table", (8, 0), "forward_kernel", 64) and dtype == torch.bfloat16:
            assert found.loop <= 1.05 * FAR_TILE, found
            assert found.shared <= 48 * 1024, found
