"""Learning rates by encoding, chosen by one rule with the same number of tries for each: see `study/tune.py`.

The table is what `lengthwise study --tune` wrote: every try and its loss on a part of the training text that no report
uses. torch is not loaded here: the command line is made from the config, which reads it.
"""

import functools
import json
from importlib.resources import files
from typing import Any


def tuned_rates(preset: str, encoding: str) -> dict[str, float]:
    """The rates that were chosen for an encoding; none where it was not tuned."""
    return dict(_table().get(preset, {}).get("chosen", {}).get(encoding, {}))


@functools.cache
def _table() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((files("lengthwise.train") / "tuned_rates.json").read_text())
    return content
