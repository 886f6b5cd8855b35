"""The C++ kernel on its way to a machine: every compiler, one copy for each processor, once, and never silently."""

import ctypes
import platform
import shutil
from pathlib import Path

import pytest
import torch

import lengthwise as lw
from lengthwise.attention import reference
from lengthwise.attention.native import build

HEADS, KEYS, DIM = 3, 150, 24
POSITIONS = torch.arange(KEYS)


def doubled(call: lw.attention.Call) -> lw.attention.Call:
    return lw.checked_call(call.q.double(), call.k.double(), call.v.double(), bias=call.bias)


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
            call = lw.checked_call(q[:, :, -queries:].to(dtype), k.to(dtype), v.to(dtype), bias=bias)
            out = lw.attend(call.q, call.k, call.v, bias=bias, backend="native")
            exact = reference.attend(doubled(call))
            # Within twice the error of the reference at the same precision.
            assert (out.double() - exact).norm() <= 2 * (reference.attend(call).double() - exact).norm()
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
