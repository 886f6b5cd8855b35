"""The C++ files compiled on first use, kept by the hash of their text and of the compiler, and never required.

Both that it compiles and that it cannot are said as warnings, which Python shows unless it is told not to.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from lengthwise.files import cache_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-pthread")
INSTRUCTIONS = ("flags", "Features", "CPU implementer", "CPU part", "isa")
"""The lines of /proc/cpuinfo that decide which instructions "native" means: x86's, ARM's three, RISC-V's."""
PATIENCE = 600
"""Seconds after which a compiler is given up, and with it all processes that wait for its kernel."""
log = logging.getLogger(__name__)


@cache
def fault() -> str | None:
    """Why there is no kernel on this machine; None if there is one."""
    try:
        library()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without a home
        log.warning("Lengthwise: no attention kernel on this machine, row_block takes its calls, slower: %s", error)
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    """The compiled kernel; an OSError if this machine cannot have one."""
    if not SOURCES:
        raise OSError("its C++ files are not here, as in an exported model")
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("there is no C++ compiler (c++, g++ or clang++) on the path")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    # The machine's own instructions are used, so a folder shared by several machines holds one kernel for each.
    text = "\n".join((version, " ".join(_flags()), _processor(), *(file.read_text() for file in (*SOURCES, *HEADERS))))
    target = _folder() / f"kernel-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        with _alone(target.parent):
            if not target.exists():  # another process may have made it in the meantime
                _compile(compiler, target)
    return ctypes.CDLL(str(target))


def _compile(compiler: str, target: Path) -> None:
    """Into a file of its own first, so that another process never loads half a kernel."""
    # Measured on one core: 4 s with GCC 12, 10 s with clang 14.
    log.warning("Lengthwise: compiling the attention kernel with %s, once; about 5 s", Path(compiler).name)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "kernel.so"
        for more in (["-fopenmp"], []):  # without OpenMP the kernel starts threads of its own, which takes longer
            command = [compiler, *_flags(), *more, *map(str, SOURCES), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
            if done.returncode == 0:
                break
        else:
            raise OSError(f"{Path(compiler).name} could not compile the kernel: {_gist(done.stderr)}")
        os.replace(made, target)


def _gist(complaint: str) -> str:
    """The first error of a compiler, which says many lines."""
    lines = complaint.strip().splitlines() or ["it did not say why"]
    return next((line for line in lines if "error" in line), lines[0]).strip()[:300]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time. The lock goes with the process that holds it, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: some compile at once, and each kernel is whole
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _folder() -> Path:
    return cache_folder() / "kernels"


def _flags() -> tuple[str, ...]:
    # On ARM GCC and clang agree on -mcpu=native; older clangs have no -march=native there.
    return (*FLAGS, "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return "\n".join([platform.machine(), *sorted({x for x in lines if x.partition(":")[0].strip() in INSTRUCTIONS})])
