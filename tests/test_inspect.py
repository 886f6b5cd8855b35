"""Position maps of Lengthwise models: they are what the encodings define and what the models compute."""

import math

import pytest
import torch
from model_kit import CASES, LENGTH, RESCORING, loud_model, make_config, tokens
from torch import Tensor

import lengthwise as lw
from lengthwise.inspect import capture_attention, position_maps, position_views
from lengthwise.inspect.model_maps import position_records
from lengthwise.inspect.summarize import MapOptions, layer_maps
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.views.maps import QUANTITIES

CONTEXT_FREE = [
    "alibi",
    "kerple",
    "kerple-power",
    "sandwich",
    "bam",
    "alibi-2d",
    "swin",
    "fire",
    "fire-short",
    "t5",
    "t5-clamped",
]
CONTEXTUAL = [
    "cable",
    "cable-nw",
    "k-cable",
    "fox",
    "grape-a",
    "cope",
    "dape",
    "dapev2",
    "dapev2-cable",
    "stick-breaking",
    "path",
]
CONTEXTUAL += ["shaw", "transformer-xl", "deberta", "inkling"]
WITHOUT_BIAS = [case for case in CASES if case not in CONTEXT_FREE + CONTEXTUAL]


@pytest.mark.parametrize("case", CASES)
def test_bias_plus_content_are_the_scores_and_their_softmax_the_models_own_weights(case):
    model = loud_model(case)
    views = position_views(model, tokens(1), "all")
    own = model(tokens(1), output_attentions=True).attentions
    bias = views["bias"].values if "bias" in views else 0
    # Loud weights make scores of a few hundred: their rounding, relative to the largest, is what may differ.
    largest = float(views["scores"].values.nan_to_num().abs().max())
    tolerance = 8 * torch.finfo(torch.float32).eps * largest
    torch.testing.assert_close(
        bias + views["content"].values, views["scores"].values, atol=tolerance, rtol=0, equal_nan=True
    )
    weights = views["weights"].values.nan_to_num()
    expected = torch.cat(own) if len(own) > 1 else own[0][0]
    torch.testing.assert_close(weights, expected, atol=4 * tolerance, rtol=1e-4)


def test_alibi_has_the_minima_of_the_papers_figure_12():
    model = LengthwiseForCausalLM(make_config("alibi", n_head=12, n_embd=48))
    maps = position_maps(model, tokens(1, length=512))
    least = [-511 * 2 ** (-8 * head / 12) for head in range(1, 13)]
    found = maps.values.nan_to_num().flatten(1).amin(1)
    torch.testing.assert_close(found, torch.tensor(least), atol=0, rtol=2e-7)
    said = ["-321.9", "-202.8", "-127.8", "-80.5", "-50.7", "-31.9", "-20.1", "-12.7", "-8.0", "-5.0", "-3.2", "-2.0"]
    assert [f"{value:.1f}" for value in found.tolist()] == said
    assert (maps.values.diagonal(dim1=-2, dim2=-1) == 0).all()


@pytest.mark.parametrize("case", CONTEXT_FREE)
def test_a_bias_of_positions_alone_does_not_follow_the_tokens_and_is_kept_described(case):
    for batch in (1, 3):
        maps = position_maps(loud_model(case), tokens(batch), "all")
        assert (maps.context_dependence == 0).all()
        assert all(one.described is not None and one.tiles is None for one in maps.maps)
    uniform = (maps.diagonal_spread == 0).all()
    flat = case not in ("fire-short", "alibi-2d", "swin")
    assert uniform == flat, "beyond its L fire is not uniform along diagonals, and a grid has rows"


@pytest.mark.parametrize("case", CONTEXTUAL)
def test_a_bias_that_follows_the_tokens_says_so_once_two_sequences_are_seen(case):
    model = loud_model(case)
    assert position_maps(model, tokens(1)).context_dependence.isnan().all()
    maps = position_maps(model, tokens(3))
    assert (maps.context_dependence > 0.01).any()
    assert (maps.diagonal_spread > 0.01).any()


