"""The C++ kernel on its way to a machine: every compiler, one copy for each processor, once, and never silently."""

import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import lengthwise as lw
from lengthwise.attention.native import build

HEADS, KEYS, DIM = 3, 150, 24
POSITIONS = torch.arange(KEYS)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["g++", "clang++"])
def test_every_compiler_makes_a_kernel_that_agrees_with_the_reference(name, tmp_path, monkeypatch):
    compiler = shutil.which(name)
    if compiler is None:
        pytest.skip(f"{name} is not on this machine")
    build._compile(compiler, tmp_path / "kernel.so")
    library = ctypes.CDLL(str(tmp_path / "kernel.so"))
    monkeypatch.setattr(build, "library", lambda: library)
    monkeypatch.setattr(build, "fault", lambda: None)
    q, k, v = torch.randn(3, 2, HEADS, KEYS, DIM, generator=torch.Generator().manual_seed(0))
    level = POSITIONS.double()[None, None]
    slope = torch.tensor([0.5, 0.001, 2.0]).view(1, HEADS, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for queries in (KEYS, 3):  # the kernel of tiles and the one of decoding
            bias = lw.LevelBias(level[..., -queries:], level, slope)
            own = [x.to(dtype) for x in (q[:, :, -queries:], k, v)]
            out = lw.attend(*own, bias=bias, backend="native")
            exact = lw.attend(*(x.double() for x in own), bias=bias, backend="reference")
            # Within twice the error of the reference at the same precision.
            plain = lw.attend(*own, bias=bias, backend="reference")
            assert (out.double() - exact).norm() <= 2 * (plain.double() - exact).norm()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    bias = lw.DistanceBias(torch.linspace(0, -3, HEADS * KEYS).view(HEADS, KEYS), POSITIONS, POSITIONS)
    ours, plain = (
        torch.autograd.grad(lw.attend(*leaves, bias=bias, backend=backend).square().sum(), leaves)
        for backend in ("native", "reference")
    )
    for a, b in zip(ours, plain, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def cpuinfo(monkeypatch: pytest.MonkeyPatch, machine: str, text: str) -> str:
    """What the kernel's name is made of on another machine."""
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *args: text if str(self) == "/proc/cpuinfo" else read(self, *args)
    )
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    return build._processor()


def test_processors_with_other_instructions_have_kernels_of_their_own(monkeypatch):
    core = "processor : 0\nBogoMIPS : {}\nFeatures\t: fp asimd {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n"
    machines = {
        "plain": ("aarch64", core.format(50, "", "0xd08")),
        "SVE": ("aarch64", core.format(50, "sve", "0xd08")),
        "another core": ("aarch64", core.format(50, "", "0xd40")),
        "x86": ("x86_64", "processor : 0\nflags\t\t: fpu avx2\n"),
        "x86 AVX-512": ("x86_64", "processor : 0\nflags\t\t: fpu avx2 avx512f\n"),
    }
    found = [cpuinfo(monkeypatch, *machine) for machine in machines.values()]
    assert len(set(found)) == len(machines)
    assert cpuinfo(monkeypatch, "aarch64", core.format(99, "", "0xd08")) == found[0]  # its clock is no instruction


def test_an_arm_machine_is_asked_for_its_own_instructions_by_the_name_that_its_compilers_know(monkeypatch):
    for machine, option in (("x86_64", "-march=native"), ("aarch64", "-mcpu=native"), ("arm64", "-mcpu=native")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert [flag for flag in build._flags() if "native" in flag] == [option]


LOAD = f"""
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("build", {build.__file__!r})
build = module_from_spec(spec)
spec.loader.exec_module(build)
print(build.fault(), build.fault())
"""
"""The kernel without the rest of Lengthwise, so that processes reach it together."""
ATTEND = """
import torch, lengthwise as lw
from lengthwise.attention import info
q = torch.randn(1, 2, 9, 8)
for _ in range(2):
    lw.attend(q, q, q)
info.CALLS = {"no bias": info.CALLS["no bias"]}
print(info.report())
"""


def machine_with(folder: Path, compiler: str | None) -> dict[str, str]:
    """The environment of a machine with this compiler, a script, and no other, and with an empty cache."""
    tools = folder / "bin"
    tools.mkdir()
    if compiler is not None:
        (tools / "c++").write_text(f"#!/bin/sh\n{compiler}\n")
        (tools / "c++").chmod(0o755)
    source = str(Path(lw.__file__).parents[1])
    return os.environ | {"PATH": str(tools), "XDG_CACHE_HOME": str(folder), "PYTHONPATH": source, "LENGTHWISE_DATA": ""}


def compiler_that_counts(folder: Path, before: str = "") -> str:
    """A line in a file for every kernel that it begins, which is then a copy of the one that the tests run on."""
    kernel = build.library()._name
    return f"""
PATH={os.defpath}
case "$*" in
    *-fopenmp*) echo begun >> {folder}/count; {before} for made; do :; done; cp {kernel} "$made" ;;
    *) echo copier 1.0 ;;
esac
"""


def start(code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


needs_kernel = pytest.mark.skipif(build.fault() is not None, reason="no kernel here to copy")
SAID = "Lengthwise: compiling the attention kernel with c++, once; about 5 s\n"


@needs_kernel
def test_processes_that_start_together_compile_once_and_say_so(tmp_path):
    environment = machine_with(tmp_path, compiler_that_counts(tmp_path))
    processes = [start(LOAD, environment) for _ in range(3)]
    outcomes = [process.communicate(timeout=120) for process in processes]
    assert [out for out, _ in outcomes] == ["None None\n"] * 3
    assert (tmp_path / "count").read_text() == "begun\n"
    assert sorted(error for _, error in outcomes) == ["", "", SAID]
    assert start(LOAD, environment).communicate(timeout=120) == ("None None\n", "")  # a second time nothing happens


@needs_kernel
def test_a_process_that_dies_while_it_compiles_keeps_nobody_waiting(tmp_path):
    hang = f"[ -e {tmp_path}/died ] || sleep 600;"
    environment = machine_with(tmp_path, compiler_that_counts(tmp_path, hang))
    doomed = start(LOAD, environment)
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "count").exists() and time.monotonic() < until:
            time.sleep(0.05)
        (tmp_path / "died").touch()
        doomed.kill()  # its compiler lives on
        doomed.communicate()
        assert start(LOAD, environment).communicate(timeout=120) == ("None None\n", SAID)
    finally:
        os.killpg(doomed.pid, signal.SIGKILL)


REASONS = {
    "there is no compiler": (None, "there is no C++ compiler (c++, g++ or clang++) on the path"),
    "the compiler fails": (
        '[ "$1" = --version ] || { echo "x.cpp: In y:\nx.cpp:1: error: no vectors\nmore" >&2; exit 1; }',
        "c++ could not compile the kernel: x.cpp:1: error: no vectors",
    ),
}


@pytest.mark.parametrize(("compiler", "reason"), REASONS.values(), ids=REASONS)
def test_without_a_kernel_attention_works_and_the_reason_is_told_once(compiler, reason, tmp_path):
    process = start(ATTEND, machine_with(tmp_path, compiler))
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    told = [line for line in error.splitlines() if "no attention kernel" in line]
    assert told == [f"Lengthwise: no attention kernel on this machine, row_block takes its calls, slower: {reason}"]
    assert f"native: there is no kernel here: {reason}\n" in out  # as `lengthwise info` prints it


def test_the_kernel_is_kept_with_everything_else_that_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("LENGTHWISE_DATA", "")
    assert build._folder() == tmp_path / "user" / "lengthwise" / "kernels"
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path / "data"))
    assert build._folder() == tmp_path / "data" / "kernels"


def test_where_there_is_a_compiler_there_is_a_kernel():
    """Else every test of the kernel would be skipped, and all would look well."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler on this machine")
    assert build.fault() is None
