"""Bad input to encodings is refused at the door: what was expected, what was got."""

import pytest
import torch
from witness import assert_refuses

import lengthwise as lw

X, P = torch.randn(2, 5, 21), torch.arange(5)
Q = torch.randn(2, 7, 5, 4)

EITHER = (ValueError, TypeError)


def make(name="alibi", **options):
    return lw.make(name, **({"heads": 7, "width": 21} | options))


def rope(scaling=None, **options):
    return make("rope", head_dim=4, scaling=scaling, **options)


@pytest.mark.parametrize("value", [0, -7, True, "7", 7.0, None])
@pytest.mark.parametrize("size", ["heads", "width", "head_dim", "train_length"])
def test_sizes_are_whole_numbers_from_1_on(size, value):
    if size == "head_dim" and value is None:
        pytest.skip("no head_dim means width / heads: the next test")
    assert_refuses(lambda: make(**({size: value})), ValueError, "positive int", repr(value))
    if size != "head_dim":
        assert_refuses(lambda: make(**({"head_dim": 3} | {size: value})), ValueError, f"{size} must", repr(value))


def test_no_head_dim_means_width_over_heads():
    assert make(head_dim=None).shape.head_dim == 3


MAKE = {
    "width not divisible": (lambda: make(width=20), ValueError, "divides the width", "width=20"),
    "unknown encoding": (lambda: make("alibo"), ValueError, "unknown encoding 'alibo'", "did you mean 'alibi'?"),
    "nothing near": (lambda: make("quux"), ValueError, "'quux'", "'kerple'"),
    "unhashable name": (lambda: make(["alibi"]), EITHER, "encoding"),
    "causal is a word": (lambda: make(causal="yes"), EITHER, "causal", "'yes'"),
    "unknown option": (lambda: make(slope="geometric"), TypeError, "'slope'", "its options are: 'slopes'"),
    "option where none is": (lambda: make("none", slopes="x"), TypeError, "its options are: none"),
    "unknown slopes": (lambda: make(slopes="steep"), ValueError, "'geometric' or 'interleaved'", "'steep'"),
    "unhashable slopes": (lambda: make(slopes=["geometric"]), EITHER, "'geometric' or 'interleaved'"),
    "unknown layout": (lambda: rope(layout="quarter"), ValueError, "'half' or 'interleaved'", "'quarter'"),
    "odd head_dim": (lambda: make("rope"), ValueError, "pairs of channels", "got 3", "even"),
    "base of nothing": (lambda: rope(base=0.0), EITHER, "base", "0.0"),
    "fox looks back only": (lambda: make("fox", causal=False), ValueError, "causal attention only", "'alibi'"),
    "cope looks back only": (lambda: make("cope", causal=False), ValueError, "causal attention only", "'alibi'"),
    "t5 with odd buckets": (lambda: make("t5", buckets=3), ValueError, "even number of buckets", "buckets=3"),
    "t5 with 15 buckets a side": (lambda: make("t5", buckets=30, causal=False), ValueError, "buckets=30"),
    "t5 that ends too soon": (lambda: make("t5", max_distance=16), ValueError, "max_distance=16"),
    "t5 with a real number": (lambda: make("t5", buckets=32.0), EITHER, "32.0"),
    "t5-clamped without reach": (lambda: make("t5-clamped", reach=0), ValueError, "reach must be", "got 0"),
    "t5-clamped with half a step": (lambda: make("t5-clamped", reach=2.5), EITHER, "reach", "2.5"),
    "cope with one position": (lambda: make("cope", positions=1), ValueError, "2 or more", "got 1"),
    "cope with half a position": (lambda: make("cope", positions=2.5), EITHER, "positions", "2.5"),
    "fire without units": (lambda: make("fire", hidden=0), EITHER, "hidden", "0"),
    "dape without units": (lambda: make("dape", hidden=0), EITHER, "hidden", "0"),
    "learned without a table": (lambda: make("learned", length=0), EITHER, "length", "0"),
    "learned with less": (lambda: make("learned", length=-1), EITHER, "length", "-1"),
    "a part with unknown options": (
        lambda: make("alibi+dape", alibi={"slope": 1}),
        TypeError,
        "unknown option 'slope' for 'alibi'",
    ),
    "options of a part that is not there": (
        lambda: make("rope+fox", alibi={}),
        TypeError,
        "go by part, 'rope' or 'fox', got 'alibi'",
    ),
    "options without a part": (lambda: make("rope+fox", base=1e4), TypeError, "go by part", "got 'base'"),
    "options of a part as a number": (lambda: make("rope+fox", rope=1e4), TypeError, "a dictionary, got 10000.0"),
    "two rescores": (lambda: make("cope+dape"), ValueError, "at most one part", "'cope' and 'dape'"),
    "a part twice": (lambda: make("alibi+alibi"), ValueError, "once", "'alibi+alibi'"),
    "an empty part": (lambda: make("alibi+"), ValueError, "unknown encoding ''"),
    "an unknown part": (lambda: make("alibi+foxx"), ValueError, "did you mean 'fox'"),
    "a causal part, two-sided": (lambda: make("alibi+fox", causal=False), ValueError, "causal attention only"),
}

LISTS = {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]}

