"""The tiled C++ kernel: what it takes, that it is never required, that its skipping changes nothing that matters."""

from dataclasses import replace

import pytest
import torch

import lengthwise as lw
from lengthwise.attention import choose, reference
from lengthwise.attention.backend import Plan, Refusal
from lengthwise.attention.call import AttentionCall, checked_call
from lengthwise.attention.native import build, tiles
from lengthwise.bias import (
    Bias,
    DenseBias,
    DistanceBias,
    FunctionBias,
    LevelBias,
    LineBias,
    QueryDistanceBias,
    SumBias,
    two_floats,
)
from lengthwise.encodings import Encoding
from lengthwise.encodings.fire import fire_tile
from lengthwise.token_layout import Band, TokenLayout

HEADS, DIM, LENGTH = 3, 16, 700
POSITIONS = torch.arange(LENGTH)[None]
needs_kernel = pytest.mark.skipif(build.fault() is not None, reason=f"no kernel here: {build.fault()}")


def make_call(bias: Bias | None = None, **options) -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, DIM, generator=generator)
    return checked_call(q, k, v, bias=bias, **options)


def run(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    plan = tiles.plan(call)
    assert isinstance(plan, tiles.TilesPlan), plan
    out, lse = plan.run(call)
    return out, lse if lse is not None else out.new_empty(0)


def why_not(call: AttentionCall) -> str:
    refusal = tiles.plan(call)
    assert isinstance(refusal, Refusal)
    return " ".join(refusal.reasons)


def steep(curve: str = "linear", by: float = 1.0) -> LevelBias:
    level = POSITIONS.double()[None]
    return LevelBias(level, level, by * torch.tensor([0.5, 0.001, 2.0]).view(1, HEADS, 1), curve)


def table(by: float = 0.1) -> DistanceBias:
    return DistanceBias(-by * POSITIONS.float().expand(HEADS, -1), POSITIONS, POSITIONS)


def with_profiles(side: str, rows: float = 1.0, far: float = 1.0) -> SumBias:
    """Steep levels, and profiles that are `far` times as large from a distance of 300 on; the first rows are so too."""
    generator = torch.Generator().manual_seed(7)
    own = torch.randn(1, HEADS, LENGTH, 5, generator=generator)
    own[:, :, :9] *= rows
    profiles = torch.randn(1, 5, LENGTH, generator=generator)
    profiles[..., 300:] *= far
    mixed = QueryDistanceBias(own, profiles, POSITIONS, POSITIONS, side=side)  # type: ignore[arg-type]
    return SumBias((steep(), mixed))


def test_without_a_compiler_row_block_takes_the_call(monkeypatch):
    monkeypatch.setattr(build, "fault", lambda: "there is no C++ compiler")
    call = make_call(steep())
    with pytest.raises(NotImplementedError, match="there is no kernel here: there is no C\\+\\+ compiler"):
        choose(call, "native")
    assert choose(call)[0] == "row_block"


@needs_kernel
def test_the_kernel_is_the_first_choice_for_what_it_takes():
    for options in ({}, {"sink": torch.zeros(HEADS)}, {"window": Band(3)}, {"softcap": 5.0, "return_lse": True}):
        assert choose(make_call(steep(), **options))[0] == "native"


@needs_kernel
def test_padding_with_holes_is_taken_and_documents_in_several_pieces_are_not():
    striped = POSITIONS % 2
    assert isinstance(tiles.plan(make_call(steep(), key_mask=striped.bool())), tiles.TilesPlan)
    pieces = TokenLayout.of(POSITIONS, documents=striped)
    assert "more than one piece" in why_not(make_call(steep(), layout=pieces))


@needs_kernel
def test_documents_may_have_any_numbers_as_long_as_each_is_in_one_piece():
    rising = (POSITIONS >= 100).long() + (POSITIONS >= 450).long()
    named = torch.tensor([7, 3, 5])[rising]
    outs = [run(make_call(steep(), layout=TokenLayout.of(POSITIONS, documents=x)))[0] for x in (rising, named)]
    assert torch.equal(*outs)


@needs_kernel
def test_positions_with_gaps_are_left_to_others():
    gaps = 3 * POSITIONS + POSITIONS % 2
    call = make_call(DistanceBias(torch.zeros(HEADS, 9), gaps, gaps), layout=TokenLayout.of(gaps))
    assert "gaps" in why_not(call)


@needs_kernel
def test_what_its_terms_cannot_say_is_left_to_others():
    dense = DenseBias(torch.zeros(1, 1, LENGTH, LENGTH))
    assert "its tiles know" in why_not(make_call(dense))
    assert "its tiles know" in why_not(make_call(SumBias((steep(), dense))))
    assert "up to 4 terms" in why_not(make_call(SumBias((table(), *[steep()] * 4))))
    assert isinstance(tiles.plan(make_call(SumBias((*[table()] * 6, *[steep()] * 3)))), tiles.TilesPlan)


def results(call: AttentionCall, skip: bool, d_out: torch.Tensor, d_lse: torch.Tensor | None = None) -> list:
    """The output, the log-sum-exp and the gradients of q, k, v and rows; where d_lse is given, of that alone."""
    names = ("q", "k", "v", "bias.terms.1.rows")
    learned = {name: x.detach().requires_grad_() for name, x in call.tensors().items() if name in names}
    leaves, own = list(learned.values()), replace(call.with_tensors(learned), skip=skip, return_lse=True)
    out, lse = run(own)
    head, above = (out, d_out) if d_lse is None else (lse, d_lse)
    return [out.detach(), lse.detach()[..., None], *torch.autograd.grad(head, leaves, above)]


def adversaries() -> dict[str, AttentionCall]:
    calls = {name: make_call(steep()) for name in ("ordinary", "huge far keys", "huge far values", "huge upstream")}
    calls["huge far keys"].k[:, :, :5] *= 1e3
    calls["huge far values"].v[:, :, :5] *= 1e20
    flat = LevelBias(torch.zeros(1, 1, LENGTH).double(), torch.zeros(1, 1, LENGTH).double(), torch.ones(1, 1, 1))
    calls["flat"] = make_call(flat)
    calls["rising with distance"] = make_call(table(-0.1))
    falling_levels = POSITIONS.flip(1).double()[None]
    calls["falling levels"] = make_call(LevelBias(falling_levels, falling_levels, torch.full((1, 1, 1), 0.5)))
    calls["negative slope"] = make_call(steep(by=-0.01))
    calls["logarithmic"] = make_call(steep("log1p_square", by=4.0))
    calls["a sum"] = make_call(SumBias((table(0.3), steep(), steep("log1p_square"))))
    for side in ("query", "key"):
        calls[f"profiles, {side}"] = make_call(with_profiles(side))
        calls[f"huge far profiles, {side}"] = make_call(with_profiles(side, far=100.0))
    calls["huge rows of far keys"] = make_call(with_profiles("key", rows=100.0))
    calls["a sum that rises"] = make_call(SumBias((table(-0.4), steep())))
    factor = torch.rand(1, HEADS, LENGTH, generator=torch.Generator().manual_seed(2))
    calls["small factors"] = make_call(steep(), logit_scale=0.05 * factor)
    calls["large factors"] = make_call(steep(), logit_scale=20 * factor)
    calls["a factor of 0 and one below"] = make_call(steep(), logit_scale=1 - 0.01 * POSITIONS[None].float())
    calls["a sink"] = make_call(steep(), sink=torch.tensor([30.0, 0.0, -30.0]))
    calls["a softcap"] = make_call(steep(), softcap=0.5)
    calls["a band without the own key"] = make_call(steep(), window=Band(2))
    calls["a band far away"] = make_call(steep(), window=Band(130, 400))
    holes = torch.rand(1, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.6
    calls["holes"] = make_call(steep(), key_mask=holes)
    calls["holes far away"] = make_call(steep(), key_mask=holes | (POSITIONS >= 200))
    calls["queries behind"] = checked_call(
        *(getattr(calls["ordinary"], name)[:, :, :200] for name in "qkv"),
        bias=LevelBias(
            400 + POSITIONS[None, :, :200].double(), POSITIONS[None, :, :200].double(), torch.full((1, 1, 1), 0.2)
        ),
        layout=TokenLayout.of(400 + POSITIONS[:, :200], POSITIONS[:, :200], start=400),
    )
    return calls


def assert_alike(on: torch.Tensor, off: torch.Tensor) -> None:
    # Proven: below 2 ** -25 of the magnitudes that a row or a block of keys adds up; and the sums have fewer terms, so
    # each may round otherwise, by 2 ** -24 of a magnitude for each of the at most 6 blocks that are added.
    assert torch.equal(on.isfinite(), off.isfinite())
    on, off = on.nan_to_num(neginf=0), off.nan_to_num(neginf=0)
    scale = off.abs().amax(-1, keepdim=True).clamp(min=float(off.abs().median()))
    assert ((on - off).abs() <= 8 * 2**-24 * scale).all()


@needs_kernel
@pytest.mark.parametrize("name", adversaries())
def test_nothing_that_matters_is_skipped(name):
    call = adversaries()[name]
    d_out = torch.randn(call.q.shape, generator=torch.Generator().manual_seed(1))
    if name == "huge upstream":
        d_out[:, :, ::97] *= 1e10
    for on, off in zip(results(call, True, d_out), results(call, False, d_out), strict=True):
        assert_alike(on, off)


@needs_kernel
@pytest.mark.parametrize("name", adversaries())
def test_nothing_that_matters_to_the_gradient_of_the_log_sum_exp_alone_is_skipped(name):
    call = adversaries()[name]
    d_lse = torch.randn(call.q.shape[:3], generator=torch.Generator().manual_seed(1))
    for on, off in zip(results(call, True, d_lse, d_lse), results(call, False, d_lse, d_lse), strict=True):
        assert_alike(on, off)


@needs_kernel
def test_a_steep_head_is_skipped_and_its_flat_neighbour_is_not():
    calls = adversaries()
    ordinary = tiles.skipped_share(calls["ordinary"])
    assert 0.3 < ordinary < 2 / 3
    assert tiles.skipped_share(calls["flat"]) == 0
    assert tiles.skipped_share(calls["huge far keys"]) < ordinary
    assert tiles.skipped_share(calls["large factors"]) > tiles.skipped_share(calls["small factors"])
    assert tiles.skipped_share(calls["a sink"]) == ordinary
    assert tiles.skipped_share(calls["a softcap"]) >= ordinary
    for name in ("logarithmic", "a sum", "holes far away", "profiles, query", "profiles, key"):
        assert tiles.skipped_share(calls[name]) > 0, name
    for name in ("a band without the own key", "a band far away", "queries behind"):
        assert tiles.skipped_share(calls[name]) == 0, name


@needs_kernel
def test_rows_whose_factor_is_not_positive_are_never_skipped():
    for bad in (0.0, -1.0, torch.nan):
        factor = torch.ones(1, 1, LENGTH)
        factor[..., LENGTH - 1] = bad
        share = tiles.skipped_share(make_call(steep(), logit_scale=factor))
        assert 0 < share < tiles.skipped_share(make_call(steep()))


@needs_kernel
def test_a_masked_diagonal_means_that_nothing_is_skipped():
    call = make_call(steep(), key_mask=POSITIONS < LENGTH - 100)
    late = slice(LENGTH - 99, None)
    expected, _ = reference.run(call, Plan())
    assert torch.allclose(run(call)[0][:, :, late], expected[:, :, late], atol=1e-6)


@needs_kernel
@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_never_skipped_and_stays_in_the_rows_that_see_it(place, bad):
    call = make_call(steep())
    getattr(call, place)[0, 0, 3] = bad
    seen = slice(3, None) if place != "q" else slice(3, 4)
    out, lse = run(call)
    for x in (out, lse[..., None]):
        assert x[0, 0, seen].isnan().all()
        assert x[0, 1:].isfinite().all()
        assert x[0, 0, :3].isfinite().all()


@needs_kernel
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bias", [None, steep(), table()])
def test_a_query_that_is_not_finite_gives_no_gradient_to_keys_that_it_does_not_see(bias, softcap):
    call = make_call(bias, softcap=softcap)
    call.q[0, 0, 200] = torch.nan
    leaves = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    out, lse = run(replace(call, return_lse=True))
    for d in torch.autograd.grad(out.sum() + lse.sum(), leaves[1:]):
        assert d[0, 0, :201].isnan().all()
        assert d[0, 0, 201:].isfinite().all()
        assert d[0, 1:].isfinite().all()


@needs_kernel
@pytest.mark.parametrize("curve", ["linear", "log1p_square"])
def test_levels_keep_their_precision_however_far_they_have_climbed(curve):
    level = POSITIONS.double()[None] * 1e-3
    slope = torch.full((1, 1, 1), 30.0)
    near, far = (run(make_call(LevelBias(level + base, level + base, slope, curve)))[0] for base in (0, 2.0**20))
    assert torch.allclose(near, far, atol=1e-6)


@needs_kernel
def test_levels_in_two_parts_are_the_same_levels_with_the_same_gradients():
    level = torch.rand(1, HEADS, LENGTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64).cumsum(2)
    high, low = two_floats(level)
    parts = [x.clone().requires_grad_() for x in (high, high, low, low)]
    slope = torch.ones(1, 1, 1)
    split = LevelBias(parts[0], parts[1], slope, "linear", False, parts[2], parts[3])
    whole = [(high.double() + low.double()).requires_grad_() for _ in range(2)]
    outs = [run(make_call(bias))[0] for bias in (split, LevelBias(*whole, slope))]
    assert torch.equal(*outs)
    of_parts, of_whole = (
        torch.autograd.grad(out.square().sum(), x) for out, x in zip(outs, (parts, whole), strict=True)
    )
    for part, exact in zip(of_parts, (*of_whole, *of_whole), strict=True):
        assert torch.equal(part, exact.float())


@needs_kernel
def test_outputs_changed_in_place_do_not_change_the_gradients():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, HEADS, 100, DIM))
    gradients = []
    for change in (lambda x: x * 2, lambda x: x.mul_(2)):
        out, lse = (change(x) for x in run(checked_call(q, k, v, return_lse=True)))
        gradients.append(torch.autograd.grad(out.square().sum() + lse.square().sum(), (q, k, v)))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def make_fire() -> Encoding:
    torch.manual_seed(0)
    fire = lw.make("fire", heads=HEADS, width=48, head_dim=DIM, train_length=64, threshold=50.0).double()
    with torch.no_grad():
        for parameter in (*fire.into.parameters(), *fire.out.parameters()):
            parameter.normal_()
        fire.into.weight[3] = 0
    return fire


