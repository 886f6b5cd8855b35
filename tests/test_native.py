"""The C++ kernel: what it takes, that it is never required, and that its skipping changes nothing that matters."""

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lengthwise as lw
from lengthwise.attention import choose, native, reference, row_block
from lengthwise.attention.native import build

HEADS, DIM, LENGTH = 3, 16, 700
POSITIONS = torch.arange(LENGTH)
needs_kernel = pytest.mark.skipif(build.fault() is not None, reason=f"no kernel here: {build.fault()}")


def make_call(bias: lw.Bias | None = None, **options) -> lw.attention.Call:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, DIM, generator=generator)
    return lw.checked_call(q, k, v, bias=bias, **options)


def steep() -> lw.LevelBias:
    level = POSITIONS.double()[None, None]
    return lw.LevelBias(level, level, torch.tensor([0.5, 0.001, 2.0]).view(1, HEADS, 1))


def test_without_a_compiler_row_block_takes_the_call(monkeypatch):
    monkeypatch.setattr(build, "fault", lambda: "there is no C++ compiler")
    call = make_call(steep())
    assert native.objections(call) == ["there is no kernel here: there is no C++ compiler"]
    assert choose(call) == "row_block"


@needs_kernel
def test_what_is_no_interval_of_keys_is_left_to_row_block():
    striped = torch.arange(LENGTH)[None] % 2
    for options in ({"key_mask": striped.bool()}, {"documents": striped}):
        assert "more than one interval" in native.objections(make_call(steep(), **options))[0]
    gaps = 3 * POSITIONS + POSITIONS % 2
    assert "gaps" in native.objections(make_call(lw.DistanceBias(torch.zeros(HEADS, 9), gaps, gaps)))[0]
    assert choose(make_call(steep())) == "native"


