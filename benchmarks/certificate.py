"""Where a number comes from: command, commit, machine, versions, date."""

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

import lengthwise
from lengthwise.files import processor_name


def certificate(command: str) -> dict[str, object]:
    """What a reader needs to measure the same again."""
    return {
        "command": command,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "src") else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{processor_name()}, {torch.get_num_threads()} threads",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lengthwise": lengthwise.__version__,
        },
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    return done.stdout.strip()
