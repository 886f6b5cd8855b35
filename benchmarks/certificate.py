"""Where a number comes from: command, commit, machine, versions, date."""

import platform
from datetime import UTC, datetime

import torch

import lengthwise
from lengthwise.origin import processor_name, source_commit


def certificate(command: str) -> dict[str, object]:
    """What a reader needs to measure the same again."""
    return {
        "command": command,
        "commit": source_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{processor_name()}, {torch.get_num_threads()} threads",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lengthwise": lengthwise.__version__,
        },
    }
