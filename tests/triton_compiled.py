"""What test_triton.py runs in a process of its own, where Triton compiles its kernels for cards that are not here.

python tests/triton_compiled.py 8.0 9.0     write the instructions of every kernel for these cards to the record
"""

import json
import os
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton_targets import KINDS, Needs, call_of, compiled, launches_of, needs, needs_of

from lengthwise.attention.triton.self_test import triton_version

STACK = 64
"""Bytes that may spill."""
SPILLS = {("profile of keys", 128, torch.float32): 256}
"""And in these kinds, of which no tile has less."""
SHARED = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
"""What a block may have of shared memory, in KB, by capability."""

Case = tuple[str, tuple[int, int], int, torch.dtype]
FEW: list[Case] = [
    *((kind, (8, 0), 64, torch.bfloat16) for kind in ("table", "level")),
    ("table and level", (9, 0), 64, torch.bfloat16),
    ("none", (8, 6), 128, torch.float32),
    ("line", (8, 9), 64, torch.bfloat16),
    ("masked", (12, 0), 64, torch.bfloat16),
]
RECORD = Path(__file__).parent / "triton_record.json"
"""Instructions of a far tile, by card, kind, width, precision and kernel; under "triton" the version they are of."""
MORE = 1.05

FAR_TILE, FAR_MEMORY = 900, 48 * 1024
"""A table forward, 64 wide, on capability 8.0: FlexAttention of torch 2.13 has 1,216 instructions and 112 KB."""


def table_of(capability: str) -> list[Case]:
    """The whole table of tiles for a card."""
    major, minor = map(int, capability.split("."))
    every = [*product(KINDS, (64, 128), (torch.bfloat16, torch.float32)), ("extras", 64, torch.float16)]
    return [(kind, (major, minor), dim, dtype) for kind, dim, dtype in every]


CASES = table_of(number) if (number := os.environ.get("LENGTHWISE_TRITON_CAPABILITY")) else FEW


def name_of(case: Case, own: Needs) -> str:
    kind, (major, minor), dim, dtype = case
    return f"{major}.{minor} {kind} {dim} {str(dtype).removeprefix('torch.')} {own.kernel}"


def assert_fits(case: Case, own: Needs) -> None:
    kind, capability, dim, dtype = case
    assert own.stack <= SPILLS.get((kind, dim, dtype), STACK), own
    assert own.shared <= 1024 * SHARED[capability], own
    assert not own.has_atomic, own
    assert not own.has_tf32, own
    if (kind, capability, own.kernel, dim, dtype) == ("table", (8, 0), "forward_kernel", 64, torch.bfloat16):
        assert own.loop <= FAR_TILE, own
        assert own.shared <= FAR_MEMORY, own


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1][0]}{case[1][1]}-{case[2]}-{case[3]}")
def test_the_machine_code_fits_the_card_and_its_record(case):
    record = json.loads(RECORD.read_text())
    for own in needs(case[0], case[1], dim=case[2], dtype=case[3]):
        assert_fits(case, own)
        name = name_of(case, own)
        assert name in record, name
        # Another Triton counts otherwise.
        if triton_version() == record["triton"]:
            assert own.loop <= MORE * record[name], f"{name}: {record[name]} instructions are on record, got {own.loop}"


@pytest.mark.parametrize("kind", ["gathered", "line", "profile"])
@pytest.mark.parametrize("target", [80, 86])
def test_sums_by_entry_fit_and_are_read_again_behind_a_barrier(kind, target):
    launches = launches_of(call_of(kind), divmod(target, 10))
    (launch,) = (own for own in launches if own[0].__name__ == "entries_kernel")
    code = compiled(*launch, GPUTarget("cuda", target, 32))
    own = needs_of(code, "entries_kernel")
    assert_fits((kind, divmod(target, 10), 64, torch.bfloat16), own)
    assert "barrier" in code.asm["ttgir"].rpartition("tt.store")[2]


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"
    entries = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    entries["triton"] = triton_version()
    for case in FEW + [case for capability in sys.argv[1:] for case in table_of(capability)]:
        entries |= {name_of(case, own): own.loop for own in needs(case[0], case[1], dim=case[2], dtype=case[3])}
    RECORD.write_text(json.dumps(dict(sorted(entries.items())), indent=0) + "\n")
