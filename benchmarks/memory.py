"""The peak memory of one call: by torch's account of its tensors, and by the process's resident pages."""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import torch


def torch_peak(run: Callable[[], object]) -> tuple[int, float]:
    """The most memory alive at once beyond what was there before, by torch's own account, and the seconds it took.

    It does not see what a C++ kernel allocates for itself.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        start = time.perf_counter()
        run()
        spent = time.perf_counter() - start
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    alive = peak = 0
    for _, change in changes:
        alive += change
        peak = max(peak, alive)
    return peak, spent


def resident_peak(run: Callable[[], object]) -> int | None:
    """How far the resident pages of this process grow during a call; None where Linux does not tell."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)  # memory that the allocator keeps would otherwise hide growth
    reset.write_text("5")
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
