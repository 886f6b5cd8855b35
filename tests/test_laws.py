"""Every law over every encoding and backend, and again over shapes drawn at random."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lengthwise as lw
from lengthwise.encodings.registry import find
from lengthwise.testing import LAWS, TRIED, DoesNotApply, Subject, padding_changes_nothing, refuses

VARIANTS = [
    ("alibi", {"slopes": "interleaved"}),
    ("alibi", {"learned": True}),
    ("bam", {"learned": "all"}),
    ("fope", {"learned": True}),
    ("grape-m", {"per_head": True}),
    ("stick-breaking", {"attend_current": True}),
    ("rope", {"part": 0.5, "resonance": True}),
    ("fire", {"threshold": 8.0}),
    ("rope", {"layout": "interleaved"}),
    ("rope", {"scaling": {"type": "dynamic", "factor": 4.0}}),
    ("rope", {"scaling": {"type": "yarn", "factor": 4.0}}),
    ("cable+dape", {}),
    ("cable+dapev2", {}),
    ("alibi+dapev2", {}),
    ("rope+fox+ssmax+sink", {}),
]
CASES = [(name, {}) for name in lw.ENCODINGS] + VARIANTS
OTHER_SIDES = [
    *((name, {"sides": "apart"}) for name in ("kerple", "kerple-power", "fire")),
    *((name, {"sides": "alike"}) for name in ("t5", "t5-clamped", "cable", "cable-nw", "k-cable")),
    ("alibi", {"sides": "apart", "learned": True}),
]
SIDES_LAWS = ("sides_are_as_declared", "padding_changes_nothing", "agrees_with_reference", "gradients_are_right")
"""Those that run in `make test` on the sides that are not the default."""


def case_id(value: object) -> str:
    return getattr(value, "__name__", str(value))


def assert_only_sdpa_refuses(name: str, backend: str) -> None:
    assert backend == "sdpa"
    assert any(find(name).overrides(hook) for hook in ("rescore", "sink"))


def obey(law, subject):
    """The law, skipped by name where it says nothing about the subject."""
    try:
        law(subject)
    except DoesNotApply as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("backend", TRIED)
@pytest.mark.parametrize(("name", "options"), CASES, ids=case_id)
@pytest.mark.parametrize("law", LAWS, ids=case_id)
def test_every_encoding_obeys_every_law_under_every_backend(law, name, options, backend):
    subject = Subject(name, options, backend)
    if refuses(subject):
        assert_only_sdpa_refuses(name, backend)
        pytest.skip("SDPA can neither rescore nor take a sink")
    obey(law, subject)


def obey_two_sided(law, name, options, backend):
    subject = Subject(name, options, backend, causal=False)
    if refuses(subject):
        assert_only_sdpa_refuses(name, backend)
        pytest.skip("SDPA can neither rescore nor take a sink")
    obey(law, subject)


@pytest.mark.parametrize("backend", TRIED)
@pytest.mark.parametrize("name", [name for name, cls in lw.ENCODINGS.items() if cls.two_sided])
@pytest.mark.parametrize("law", LAWS, ids=case_id)
def test_two_sided_forms_obey_the_laws_that_are_not_about_time(law, name, backend):
    obey_two_sided(law, name, {}, backend)


@pytest.mark.parametrize("law", [law for law in LAWS if law.__name__ in SIDES_LAWS], ids=case_id)
@pytest.mark.parametrize(("name", "options"), OTHER_SIDES, ids=case_id)
def test_sides_that_are_not_the_default_obey_the_laws(law, name, options):
    obey_two_sided(law, name, options, "auto")


@pytest.mark.prove
@pytest.mark.parametrize("backend", TRIED)
@pytest.mark.parametrize(("name", "options"), OTHER_SIDES, ids=case_id)
@pytest.mark.parametrize("law", LAWS, ids=case_id)
def test_sides_that_are_not_the_default_obey_every_law(law, name, options, backend):
    obey_two_sided(law, name, options, backend)


def test_every_encoding_with_sides_is_tried_with_the_others_than_its_own():
    assert {name for name, _ in OTHER_SIDES} == {name for name, cls in lw.ENCODINGS.items() if "sides" in cls.options()}
    for name, options in OTHER_SIDES:
        own, other = (Subject(name, given, causal=False).encoding() for given in ({}, options))
        assert own.symmetric != other.symmetric, name
        causal = Subject(name, options).encoding()
        assert {n: p.shape for n, p in causal.named_parameters()} == {
            n: p.shape for n, p in Subject(name, options | {"sides": "alike"}).encoding().named_parameters()
        }, "under causality there is one side"
    with pytest.raises(ValueError, match="sides='apart' must be learned, got learned=False"):
        Subject("alibi", {"sides": "apart"}, causal=False).encoding()
    with pytest.raises(ValueError, match="sides must be 'alike' or 'apart', got 'both'"):
        Subject("kerple", {"sides": "both"}).encoding()


@pytest.mark.parametrize("name", lw.ENCODINGS)
@given(
    heads=st.integers(1, 5),
    pairs=st.integers(1, 5),
    length=st.sampled_from([1, 2, 63, 64, 100]),
    batch=st.integers(1, 3),
)
@example(heads=5, pairs=3, length=63, batch=1)  # where the rounding of RePo's positions weighs
@settings(max_examples=8, deadline=None)
def test_the_laws_hold_for_any_shape(name, heads, pairs, length, batch):
    subject = Subject(name, heads=heads, head_dim=2 * pairs, length=length, batch=batch, train_length=128)
    padding_changes_nothing(subject)
    out = subject.layer()(subject.tokens())
    assert out.shape == (batch, length, heads * 2 * pairs)
    assert torch.isfinite(out).all()