@pytest.mark.parametrize("case", WITHOUT_BIAS)
def test_a_model_without_a_bias_offers_scores_and_profile(case):
    model = loud_model(case)
    with pytest.raises(ValueError, match=r"adds none \(it has '.*'\).*quantity='scores'.*quantity='profile'"):
        position_maps(model, tokens(1))
    assert set(position_views(model, tokens(1))) == {"content", "scores", "weights", "profile"}


def by_loops(values: list[Tensor]) -> tuple[list[float], list[float], float, float]:
    """Mean and spread by distance, spread along diagonals, spread over sequences, of (query, key) maps of one head."""
    length = len(values[0])
    means, spreads, within = [], [], []
    for distance in range(length):
        diagonals = [[float(x[i, i - distance]) for i in range(distance, length)] for x in values]
        every = [value for diagonal in diagonals for value in diagonal]
        mean = sum(every) / len(every)
        means.append(mean)
        spreads.append(math.sqrt(sum((value - mean) ** 2 for value in every) / len(every)))
        for diagonal in diagonals:
            own = sum(diagonal) / len(diagonal)
            within += [(value - own) ** 2 for value in diagonal]
    between = [torch.stack([x[i, j] for x in values]).var() for i in range(length) for j in range(i + 1)]
    return means, spreads, math.sqrt(sum(within) / len(within)), math.sqrt(sum(between) / len(between))


@pytest.mark.parametrize("quantity", ["bias", "scores"])
def test_profile_and_spreads_are_those_of_plain_loops(quantity):
    model, ids = loud_model("cable"), tokens(3, length=13)
    maps = position_maps(model, ids, quantity=quantity, shown="first")
    values = [position_maps(model, row[None], quantity=quantity).values.double() for row in ids]
    for head in range(3):
        mean, spread, diagonals, context = by_loops([x[head] for x in values])
        one = maps.maps[0]
        torch.testing.assert_close(one.profile.mean[head], torch.tensor(mean), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.profile.spread[head], torch.tensor(spread), rtol=1e-4, atol=1e-4)
        assert float(one.diagonal_spread[head]) == pytest.approx(diagonals, rel=1e-5)
        assert float(one.context_dependence[head]) == pytest.approx(context, rel=1e-5)


def test_many_blocks_give_what_one_gives(monkeypatch):
    model, ids = loud_model("cable"), tokens(2)
    whole = position_views(model, ids, resolution=5)
    monkeypatch.setattr("lengthwise.views.tiles.BLOCK", 500)
    for quantity, maps in position_views(model, ids, resolution=5).items():
        one, other = whole[quantity].maps[0], maps.maps[0]
        torch.testing.assert_close(one.profile.mean, other.profile.mean)
        torch.testing.assert_close(one.diagonal_spread, other.diagonal_spread)
        torch.testing.assert_close(one.context_dependence, other.context_dependence)
        if one.tiles is not None:
            torch.testing.assert_close(one.tiles.mean, other.tiles.mean, equal_nan=True)


@pytest.mark.parametrize("case", ["cable", "kerple", "dapev2"])
def test_many_threads_give_what_one_gives_bit_by_bit_and_leave_torchs_own_number_alone(case, monkeypatch):
    model, ids = loud_model(case), tokens(2)
    monkeypatch.setattr("lengthwise.inspect.summarize.CACHED", 1)  # every head by itself
    record = position_records(model, ids)[-1]
    before, maps = torch.get_num_threads(), {}
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            maps[threads] = layer_maps(record, QUANTITIES, MapOptions("first", 5))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for quantity, single in maps[1].items():
        other = maps[3][quantity]
        assert torch.equal(single.profile.mean, other.profile.mean)
        assert torch.equal(single.diagonal_spread, other.diagonal_spread)
        assert torch.equal(single.context_dependence, other.context_dependence)
        if single.tiles is not None:
            assert torch.equal(single.tiles.mean.nan_to_num(), other.tiles.mean.nan_to_num())


