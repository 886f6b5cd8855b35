"""The C++ files compiled on first use, kept by the hash of their text and of the compiler, and never required."""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-pthread")
INSTRUCTIONS = ("flags", "Features", "CPU implementer", "CPU part", "isa")
"""The lines of /proc/cpuinfo that decide which instructions "native" means: x86's, ARM's three, RISC-V's."""
log = logging.getLogger(__name__)


@cache
def fault() -> str | None:
    """Why there is no kernel on this machine; None if there is one."""
    try:
        library()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    """The compiled kernel; an OSError if this machine cannot have one."""
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("there is no C++ compiler (c++, g++ or clang++) on the path")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    # The machine's own instructions are used, so a folder shared by several machines holds one kernel for each.
    text = "\n".join((version, " ".join(_flags()), _processor(), *(file.read_text() for file in (*SOURCES, *HEADERS))))
    target = _folder() / f"kernel-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        _compile(compiler, target)
    return ctypes.CDLL(str(target))


def _compile(compiler: str, target: Path) -> None:
    """Into a file of its own first, so that another process never loads half a kernel."""
    log.info("compiling the attention kernel with %s, once", compiler)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "kernel.so"
        for more in (["-fopenmp"], []):  # without OpenMP the kernel starts threads of its own, which takes longer
            command = [compiler, *_flags(), *more, *map(str, SOURCES), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                break
        else:
            raise OSError(f"{compiler} could not compile the kernel: {done.stderr.strip()[:300]}")
        os.replace(made, target)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lengthwise"


def _flags() -> tuple[str, ...]:
    # On ARM GCC and clang agree on -mcpu=native; older clangs have no -march=native there.
    return (*FLAGS, "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return "\n".join([platform.machine(), *sorted({x for x in lines if x.partition(":")[0].strip() in INSTRUCTIONS})])
