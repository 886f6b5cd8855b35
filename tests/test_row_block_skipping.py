"""row_block skips only what cannot matter, and nothing in it is as large as queries times keys."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiles_case import HEADS, KINDS, VALUE, cut_small, kernel_tile, make_case, results
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.attention import reference, row_block
from lengthwise.attention.call import Call, checked_call
from lengthwise.attention.row_block import far_keys, tiles
from lengthwise.bias import DistanceBias, FunctionBias, LevelBias

KEYS, DIM = 601, 17
AT = torch.arange(KEYS)
ORDINARY = torch.tensor([0.9, 0.5, 0.7])
ONE_STEEP_HEAD = torch.tensor([0.001, 2.0, 0.0])
SMALL = 2.0**-25
"""What a row may lose, relative to the sum of the sizes of its terms, as proven in `row_block.far_keys`."""


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    cut_small(monkeypatch)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request, monkeypatch):
    """float64 skips what float32 would: it shows the loss itself, which in float32 hides in rounding."""
    monkeypatch.setattr(far_keys, "SMALL", SMALL / torch.finfo(request.param).eps)
    return request.param


def ordinary() -> dict[str, Tensor]:
    torch.manual_seed(1)
    widths = {"q": DIM, "k": DIM, "v": VALUE, "d_out": VALUE}
    return {name: torch.randn(1, HEADS, KEYS, width) for name, width in widths.items()}


def steep(x: dict[str, Tensor], slopes: Tensor, dtype: torch.dtype, **masks: Any) -> Call:
    """ALiBi with given slopes; everything but the levels is learned."""
    q, k, v = (x[name].to(dtype, copy=True).requires_grad_() for name in "qkv")
    slope = slopes.to(dtype, copy=True).view(1, HEADS, 1).requires_grad_()
    return checked_call(q, k, v, bias=LevelBias(AT.double()[None, None], AT.double()[None, None], slope), **masks)


def falling_table(x: dict[str, Tensor], slopes: Tensor, dtype: torch.dtype, **masks: Any) -> Call:
    """The same as a learned table."""
    table = (-slopes[:, None] * AT).to(dtype).requires_grad_()
    return replace(steep(x, slopes, dtype, **masks), bias=DistanceBias(table, AT, AT))


def sizes_of_terms(call: Call, d_out: Tensor) -> list[Tensor]:
    """For every row of the output and of the gradients: the sum of the sizes of the terms it is made of."""
    q, k, v = (x.detach().double().nan_to_num(0, 0, 0) for x in (call.q, call.k, call.v))
    with torch.no_grad():
        weights = reference.explain(replace(call, q=q, k=k, v=v)).weights.double()
    q, k, v, up = (x.double().norm(dim=-1)[..., None] for x in (q, k, v, d_out))
    out = weights @ v
    d_scores = weights * up * (v.transpose(2, 3) + out)
    d_q, d_k, d_v = call.scale * d_scores @ k, call.scale * d_scores.transpose(2, 3) @ q, weights.transpose(2, 3) @ up
    if isinstance(call.bias, LevelBias):
        # The gradient of a slope: every term times its distance; the row's own key, at 0, counts as 1 / slope;
        # under a slope of 0 nothing is skipped.
        slope = call.bias.slope.detach().double()[..., None]
        of_bias = (d_scores * ((AT[:, None] - AT).abs() + torch.where(slope > 0, 1 / slope, 0))).sum((2, 3))[..., None]
    else:
        of_bias = d_scores.sum((0, 2, 3))[:, None]
    return [out, d_q, _largest_in_block(d_k), _largest_in_block(d_v), of_bias]


def _largest_in_block(x: Tensor) -> Tensor:
    """Keys are bounded in blocks: what one may lose is measured by the one of its block that has most."""
    blocks = F.pad(x, (0, 0, 0, -KEYS % far_keys.WIDTH)).unflatten(2, (-1, far_keys.WIDTH))
    return blocks.amax(3, keepdim=True).expand_as(blocks).flatten(2, 3)[:, :, :KEYS]


def assert_nothing_that_matters_is_skipped(call: Call, d_out: Tensor) -> None:
    """With and without skipping, no row differs by more than is proven.

    With A the sum of the sizes of a row's terms: leaving terms out costs SMALL A. The weights that stay are larger by
    1 + SMALL, another SMALL A. Both change the output, by 2 SMALL A, and d_out . out with it, which every weight's
    gradient has in it, so that gradients lose 4 SMALL A. Two sums of n terms in different order differ by about
    sqrt(n) roundings.
    """
    assert call.bias is not None
    learned = [call.q, call.k, call.v, *(x for x in call.bias.sources if x.requires_grad)]
    on = results(row_block.attend, call, learned, d_out)
    with row_block.skipping(False):
        off = results(row_block.attend, call, learned, d_out)
    allowed = 4 * SMALL + torch.finfo(call.dtype).eps * KEYS**0.5
    for x, y, terms in zip(on, off, sizes_of_terms(call, d_out), strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.isinf(), y.isinf())
        difference = torch.where(y.isfinite(), x - y, 0).double().norm(dim=-1, keepdim=True)
        assert (difference <= allowed * terms).all()


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
    call = replace(call, bias=FunctionBias(watched, call.bias.tensors))
    results(row_block.attend, call, learned, torch.randn(2, HEADS, 307, VALUE))
    assert max(asked) <= tiles.ROWS * tiles.COLUMNS


# Functions are left out: their gradient runs in torch.func, whose tensors a dispatch mode cannot look into.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("dense", "function")])
def test_no_tensor_has_queries_times_keys_elements(kind):
    keys = 521
    call, learned = make_case(kind, keys=keys, batch=1).call(torch.float32)
    with Largest() as largest:
        results(row_block.attend, call, learned, torch.randn(1, HEADS, keys, VALUE))
    assert largest.found < keys * keys / 4