@pytest.mark.parametrize("case", ["kerple", "t5", "alibi"])
def test_statistics_of_scores_that_are_shifted_content_are_those_of_the_scores_alone(case):
    model, ids = loud_model(case), tokens(3)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    together = position_views(model, ids, "all", attention_mask=mask)
    for quantity in ("scores", "profile"):
        alone = position_maps(model, ids, "all", quantity, attention_mask=mask)
        for single, other in zip(together[quantity].maps, alone.maps, strict=True):
            largest = float(other.profile.mean.nan_to_num().abs().max())
            tolerance = 16 * torch.finfo(torch.float32).eps * largest
            torch.testing.assert_close(single.profile.mean, other.profile.mean, atol=tolerance, rtol=1e-5)
            torch.testing.assert_close(single.profile.spread, other.profile.spread, atol=tolerance, rtol=1e-5)
            torch.testing.assert_close(single.diagonal_spread, other.diagonal_spread)
            torch.testing.assert_close(single.context_dependence, other.context_dependence)


def test_tiles_are_means_and_extremes_of_the_pairs_that_may_meet():
    model = loud_model("cable")
    full = position_maps(model, tokens(1), quantity="scores").values
    tiles = position_maps(model, tokens(1), quantity="scores", resolution=5).maps[0].tiles
    assert tiles.pool == 6
    assert tiles.mean.shape == (3, 5, 5)
    for row in range(5):
        for column in range(5):
            part = full[:, 6 * row : 6 * row + 6, 6 * column : 6 * column + 6].flatten(1)
            kept = part[:, ~part[0].isnan()]
            if column > row:
                assert tiles.mean[:, row, column].isnan().all()
                continue
            torch.testing.assert_close(tiles.mean[:, row, column], kept.mean(1), rtol=1e-5, atol=1e-4)
            assert (tiles.least[:, row, column] == kept.amin(1)).all()
            assert (tiles.greatest[:, row, column] == kept.amax(1)).all()


def test_the_mean_map_is_the_mean_of_the_maps():
    model, ids = loud_model("fox"), tokens(3)
    rows = torch.stack([position_maps(model, row[None]).values for row in ids])
    torch.testing.assert_close(position_maps(model, ids).values, rows.mean(0), equal_nan=True)
    torch.testing.assert_close(position_maps(model, ids, shown="first").values, rows[0], equal_nan=True)