def test_fire_is_the_same_bias_in_straight_lines_with_the_same_gradients():
    length, fire = 131, make_fire()
    layout = lw.layout(length)
    lines = fire.bias(torch.randn(1, length, 48), layout)
    assert isinstance(lines, LineBias)
    limit = (fire.multiplier * fire.threshold).abs()
    layers = (fire.into.weight, fire.into.bias, fire.out.weight, fire.out.bias)
    function = FunctionBias(fire_tile, (layout.query, layout.key, layout.query, fire.c, limit, *layers))
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    first, second = (kind.dense().where(seen, 0) for kind in (function, lines))
    assert torch.allclose(first, second, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(first)
    learned = list(fire.parameters())
    of_first, of_second = (
        torch.autograd.grad((x * direction).sum(), learned, allow_unused=True) for x in (first, second)
    )
    for a, b in zip(of_first, of_second, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@needs_kernel
def test_straight_lines_are_added_by_the_kernel_and_too_many_are_not():
    assert choose(make_call(make_fire().bias(torch.randn(1, LENGTH, 48), lw.layout(LENGTH))))[0] == "native"
    curve = DistanceBias(torch.linspace(0, 1, LENGTH)[None], POSITIONS, POSITIONS)
    lines = torch.ones(HEADS, 300)
    many = LineBias(curve, torch.ones(1, LENGTH), torch.linspace(0, 1, 299), lines, lines)
    assert "up to 256 straight lines" in why_not(make_call(many))


@needs_kernel
def test_straight_lines_of_what_does_not_fall_along_a_row_are_left_to_others():
    both = torch.arange(-LENGTH + 1, LENGTH).abs().float()[None]
    lines = torch.ones(HEADS, 2)
    rest = (torch.ones(1, LENGTH), torch.ones(1), lines, lines)
    two_sided = LineBias(DistanceBias(both, POSITIONS, POSITIONS, 1 - LENGTH), *rest)
    negative = LineBias(DistanceBias(both[:, LENGTH - 1 :], POSITIONS, POSITIONS), -rest[0], *rest[1:])
    for bias in (two_sided, negative):
        assert "falls along a row" in why_not(make_call(bias))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"factor": torch.ones(1, 4)}, "factor must be"),
        ({"knots": torch.ones(2)}, "slope must be"),
        ({"intercept": torch.ones(HEADS, 3)}, "intercept must be"),
        ({"curve": DistanceBias(torch.ones(2, 9), POSITIONS[:, :5], POSITIONS[:, :5])}, "one head"),
    ],
)
def test_a_line_bias_whose_parts_do_not_fit_is_refused(change, words):
    curve = DistanceBias(torch.ones(1, 9), POSITIONS[:, :5], POSITIONS[:, :5])
    parts = {"curve": curve, "factor": torch.ones(1, 5), "knots": torch.ones(1)}
    parts |= {"slope": torch.ones(HEADS, 2), "intercept": torch.ones(HEADS, 2)}
    with pytest.raises(ValueError, match=words):
        LineBias(**parts | change)