SCALING = {
    "unknown type": ({"type": "yarm"}, "unknown rope scaling 'yarm'", "'yarn'"),
    "no type": ({"factor": 2.0}, "unknown rope scaling None", "'type'"),
    "a bare name": ("yarn", "scaling", "'yarn'"),
    "an unhashable type": ({"type": ["yarn"]}, "scaling"),
    "no factor": ({"type": "yarn"}, "lacks 'factor'"),
    "no lists": ({"type": "longrope"}, "lacks 'short_factor'", "'long_factor'"),
    "no ramp": ({"type": "llama3", "factor": 8.0}, "lacks 'low_freq_factor'"),
    "a number too many": ({"type": "linear", "factor": 2.0, "beta_fast": 32}, "does not know 'beta_fast'", "'factor'"),
    "a list too short": (LISTS | {"short_factor": [1.0]}, "short_factor", "2, got 1"),
    "a list too long": (LISTS | {"long_factor": [1.0] * 3}, "long_factor", "2, got 3"),
    "a number for a list": (LISTS | {"long_factor": 2.0}, "long_factor", "2.0"),
    "a word for a factor": ({"type": "linear", "factor": "2"}, "factor", "'2'"),
    "a factor of 0": ({"type": "linear", "factor": 0.0}, "factor", "0.0"),
    "a negative factor": ({"type": "ntk", "factor": -2.0}, "factor", "-2.0"),
    "an empty ramp": (
        {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        "high_freq_factor",
        "4.0",
    ),
    "more than all pairs": ({"type": "proportional", "partial_rotary_factor": 2.0}, "partial_rotary_factor", "2.0"),
}


@pytest.mark.parametrize("case", MAKE.values(), ids=MAKE.keys())
def test_make_refuses(case):
    assert_refuses(*case)


@pytest.mark.parametrize("case", SCALING.values(), ids=SCALING.keys())
def test_rope_refuses_a_scaling_it_cannot_use(case):
    scaling, *phrases = case
    assert_refuses(lambda: rope(scaling), EITHER, *phrases)


def test_static_ntk_of_a_single_pair_is_refused():
    """Its base would be raised to d / (d - 2)."""
    assert_refuses(lambda: make("rope", head_dim=2, scaling={"type": "ntk", "factor": 2.0}), ValueError, "head_dim")


class Nameless(lw.Encoding):
    pass


@pytest.mark.parametrize(
    ("name", "encoding", "error", "phrases"),
    [
        ("mine", torch.nn.Linear, TypeError, ["subclass of lengthwise.Encoding", "Linear"]),
        ("mine", "alibi", TypeError, ["subclass of lengthwise.Encoding", "'alibi'"]),
        ("mine", make(), TypeError, ["subclass of lengthwise.Encoding", "Alibi"]),
        ("alibi", lw.ENCODINGS["rope"], ValueError, ["'alibi'", "already"]),
        ("", lw.ENCODINGS["rope"], TypeError, ["name", "''"]),
        (3, lw.ENCODINGS["rope"], TypeError, ["name", "3"]),
        ("rope:512", lw.ENCODINGS["rope"], TypeError, ["without any of", "'rope:512'"]),
        ("mine", Nameless, TypeError, ["Nameless", "paper"]),
    ],
    ids=["no encoding", "a name", "an object", "a taken name", "no name", "a number", "a window", "no paper"],
)
def test_register_refuses_and_changes_nothing(name, encoding, error, phrases):
    before = dict(lw.ENCODINGS)
    assert_refuses(lambda: lw.register(name, encoding), error, *phrases)
    assert before == lw.ENCODINGS


POSITIONS = {
    "real": (P.float(), TypeError, "integer", "torch.float32"),
    "true or false": (P > 2, TypeError, "integer", "torch.bool"),
    "complex": (P.cfloat(), TypeError, "integer", "torch.complex64"),
    "a list": (P.tolist(), TypeError, "integer", "list"),
    "without an axis": (torch.tensor(3), ValueError, "(batch or 1, position)", "()"),
    "before the first": (P - 2, lw.PositionError, "0 or more", "got -2"),
}


@pytest.mark.parametrize("case", POSITIONS.values(), ids=POSITIONS.keys())
def test_a_layout_refuses_such_positions_of_queries(case):
    positions, error, *phrases = case
    assert_refuses(lambda: lw.TokenLayout.of(positions, P), error, *phrases)


@pytest.mark.parametrize("case", list(POSITIONS.values())[:-1], ids=list(POSITIONS)[:-1])
def test_a_layout_refuses_such_positions_of_keys(case):
    positions, error, *phrases = case
    assert_refuses(lambda: lw.TokenLayout.of(P, positions), error, *phrases)


def test_queries_of_three_sequences_cannot_meet_keys_of_two():
    assert_refuses(lambda: lw.TokenLayout.of(P.expand(3, 5), P.expand(2, 5)), ValueError, "batch", "3")


HOOKS = {
    "rope.rotate": lambda layout: rope().rotate(Q, Q, layout),
    "learned.embed": lambda layout: make("learned").embed(X, layout),
    "sinusoidal.embed": lambda layout: make("sinusoidal").embed(X, layout),
    **{
        f"{name}.bias": lambda layout, name=name: make(name).bias(X, layout)
        for name in ("cable", "cable-nw", "k-cable", "fox")
    },
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS.keys())
def test_a_layout_is_that_of_as_many_sequences_as_there_are(hook):
    assert_refuses(lambda: hook(lw.TokenLayout.of(P.expand(3, 5))), ValueError, "3")


def test_learned_positions_end_and_the_error_says_where_and_what_else_there_is():
    encoding = make("learned", train_length=11)
    encoding.embed(X, lw.TokenLayout.of(P + 6))
    assert_refuses(
        lambda: encoding.embed(X, lw.TokenLayout.of(P + 7)), lw.PositionError, "end at 11", "position 11", "'alibi'"
    )
    assert encoding.limit == 11