def test_padding_is_not_counted():
    model, ids = loud_model("cable").double(), tokens(2)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    padded = position_maps(model, ids, quantity="scores", attention_mask=mask, shown="first")
    alone = [position_maps(model, ids[:1], quantity="scores"), position_maps(model, ids[1:, 7:], quantity="scores")]
    count = torch.arange(LENGTH, 0, -1)
    other = (count - 7).clamp(min=0)
    means = [one.maps[0].profile.mean for one in alone]
    expected = (means[0] * count + torch.nn.functional.pad(means[1], (0, 7)) * other) / (count + other)
    # Computed in float64, so what differs is each mean's one rounding to float32 and the four steps of the line above.
    tolerance = 4 * torch.finfo(torch.float32).eps * float(torch.cat(means, 1).abs().max())
    torch.testing.assert_close(padded.maps[0].profile.mean, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", ["alibi", "t5", "fire", "cable"])
def test_a_bias_is_drawn_where_padding_hides_no_key(case):
    model, ids = loud_model(case), tokens(2)
    mask = torch.ones_like(ids)
    mask[:, :7] = 0
    views = position_views(model, ids, attention_mask=mask, shown="first")
    bias, scores = views["bias"], views["scores"]
    assert bias.values[:, :, :7].isnan().all()
    assert torch.equal(bias.values.isnan(), scores.values.isnan())
    assert torch.equal(bias.maps[0].profile.mean.isnan(), scores.maps[0].profile.mean.isnan())
    torch.testing.assert_close(bias.values + views["content"].values, scores.values, equal_nan=True)


@pytest.mark.parametrize("context_free", [True, False])
def test_a_bias_of_one_row_for_all_heads_is_that_of_every_head(context_free):
    class OneRow(lw.Encoding):
        paper = "unpublished"
        kind = lw.DistanceBias

        def bias(self, x, layout, state=None):
            return lw.DistanceBias(torch.arange(0.0, -LENGTH, -1)[None], layout.query, layout.key)

    OneRow.context_free = context_free
    lw.register("one-row", OneRow)
    try:
        model = LengthwiseForCausalLM(make_config("none", encoding="one-row"))
        several = [position_views(model, tokens(2), shown="first")["bias"], position_maps(model, tokens(2))]
    finally:
        del lw.ENCODINGS["one-row"]
    for maps in several:
        assert maps.values.shape == (3, LENGTH, LENGTH)
        assert (maps.values[:, -1] == torch.arange(1.0 - LENGTH, 1)).all()
        assert maps.maps[0].profile.mean.shape == (3, LENGTH)
        assert len([axes for axes in maps.figure().axes if axes.get_title()]) == 3


def test_the_kernel_of_a_rotary_head_is_its_score_where_all_tokens_are_one():
    model, same = loud_model("rope-dynamic").double(), torch.full((1, LENGTH), 7)
    views = position_views(model, same, 0, ["scores", "profile"])
    (record,) = position_records(model, same)
    # Three angles, of the query, the key and their distance, below LENGTH and rounded to float32 by half an eps each,
    # and as much for a cosine: a score moves by these times |q| |k|. All else is float64.
    most = record.scale * float(record.q.norm(dim=-1).max() * record.k.norm(dim=-1).max())
    tolerance = 1.5 * (LENGTH + 1) * torch.finfo(torch.float32).eps * most
    expected = views["scores"].values[:, -1].flip(-1)
    torch.testing.assert_close(views["profile"].maps[0].kernel, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("quantity", ["bias", "scores"])
def test_layers_come_in_the_given_order_and_a_model_is_left_as_it_was(quantity):
    model = loud_model("kerple").train()
    own = model.config._attn_implementation
    maps = position_maps(model, tokens(1), [1, 0], quantity)
    assert maps.layers == (1, 0)
    assert maps.values.shape == (2, 3, LENGTH, LENGTH)
    assert model.training
    assert model.config._attn_implementation == own
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("attention", ["lengthwise", "eager", "sdpa"])
@pytest.mark.parametrize("case", ["alibi", "cable", "rope-dynamic", "learned", "dapev2"])
def test_capturing_changes_no_bit_of_what_a_model_computes(case, attention):
    model = loud_model(case)
    if attention == "sdpa" and case in RESCORING:
        pytest.skip("stock kernels cannot rescore")
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    records = []
    with torch.no_grad():
        expected = model(tokens(2)).logits
        with capture_attention(model, records.append):
            captured = model(tokens(2)).logits
    assert torch.equal(captured, expected)
    assert [record.layer for record in records] == list(range(model.config.n_layer))


@pytest.mark.parametrize("case", CONTEXT_FREE)
def test_a_bias_that_needs_no_forward_pass_is_the_one_of_a_forward_pass(case):
    model = loud_model(case)
    alone = position_maps(model, tokens(3), "all", shown="first")
    beside = position_views(model, tokens(3), "all", shown="first")["bias"]
    assert torch.equal(alone.values.nan_to_num(), beside.values.nan_to_num())
    for single, other in zip(alone.maps, beside.maps, strict=True):
        assert torch.equal(single.profile.mean, other.profile.mean)
        assert torch.equal(single.context_dependence, other.context_dependence)
        assert torch.equal(single.diagonal_spread, other.diagonal_spread)


def test_a_logit_scale_and_a_sink_are_part_of_what_is_captured():
    class Scaled(lw.Encoding):
        paper = "unpublished"
        kind = lw.LevelBias

        def bias(self, x, layout, state=None):
            level = layout.query.double()[:, None]
            return lw.LevelBias(level, level, torch.full((1, 3, 1), 0.5))

        def logit_scale(self, x, layout):
            return layout.query.float().add(1).log1p()[:, None]

        def sink(self, x):
            return torch.tensor([0.5, -1.0, 2.0])

    lw.register("scaled", Scaled)
    try:
        model = LengthwiseForCausalLM(make_config("none", encoding="scaled"))
        views = position_views(model, tokens(2), shown="first")
        own = model(tokens(2), output_attentions=True).attentions[-1][0]
    finally:
        del lw.ENCODINGS["scaled"]
    weights = views["weights"].values.nan_to_num()
    torch.testing.assert_close(weights, own)
    assert (weights.sum(-1) < 1).all()
    torch.testing.assert_close(views["bias"].values + views["content"].values, views["scores"].values, equal_nan=True)
    assert views["bias"].maps[0].tiles is not None


@pytest.mark.parametrize("case", ["alibi", "cable", "rope-dynamic", *RESCORING])
def test_half_precision_models_are_looked_into_as_they_are(case):
    model = loud_model(case).to(torch.bfloat16)
    views = position_views(model, tokens(2))
    assert all(maps.maps[0].profile.mean.dtype == torch.float32 for maps in views.values())


def test_an_encoding_of_ones_own_is_seen_like_any_other_and_its_bias_is_left_alone():
    own = torch.full((1, 3, LENGTH, LENGTH), 0.5)

    class Half(lw.Encoding):
        paper = "unpublished"
        kind = lw.DenseBias

        def bias(self, x, layout, state=None):
            return lw.DenseBias(own)

    lw.register("half", Half)
    try:
        views = position_views(LengthwiseForCausalLM(make_config("none", encoding="half")), tokens(2))
    finally:
        del lw.ENCODINGS["half"]
    assert (views["bias"].values.nan_to_num(0.5) == 0.5).all()
    assert views["bias"].maps[0].tiles is not None
    assert (own == 0.5).all()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"layer": 2}, "layer must be an int from -2 to 1, since there are 2, got 2"),
        ({"layer": []}, "layer must name at least one layer"),
        ({"layer": "last"}, "layer must be 'all', got 'last'"),
        ({"quantity": "biases"}, "quantity must be 'bias' or 'content'"),
        ({"shown": "second"}, "shown must be 'first' or 'mean'"),
        ({"part": "encoder"}, "one kind of attention.*got 'encoder'"),
        ({"resolution": 0}, "resolution must be a positive int"),
        ({"decoder_input_ids": torch.ones(1, 3, dtype=torch.long)}, "decoder_input_ids are for models with an encoder"),
        ({"attention_mask": torch.ones(1, 3, dtype=torch.long)}, "attention_mask must be"),
    ],
)
def test_a_wish_that_cannot_be_met_is_answered_with_what_can(asked, words):
    with pytest.raises(ValueError, match=words):
        position_maps(loud_model("alibi"), tokens(1), **asked)


def test_text_of_no_tokens_or_of_too_many_is_refused():
    with pytest.raises(ValueError, match="must hold at least one token"):
        position_maps(loud_model("alibi"), torch.ones(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match=r"takes at most 64 tokens.*got 65.*Cut them"):
        position_maps(loud_model("learned"), tokens(1, length=65), quantity="scores")
    with pytest.raises(TypeError, match="input_ids must be an integer tensor"):
        position_maps(loud_model("alibi"), torch.ones(1, 4))


def test_every_number_of_a_pooled_map_is_refused_with_the_way_to_get_it():
    maps = position_maps(loud_model("cable"), tokens(1), quantity="scores", resolution=10)
    with pytest.raises(ValueError, match=r"tiles of 3 x 3.*resolution=29"):
        maps.values  # noqa: B018
    with pytest.raises(ValueError, match=r"got a profile; draw it with curves"):
        position_maps(loud_model("cable"), tokens(1), quantity="profile").figure()
