"""Encodings on a grid: their formulas in loops, the authors' and transformers' own, and both forms of positions."""

import cmath
import itertools
import math

import pytest
import torch
from transformers.models.swin import modeling_swin
from witness import assert_refuses, assert_same, make, numbers

import lengthwise as lw

HEADS, DIM, ROWS, COLUMNS = 2, 12, 3, 4
TOKENS, WIDTH = ROWS * COLUMNS, HEADS * DIM
EPS32 = torch.finfo(torch.float32).eps
CELLS = torch.tensor([[row, column] for row in range(ROWS) for column in range(COLUMNS)])[None]


def grid(name, **options):
    """In float64, every parameter a random number."""
    return make(name, heads=HEADS, width=WIDTH, head_dim=DIM, columns=COLUMNS, causal=False, **options)


def layouts():
    """The same tokens by rows and columns, and counted along the rows."""
    return lw.TokenLayout.of(CELLS, causal=False), lw.layout(TOKENS, causal=False)


def queries_and_keys():
    generator = torch.Generator().manual_seed(6)
    return torch.randn(2, 1, HEADS, TOKENS, DIM, dtype=torch.float64, generator=generator).unbind()


@pytest.mark.parametrize("name", ["axial-rope", "mixed-rope"])
def test_rope_on_a_grid_turns_by_columns_and_rows(name):
    encoding = grid(name)
    q, k = queries_and_keys()
    learned = numbers(encoding.direction) if name == "mixed-rope" else None

    def angle(h, token, pair):
        row, column = CELLS[0, token].tolist()
        if learned:
            return row * learned[h][0][pair] + column * learned[h][1][pair]
        return column * 100 ** (-4 * pair / DIM) if pair < DIM // 4 else row * 100 ** (-4 * (pair - DIM // 4) / DIM)

    for layout in layouts():
        turned = [x.detach() for x in encoding.rotate(q, k, layout)]
        for h, i, j in itertools.product(range(HEADS), range(TOKENS), range(TOKENS)):
            expected = 0.0
            for pair in range(DIM // 2):
                a, b = (complex(*x[0, h, t, 2 * pair : 2 * pair + 2].tolist()) for x, t in ((q, i), (k, j)))
                expected += (a * cmath.exp(1j * (angle(h, i, pair) - angle(h, j, pair))) * b.conjugate()).real
            size = float(q[0, h, i].norm() * k[0, h, j].norm())
            # Two float32 angles of a few radians, each off by ten roundings.
            assert (
                abs(float(turned[0][0, h, i].detach() @ turned[1][0, h, j].detach()) - expected)
                <= 2 * 10 * 6 * EPS32 * size
            )


def test_mixed_rope_starts_with_the_authors_directions():
    torch.manual_seed(3)
    encoding = lw.make("mixed-rope", heads=HEADS, width=WIDTH)
    torch.manual_seed(3)
    angle = 2 * math.pi * torch.rand(HEADS, 1)
    size = 10.0 ** (-torch.arange(0, DIM, 4) / DIM)
    by_column = torch.cat([size * angle.cos(), size * (math.pi / 2 + angle).cos()], -1)
    by_row = torch.cat([size * angle.sin(), size * (math.pi / 2 + angle).sin()], -1)
    assert_same(encoding.direction.detach(), torch.stack([by_row, by_column], 1), roundings=20, scale=1.0)


def test_alibi_on_a_grid_falls_with_the_distance_in_the_plane():
    encoding = lw.make("alibi-2d", heads=3, width=WIDTH, columns=COLUMNS, causal=False)
    slopes = [2**-4, 2**-8, 2**-2]
    for layout in layouts():
        dense = encoding.bias(torch.zeros(1, TOKENS, WIDTH), layout).dense()
        for h, i, j in itertools.product(range(3), range(TOKENS), range(TOKENS)):
            wanted = -slopes[h] * math.dist(CELLS[0, i].tolist(), CELLS[0, j].tolist())
            assert float(dense[0, h, i, j]) == pytest.approx(wanted, rel=2 * EPS32)


def test_swins_table_is_transformers_own():
    theirs = modeling_swin.SwinRelativePositionBias(HEADS, (ROWS, COLUMNS))
    torch.nn.init.normal_(theirs.relative_position_bias_table)
    encoding = lw.make("swin", heads=HEADS, width=WIDTH, rows=ROWS, columns=COLUMNS, causal=False)
    encoding.table.data.copy_(theirs.relative_position_bias_table)
    for layout, kind in zip(layouts(), (lw.DistanceBias, lw.FunctionBias), strict=True):
        bias = encoding.bias(torch.zeros(1, TOKENS, WIDTH), layout)
        assert type(bias) is kind
        assert torch.equal(bias.dense(), theirs())


@pytest.mark.parametrize("name", ["axial-rope", "mixed-rope", "alibi-2d", "swin"])
def test_attention_over_cells_is_attention_over_counted_positions(name):
    encoding = lw.make(name, heads=HEADS, width=WIDTH, train_length=TOKENS, columns=COLUMNS, causal=False)
    x = torch.randn(1, TOKENS, WIDTH)
    outs = []
    for layout in layouts():
        q, k = (z.float() for z in queries_and_keys())
        q, k = encoding.rotate(q, k, layout)
        outs.append(lw.attend(q, k, k, layout=layout, bias=encoding.bias(x, layout)))
    assert_same(outs[0].detach(), outs[1].detach(), roundings=8 * TOKENS, scale=4.0)


def test_positions_that_do_not_fit_are_refused():
    cells, x = lw.TokenLayout.of(CELLS, causal=False), torch.zeros(1, TOKENS, WIDTH)
    q, k = queries_and_keys()
    sizes = {"heads": HEADS, "width": WIDTH, "causal": False}
    for encoding in (lw.make("rope", **sizes), lw.make("xpos", **sizes | {"causal": True})):
        assert_refuses(lambda encoding=encoding: encoding.rotate(q, k, cells), ValueError, "axial-rope", "2)")
    assert_refuses(lambda: lw.make("kerple", **sizes).bias(x, cells), ValueError, "swin", "2)")
    cubes = lw.TokenLayout.of(torch.zeros(1, TOKENS, 3, dtype=torch.long), causal=False)
    assert_refuses(lambda: lw.make("axial-rope", **sizes).rotate(q, k, cubes), ValueError, "rows and columns", "3)")
    small = lw.make("swin", rows=2, columns=4, **sizes)
    assert_refuses(lambda: small.bias(x, cells), lw.PositionError, "8 cells", "row 2")
    assert_refuses(lambda: lw.make("swin", rows=0, **sizes), ValueError, "rows", "0")
