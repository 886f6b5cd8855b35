"""row_block skips only what cannot matter, and nothing in it is as large as queries times keys."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiles_case import HEADS, KINDS, VALUE, by_row_block, cut_small, kernel_tile, make_case, results
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.attention import reference, row_block, skipping
from lengthwise.attention.call import AttentionCall, checked_call
from lengthwise.attention.row_block import bounds, terms, tiles
from lengthwise.bias import Bias, DistanceBias, FunctionBias, LevelBias
from lengthwise.token_layout import Band, TokenLayout

KEYS, DIM = 601, 17
AT = torch.arange(KEYS)
ORDINARY = torch.tensor([0.9, 0.5, 0.7])
ONE_STEEP_HEAD = torch.tensor([0.001, 2.0, 0.0])
SMALL = 2.0**-25
"""What a row may lose, relative to the sum of the sizes of its terms, as proven in `row_block.bounds`."""


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    cut_small(monkeypatch)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request, monkeypatch):
    """float64 skips what float32 would: it shows the loss itself, which in float32 hides in rounding."""
    monkeypatch.setattr(bounds, "SMALL", SMALL / torch.finfo(request.param).eps)
    return request.param


def ordinary() -> dict[str, Tensor]:
    torch.manual_seed(1)
    widths = {"q": DIM, "k": DIM, "v": VALUE, "d_out": VALUE}
    return {name: torch.randn(1, HEADS, KEYS, width) for name, width in widths.items()}


def steep(x: dict[str, Tensor], slopes: Tensor, dtype: torch.dtype, **masks: Any) -> AttentionCall:
    """ALiBi with given slopes; everything but the levels is learned."""
    q, k, v = (x[name].to(dtype, copy=True).requires_grad_() for name in "qkv")
    slope = slopes.to(dtype, copy=True).view(1, HEADS, 1).requires_grad_()
    window = masks.pop("window", None)
    extras = {name: masks.pop(name) for name in ("sink", "logit_scale") if name in masks}
    bias = LevelBias(AT.double()[None, None], AT.double()[None, None], slope)
    return checked_call(q, k, v, layout=TokenLayout.of(AT, **masks), bias=bias, window=window, **extras)


def falling_table(x: dict[str, Tensor], slopes: Tensor, dtype: torch.dtype, **masks: Any) -> AttentionCall:
    """The same as a learned table."""
    table = (-slopes[:, None] * AT).to(dtype).requires_grad_()
    return replace(steep(x, slopes, dtype, **masks), bias=DistanceBias(table, AT, AT))


def sizes_of_terms(call: AttentionCall, d_out: Tensor, d_lse: Tensor | None = None) -> list[Tensor]:
    """For every row of the output and of the gradients: the sum of the sizes of the terms it is made of."""
    q, k, v = (x.detach().double().nan_to_num(0, 0, 0) for x in (call.q, call.k, call.v))
    with torch.no_grad():
        matrix = reference.explain(replace(call, q=q, k=k, v=v), matrices=True).weights
        assert matrix is not None
        weights = matrix.double()
    q, k, v, up = (x.double().norm(dim=-1)[..., None] for x in (q, k, v, d_out))
    out = weights @ v
    d_scores = weights * (up * (v.transpose(2, 3) + out) + (0 if d_lse is None else d_lse.double().abs()[..., None]))
    if call.logit_scale is not None:
        d_scores = d_scores * call.logit_scale.detach().double()[..., None]
    d_q, d_k, d_v = call.scale * d_scores @ k, call.scale * d_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ up
    if isinstance(call.bias, LevelBias):
        # The gradient of a slope: every term times its distance; the row's own key, at 0, counts as 1 / slope;
        # under a slope of 0 nothing is skipped.
        slope = call.bias.slope.detach().double()[..., None]
        of_bias = (d_scores * ((AT[:, None] - AT).abs() + torch.where(slope > 0, 1 / slope, 0))).sum((2, 3))[..., None]
    else:
        of_bias = d_scores.sum((0, 2, 3))[:, None]
    # A log-sum-exp is rounded at its own size, and what is left out of it is SMALL of 1.
    return [out, torch.ones_like(out), d_q, _largest_in_block(d_k), _largest_in_block(d_v), of_bias]


def _largest_in_block(x: Tensor) -> Tensor:
    """Keys are bounded in blocks: what one may lose is measured by the one of its block that has most."""
    blocks = F.pad(x, (0, 0, 0, -KEYS % bounds.WIDTH)).unflatten(2, (-1, bounds.WIDTH))
    return blocks.amax(3, keepdim=True).expand_as(blocks).flatten(2, 3)[:, :, :KEYS]


def assert_nothing_that_matters_is_skipped(call: AttentionCall, d_out: Tensor, d_lse: Tensor | None = None) -> None:
    """With and without skipping, no row differs by more than is proven.

    With A the sum of the sizes of a row's terms: leaving terms out costs SMALL A. The weights that stay are larger by
    1 + SMALL, another SMALL A. Both change the output, by 2 SMALL A, and d_out . out with it, which every weight's
    gradient has in it, so that gradients lose 4 SMALL A. Two sums of n terms in different order differ by about
    sqrt(n) roundings.
    """
    assert call.bias is not None
    learned = [call.q, call.k, call.v, *(x for x in call.bias.sources if x.requires_grad)]
    on = results(by_row_block, call, learned, d_out, d_lse)
    off = results(by_row_block, replace(call, skip=False), learned, d_out, d_lse)
    allowed = 4 * SMALL + torch.finfo(call.dtype).eps * KEYS**0.5
    for x, y, sizes in zip(on, off, sizes_of_terms(call, d_out, d_lse), strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.isinf(), y.isinf())
        if x.ndim == 3 and x.shape[-1] == KEYS:  # the log-sum-exp, one number a row
            x, y = x[..., None], y[..., None]
        difference = torch.where(y.isfinite(), x - y, 0).double().norm(dim=-1, keepdim=True)
        assert (difference <= allowed * sizes).all()


def large_far_keys(x: dict[str, Tensor]) -> None:
    x["k"][:, :, 5] *= 300


def large_far_values(x: dict[str, Tensor]) -> None:
    x["v"][:, :, 7] *= 1e30


def small_near_values(x: dict[str, Tensor]) -> None:
    x["v"][:, :, 200:] *= 1e-20


def not_a_number(x: dict[str, Tensor]) -> None:
    x["q"][0, 0, 300], x["k"][0, 1, 301], x["v"][0, 2, 302] = torch.nan, torch.nan, torch.nan


def infinity(x: dict[str, Tensor]) -> None:
    x["q"][0, 0, 300, 3], x["k"][0, 1, 301, 4], x["v"][0, 2, 302, 0] = torch.inf, -torch.inf, torch.inf


def upstream(x: dict[str, Tensor]) -> None:
    x["d_out"][:, :, 400:] *= 1e20
    x["d_out"][:, :, :100] = 0


ADVERSE = [large_far_keys, large_far_values, small_near_values, not_a_number, infinity, upstream]


@pytest.mark.parametrize("make", [steep, falling_table])
@pytest.mark.parametrize("change", ADVERSE)
def test_nothing_that_matters_is_skipped_in_adverse_inputs(change, make, dtype):
    x = ordinary()
    change(x)
    assert_nothing_that_matters_is_skipped(make(x, ORDINARY, dtype), x["d_out"])


@pytest.mark.parametrize(("slopes", "share"), [(ORDINARY, 0.3), (ONE_STEEP_HEAD, 0.2)])
@pytest.mark.parametrize("make", [steep, falling_table])
def test_much_is_skipped_and_nothing_that_matters(make, slopes, share, dtype):
    x = ordinary()
    call = make(x, slopes, dtype)
    assert row_block.skipped_share(call) > share
    assert_nothing_that_matters_is_skipped(call, x["d_out"])


MASKS: dict[str, dict[str, Any]] = {
    "window": {"window": 307},
    "documents": {"documents": (AT >= 131).long()[None]},
    "padding": {"key_mask": AT[None] >= 37},
    "window, documents and padding": {
        "window": 307,
        "documents": (AT >= 131).long()[None],
        "key_mask": AT[None] >= 37,
    },
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("make", [steep, falling_table])
def test_skipping_and_masks_go_together(make, mask, dtype):
    x = ordinary()
    call = make(x, ORDINARY, dtype, **MASKS[mask])
    assert row_block.skipped_share(call) > 0.3
    assert_nothing_that_matters_is_skipped(call, x["d_out"])


def test_a_document_in_pieces_is_not_missed_behind_what_is_skipped(dtype):
    x = ordinary()
    call = steep(x, ORDINARY, dtype, documents=(AT // 100 % 2)[None])
    assert row_block.skipped_share(call) > 0.3
    assert_nothing_that_matters_is_skipped(call, x["d_out"])


@pytest.mark.parametrize("make", [steep, falling_table])
def test_rows_without_their_own_key_skip_nothing(make, dtype):
    x = ordinary()
    call = make(x, ORDINARY, dtype, key_mask=AT[None] < 41)
    assert row_block.skipped_share(call) == 0
    assert_nothing_that_matters_is_skipped(call, x["d_out"])


@pytest.mark.parametrize("make", [steep, falling_table])
def test_a_flat_bias_is_never_skipped(make, dtype):
    x = ordinary()
    call = make(x, torch.zeros(HEADS), dtype)
    assert row_block.skipped_share(call) == 0
    assert_nothing_that_matters_is_skipped(call, x["d_out"])


@pytest.mark.parametrize("make", [steep, falling_table])
@pytest.mark.parametrize("change", [None, *ADVERSE])
def test_a_gradient_through_the_log_sum_exp_alone_loses_nothing_that_matters(make, change, dtype):
    x = ordinary()
    if change is not None:
        change(x)
    d_lse = 2 * torch.randn(1, HEADS, KEYS)
    assert_nothing_that_matters_is_skipped(make(x, ORDINARY, dtype), torch.zeros_like(x["d_out"]), d_lse)


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("slopes", [ORDINARY, ONE_STEEP_HEAD])
def test_the_square_of_the_log_sum_exp_has_the_gradients_of_the_reference(slopes, on):
    x, both = ordinary(), []
    with skipping(on):
        for backend in (row_block, reference):
            call = replace(steep(x, slopes, torch.float64), return_lse=True)
            _, lse = backend.run(call, backend.plan(call))
            assert lse is not None
            assert call.bias is not None
            both.append(torch.autograd.grad(lse.square().sum(), [call.q, call.k, call.bias.sources[2]]))
    assert (row_block.skipped_share(call) > 0) == on
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("make", [steep, falling_table])
def test_a_sink_changes_nothing_about_what_is_skipped(make, dtype):
    x = ordinary()
    call = make(x, ORDINARY, dtype, sink=torch.tensor([3.0, -4.0, 20.0]).to(dtype))
    assert row_block.skipped_share(call) == row_block.skipped_share(make(x, ORDINARY, dtype)) > 0.3
    assert_nothing_that_matters_is_skipped(call, x["d_out"])


@pytest.mark.parametrize("make", [steep, falling_table])
def test_a_logit_scale_multiplies_what_is_proven(make, dtype):
    x = ordinary()
    factors = [torch.full((1, HEADS, KEYS), factor).to(dtype) for factor in (0.5, 1.0, 2.0)]
    calls = [make(x, ORDINARY, dtype, logit_scale=factor) for factor in factors]
    shares = [row_block.skipped_share(call) for call in calls]
    assert 0 < shares[0] < shares[1] < shares[2]
    for call in calls:
        assert_nothing_that_matters_is_skipped(call, x["d_out"])


@pytest.mark.parametrize("factor", [0.0, -1.0, torch.nan])
@pytest.mark.parametrize("make", [steep, falling_table])
def test_rows_whose_logit_scale_is_not_positive_are_never_skipped(make, factor, dtype):
    x = ordinary()
    scale = torch.ones(1, HEADS, KEYS, dtype=dtype)
    scale[:, 1, 300:] = factor
    call = make(x, ORDINARY, dtype, logit_scale=scale)
    firsts = bounds.first_keys(call, terms.make_term(call), tiles.ROWS)
    assert firsts is None or all(first == 0 for first in firsts[0][1][300 // tiles.ROWS :])
    ours, theirs = (backend.run(call, backend.plan(call))[0] for backend in (row_block, reference))
    assert torch.equal(ours.isnan(), theirs.isnan())


@pytest.mark.parametrize("make", [steep, falling_table])
def test_rows_without_a_factor_do_not_keep_others_from_skipping(make, dtype):
    x = ordinary()
    scale = torch.ones(1, HEADS, KEYS, dtype=dtype)
    scale[:, 1, 300:] = 0
    call = make(x, ORDINARY, dtype, logit_scale=scale)
    assert row_block.skipped_share(call) > 0.2
    assert_nothing_that_matters_is_skipped(call, x["d_out"])


@pytest.mark.parametrize("window", [Band(1), Band(0, first=9), (Band(2, 90), Band(200))])
@pytest.mark.parametrize("make", [steep, falling_table])
def test_bands_without_a_row_s_own_key_skip_nothing(make, window, dtype):
    x = ordinary()
    call = make(x, ORDINARY, dtype, window=window)
    assert row_block.skipped_share(call) == 0
    assert_nothing_that_matters_is_skipped(call, x["d_out"])


@pytest.mark.parametrize("make", [steep, falling_table])
def test_bands_with_a_row_s_own_key_skip_as_ever(make, dtype):
    x = ordinary()
    call = make(x, ORDINARY, dtype, window=(Band(0, 90), Band(200)))
    assert row_block.skipped_share(call) > 0.3
    assert_nothing_that_matters_is_skipped(call, x["d_out"])


def test_float64_skips_less_than_float32():
    single, double = (row_block.skipped_share(steep(ordinary(), ORDINARY, d)) for d in (torch.float32, torch.float64))
    assert 0 < double < single


class Largest(TorchDispatchMode):
    """The largest number of elements in any tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, Tensor) and x._base is None and 0 not in x.stride():
                self.found = max(self.found, x.numel())
        return made


