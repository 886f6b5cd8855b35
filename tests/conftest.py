"""Every test process uses one core: `make test` runs as many of them as there are cores.

Tests that run over all encodings are many. Of encodings that take the road of another one through a kernel or a model,
`make test` runs the laws under "auto"; under the other backends, and in models, `make prove` runs them.
"""

import os

import pytest
import torch

torch.set_num_threads(1)

# It is for a process of its own, in which kernels are interpreted; else it would be read for its doctests.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["triton_interpreted.py"]

SAME_KERNELS = {
    *("carope", "fope", "grape-a", "grape-m", "grape-m-ctx", "hope", "path", "pope", "repo", "selective-rope", "xpos"),
    *("bam", "sandwich", "headscale", "llama4-scale", "log-floor", "logn", "ministral3-scale", "sink", "ssmax"),
    *("stick-breaking", "axial-rope", "mixed-rope", "alibi-2d", "swin"),
    *(
        "kerple-power",
        "t5",
        "t5-clamped",
        "cable-nw",
        "fox",
        "shaw",
        "transformer-xl",
        "learned",
        "sinusoidal",
        "dapev2",
    ),
}
"""Backends see rotated queries and keys, a table, a factor per row or a sink, as of any other encoding; and so of all
compositions."""

SAME_MODELS = {
    *("fope", "grape-m", "grape-m-ctx", "hope", "path", "repo", "xpos", "bam", "sandwich", "headscale", "llama4-scale"),
    *("log-floor", "logn", "ministral3-scale", "sink", "axial-rope", "mixed-rope", "alibi-2d", "swin"),
}
"""Models treat them as rope, kerple, carope, ssmax or stick-breaking."""

SAME_COMPOSITIONS = {"alibi+dapev2"}
"""A network over the scores does not know which bias it is given: as cable+dapev2."""

LONGEST = ("test_triton", "test_shapes", "test_study")
"""Files with tests of half a minute."""

OVER_ALL = (
    *("test_compile", "test_devices", "test_evaluate", "test_inspect"),
    *("test_model_citizen", "test_model_decoding", "test_model_ecosystem"),
)

ONE_OF_EACH_KIND = {"alibi", "kerple", "cable", "inkling", "dape"}
"""Levels, a table, sums of steps, curves that every query mixes, and a rescore."""


def repeats_a_law(parameters: dict[str, object], two_sided: bool) -> bool:
    """Whether a law is tried on an encoding whose kernel or whose formula another one tries it on.

    Every causal encoding has every law once, under "auto"; at 32,768 tokens other backends have three encodings, and
    compositions none.
    """
    name, elsewhere = str(parameters["name"]), parameters.get("backend", "auto") != "auto"
    long = getattr(parameters["law"], "__name__", "") == "half_precision_keeps_positions"
    other = name not in ("alibi", "kerple", "cable")
    if two_sided:
        return name in SAME_MODELS or (elsewhere and name not in ONE_OF_EACH_KIND) or (long and (other or elsewhere))
    if "+" in name and (long or name in SAME_COMPOSITIONS):
        return True
    # Options change numbers, and no kernel.
    same = name in SAME_KERNELS or "+" in name or bool(parameters.get("options"))
    return elsewhere and (same or (long and other))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    # The longest tests first: at the end one process would wait for another that has just begun one.
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        names = {value for value in parameters.values() if isinstance(value, str)}
        module = item.path.stem
        same = (module in OVER_ALL or "hold_for_any_shape" in item.name) and names & SAME_MODELS
        if same or ("law" in parameters and repeats_a_law(parameters, two_sided="two_sided" in item.name)):
            item.add_marker(pytest.mark.prove)
