"""Where a number comes from: command, commit, machine, versions, date."""

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

import lengthwise


def certificate(command: str) -> dict[str, object]:
    """What a reader needs to measure the same again."""
    return {
        "command": command,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "src") else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{_processor()}, {torch.get_num_threads()} threads",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lengthwise": lengthwise.__version__,
        },
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return done.stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
