"""Where numbers come from: the command, the commit of these sources, the day, the processor and the versions."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lengthwise import __version__


def processor_name() -> str:
    """What the processor calls itself."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def command_line() -> str:
    """The command of this process, for a shell; without the folder of its program, which is this machine's own."""
    program = Path(sys.argv[0])
    return shlex.join(["lengthwise" if program.name == "cli.py" else program.name, *sys.argv[1:]])


def source_commit() -> str | None:
    """The commit of these sources, with a + where they have changed since; None where they are no checkout of git."""
    if not _git("ls-files", "--", Path(__file__).name):
        return None
    return f"{_git('rev-parse', '--short', 'HEAD')}{'+' * bool(_git('status', '--porcelain', '--', '*.py', '*.cpp'))}"


def origin() -> dict[str, Any]:
    """What a reader needs to compute the same again: the birth certificate of numbers."""
    return {
        "command": command_line(),
        "commit": source_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": {
            "lengthwise": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
    }


def _git(*words: str) -> str:
    """What git prints about the folder of these sources; nothing where it cannot. Nobody else's git waits for it."""
    command = ["git", "--no-optional-locks", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