def test_a_function_is_asked_for_tiles_only():
    asked = []

    def watched(rows: slice, columns: slice, *tensors: Tensor) -> Tensor:
        asked.append((rows.stop - rows.start) * (columns.stop - columns.start))
        return kernel_tile(rows, columns, *tensors)

    call, learned = make_case("function", keys=307).call(torch.float32)
    assert isinstance(call.bias, FunctionBias)
    call = replace(call, bias=FunctionBias(watched, call.bias.arguments))
    results(by_row_block, call, learned, torch.randn(2, HEADS, 307, VALUE))
    assert max(asked) <= tiles.ROWS * tiles.COLUMNS


BY_TILE = ("gaps", "lines", "function", "sum")
"""Kinds whose gradient runs in torch.func, whose tensors a dispatch mode cannot look into."""


@pytest.mark.parametrize("kind", BY_TILE)
def test_a_bias_without_a_term_of_its_own_is_asked_for_tiles_only(kind, monkeypatch):
    call, learned = make_case(kind, keys=307).call(torch.float32)
    sizes, own = [], type(call.bias).tile

    def watched(self: Bias, rows: slice, columns: slice) -> Tensor:
        sizes.append((rows.stop - rows.start) * (columns.stop - columns.start))
        return own(self, rows, columns)

    monkeypatch.setattr(type(call.bias), "tile", watched)
    results(by_row_block, call, learned, torch.randn(2, HEADS, 307, VALUE))
    assert max(sizes) <= tiles.ROWS * tiles.COLUMNS


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("dense", "one-head dense", *BY_TILE)])
def test_no_tensor_has_queries_times_keys_elements(kind):
    keys = 521
    call, learned = make_case(kind, keys=keys, batch=1).call(torch.float32)
    with Largest() as largest:
        results(by_row_block, call, learned, torch.randn(1, HEADS, keys, VALUE))
    assert largest.found < keys * keys / 4