def results(call: lw.attention.Call, skip: bool, d_out: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    with row_block.skipping(skip):
        out = native.attend(lw.checked_call(*leaves, bias=call.bias))
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def adversaries() -> dict[str, lw.attention.Call]:
    calls = {name: make_call(steep()) for name in ("ordinary", "huge far keys", "huge far values", "huge upstream")}
    calls["huge far keys"].k[:, :, :5] *= 1e3
    calls["huge far values"].v[:, :, :5] *= 1e20
    flat = lw.LevelBias(torch.zeros(1, 1, LENGTH).double(), torch.zeros(1, 1, LENGTH).double(), torch.ones(1, 1, 1))
    calls["flat"] = make_call(flat)
    rising = lw.DistanceBias(0.1 * POSITIONS.float().expand(HEADS, -1), POSITIONS, POSITIONS)
    calls["rising with distance"] = make_call(rising)
    falling_levels = POSITIONS.flip(0).double()[None, None]
    calls["falling levels"] = make_call(lw.LevelBias(falling_levels, falling_levels, torch.full((1, 1, 1), 0.5)))
    negative = steep()
    calls["negative slope"] = make_call(lw.LevelBias(negative.query_level, negative.key_level, -negative.slope / 100))
    return calls


@needs_kernel
@pytest.mark.parametrize("name", adversaries())
def test_nothing_that_matters_is_skipped(name):
    call = adversaries()[name]
    d_out = torch.randn(call.q.shape, generator=torch.Generator().manual_seed(1))
    if name == "huge upstream":
        d_out[:, :, ::97] *= 1e10
    for on, off in zip(results(call, True, d_out), results(call, False, d_out), strict=True):
        # Proven: below 2 ** -25 of the magnitudes that a row or a block of keys adds up; and the sums have fewer terms,
        # so each may round otherwise, by 2 ** -24 of a magnitude for each of the at most 6 blocks that are added.
        scale = off.abs().amax(-1, keepdim=True).clamp(min=float(off.abs().median()))
        assert ((on - off).abs() <= 8 * 2**-24 * scale).all()


@needs_kernel
def test_a_steep_head_is_skipped_and_its_flat_neighbour_is_not():
    assert 0.3 < native.skipped_share(make_call(steep())) < 2 / 3
    assert native.skipped_share(adversaries()["flat"]) == 0
    assert native.skipped_share(adversaries()["huge far keys"]) < native.skipped_share(make_call(steep()))


@needs_kernel
def test_a_masked_diagonal_means_that_nothing_is_skipped():
    hidden = (POSITIONS < LENGTH - 100)[None]
    call = make_call(steep(), key_mask=hidden)
    late = slice(LENGTH - 99, None)
    assert torch.allclose(native.attend(call)[:, :, late], reference.attend(call)[:, :, late], atol=1e-6)


@needs_kernel
@pytest.mark.parametrize("place", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_never_skipped(place, bad):
    call = make_call(steep())
    getattr(call, place)[0, 0, 3] = bad
    seen = slice(3, None) if place != "q" else slice(3, 4)
    out = native.attend(call)
    assert out[0, 0, seen].isnan().all()
    assert out[0, 1:].isfinite().all()
    assert out[0, 0, :3].isfinite().all()


@needs_kernel
def test_levels_keep_their_precision_however_far_they_have_climbed():
    level = POSITIONS.double()[None, None] * 1e-3
    calls = [make_call(lw.LevelBias(level + base, level + base, torch.full((1, 1, 1), 30.0))) for base in (0, 2.0**20)]
    near, far = (native.attend(call) for call in calls)
    assert torch.allclose(near, far, atol=1e-6)


@needs_kernel
def test_an_output_changed_in_place_does_not_change_the_gradients():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, HEADS, 100, DIM))
    gradients = []
    for change in (lambda out: out * 2, lambda out: out.mul_(2)):
        out = change(native.attend(lw.checked_call(q, k, v)))
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def large_tensors() -> dict[int, torch.Tensor]:
    """Everything that somebody holds and that grows with the length."""
    gc.collect()
    return {id(x): x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.numel() >= LENGTH}


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def offloaded() -> torch.autograd.graph.saved_tensors_hooks:
    """What is saved for backward is put away, as offloading and checkpointing do it."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy)


def learned_bias(kind: str) -> lw.Bias:
    if kind == "levels":
        level = POSITIONS.double()[None, None].requires_grad_()
        return lw.LevelBias(level, level, torch.tensor([0.5, 0.001, 2.0]).view(1, HEADS, 1).requires_grad_())
    table = torch.linspace(0, -3, HEADS * LENGTH).view(HEADS, LENGTH)
    if kind == "table":
        return lw.DistanceBias(table.requires_grad_(), POSITIONS, POSITIONS)
    curve = lw.DistanceBias(torch.linspace(0, 1, LENGTH)[None].requires_grad_(), POSITIONS, POSITIONS)
    slope, intercept = torch.zeros(2, HEADS, 2)
    return lw.LineBias(curve, torch.ones(1, LENGTH), torch.tensor([0.5]), slope.requires_grad_(), intercept)


@needs_kernel
@pytest.mark.parametrize("dim", [DIM, 12], ids=["as it is", "padded"])
@pytest.mark.parametrize("kind", ["table", "levels", "lines"])
def test_whatever_is_large_is_saved_where_it_can_be_put_away_and_is_let_go_after_backward(kind, dim):
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, dim).requires_grad_()
    d_out, bias = torch.randn(1, HEADS, LENGTH, dim), learned_bias(kind)
    wanted = (q, k, v, *(x for x in bias.sources if x.requires_grad))
    expected = torch.autograd.grad(native.attend(lw.checked_call(q, k, v, bias=bias)), wanted, d_out)
    before = large_tensors()
    with offloaded():
        out = native.attend(lw.checked_call(q, k, v, bias=bias))
    assert large_tensors().keys() - before.keys() == {id(out)}
    assert_same(torch.autograd.grad(out, wanted, d_out), expected)
    assert large_tensors().keys() - before.keys() == {id(out)}


@needs_kernel
def test_a_checkpointed_call_keeps_its_inputs_only():
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, 12).requires_grad_()
    mask = POSITIONS[None] > 5

    def attention(*inputs: torch.Tensor) -> torch.Tensor:
        return native.attend(lw.checked_call(*inputs, bias=steep(), key_mask=mask))

    expected = torch.autograd.grad(attention(q, k, v).sum(), (q, k, v))
    before = large_tensors()
    out = checkpoint(attention, q, k, v, use_reentrant=False, preserve_rng_state=False)
    assert large_tensors().keys() - before.keys() == {id(out)}
    assert_same(torch.autograd.grad(out.sum(), (q, k, v)), expected)


def second_derivative(first: torch.Tensor, of: torch.Tensor, how: str) -> None:
    (slope,) = torch.autograd.grad(first, of, create_graph=True)
    if how == "backward":
        slope.square().sum().backward()
    else:
        torch.autograd.grad(slope.square().sum(), of)


@needs_kernel
@pytest.mark.parametrize("how", ["backward", "grad"])
def test_a_second_derivative_is_refused_in_words(how):
    call = make_call(steep())
    scale = torch.ones(DIM, requires_grad=True)
    out = lw.attend(call.q * scale, call.k, call.v, bias=call.bias, backend="native")
    # Beside attention there is another way to the scale, so that torch has an answer, and a wrong one.
    with pytest.raises(NotImplementedError, match=r"second derivative.*backend='reference'"):
        second_derivative((out * scale).square().sum(), scale, how)


def fire_beyond_its_limit(length: int) -> lw.FunctionBias:
    torch.manual_seed(0)
    fire = lw.make("fire", heads=HEADS, width=48, head_dim=DIM, train_length=64, threshold=50.0).double()
    with torch.no_grad():
        for parameter in (*fire.into.parameters(), *fire.out.parameters()):
            parameter.normal_()
        fire.into.weight[3] = 0
    positions = torch.arange(length)
    bias = fire.bias(torch.randn(1, length, 48), positions, positions)
    assert isinstance(bias, lw.FunctionBias)
    return bias


def test_fire_is_the_same_bias_in_straight_lines_with_the_same_gradients():
    length = 131
    bias = fire_beyond_its_limit(length)
    may = torch.ones(length, length, dtype=torch.bool).tril()
    lines = bias.lines
    first, second = (kind.dense().where(may, 0) for kind in (bias, lines))
    assert torch.allclose(first, second, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(first)
    of_first, of_second = (torch.autograd.grad((x * direction).sum(), bias.sources) for x in (first, second))
    for a, b in zip(of_first, of_second, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@needs_kernel
def test_straight_lines_are_added_by_the_kernel_and_too_many_are_not():
    assert choose(make_call(fire_beyond_its_limit(LENGTH))) == "native"
    curve = lw.DistanceBias(torch.linspace(0, 1, LENGTH)[None], POSITIONS, POSITIONS)
    lines = torch.ones(HEADS, 300)
    many = lw.LineBias(curve, torch.ones(1, LENGTH), torch.linspace(0, 1, 299), lines, lines)
    assert "up to 256 straight lines" in native.objections(make_call(many))[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"factor": torch.ones(1, 4)}, "factor must be"),
        ({"knots": torch.ones(2)}, "slope must be"),
        ({"intercept": torch.ones(HEADS, 3)}, "intercept must be"),
        ({"curve": lw.DistanceBias(torch.ones(2, 9), torch.arange(5), torch.arange(5))}, "one head"),
    ],
)
def test_a_line_bias_whose_parts_do_not_fit_is_refused(change, words):
    curve = lw.DistanceBias(torch.ones(1, 9), torch.arange(5), torch.arange(5))
    parts = {"curve": curve, "factor": torch.ones(1, 5), "knots": torch.ones(1)}
    parts |= {"slope": torch.ones(HEADS, 2), "intercept": torch.ones(HEADS, 2)}
    with pytest.raises(ValueError, match=words):
        lw.LineBias(**parts | change)
