"""transformers' own common model tests pass over our model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "prove_transformers.py"


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["causal", "encoder"])
@pytest.mark.parametrize("encoding", ["cable", "rope", "kerple", "learned", "dapev2", "fire"])
def test_the_common_tests_of_the_installed_transformers_pass(encoding, kind, subtests):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(FILE), encoding, kind], capture_output=True, text=True, env=environment)
    if "NoSourceError" in done.stderr:
        pytest.skip(f"transformers' own tests are not at hand: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["test_'))
    assert len(outcomes) > 100
    for name, outcome in outcomes.items():
        with subtests.test(name):
            assert not outcome.startswith("failed"), outcome
            if outcome.startswith("skipped"):
                pytest.skip(outcome)
