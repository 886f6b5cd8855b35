"""The Triton kernels without a GPU: interpreted against the float64 definition, and compiled for cards.

Both happen in processes of their own, since Triton decides once whether it interprets or compiles.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lengthwise as lw

TESTS = Path(__file__).parent
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
CHUNKED = "right_or_refuse or every_pair_of_circumstances or prove_themselves"
"""The tests of triton_interpreted.py that have other cases in every chunk."""


def run_pytest(file: str, *options: str, first: str = "", **environment: str) -> None:
    paths = [*filter(None, [first]), str(TESTS), *sys.path]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(TESTS / file)]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@needs_triton
def test_the_interpreted_kernels_agree_with_the_definition():
    run_pytest("triton_interpreted.py", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.prove
@pytest.mark.parametrize("chunk", range(20))
def test_the_interpreted_kernels_agree_in_a_thousand_random_calls_and_in_the_whole_product(chunk):
    more = {
        "LENGTHWISE_TRITON_SEEDS": f"{14 + 50 * chunk} {64 + 50 * chunk}",
        "LENGTHWISE_TRITON_PRODUCT": f"{chunk} 20",
    }
    options = ("-k", CHUNKED) if chunk else ()
    run_pytest("triton_interpreted.py", *options, TRITON_INTERPRET="1", **more)


@needs_triton
def test_the_kernels_compile_for_cards_that_are_not_here():
    run_pytest("triton_compiled.py", TRITON_INTERPRET="0")


@needs_triton
@pytest.mark.prove
@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"])
def test_the_whole_table_of_tiles_compiles(capability):
    run_pytest("triton_compiled.py", TRITON_INTERPRET="0", LENGTHWISE_TRITON_CAPABILITY=capability)


def test_tensors_on_the_cpu_are_refused_in_words():
    q = torch.zeros(1, 1, 3, 16)
    with pytest.raises(NotImplementedError, match="for GPUs, got tensors on cpu"):
        lw.attend(q, q, q, backend="triton")


@needs_triton
@pytest.mark.prove
def test_the_newest_triton_compiles_the_kernels(tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), "triton"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("the newest Triton cannot be downloaded here")
    run_pytest("triton_compiled.py", first=str(tmp_path), TRITON_INTERPRET="0")
