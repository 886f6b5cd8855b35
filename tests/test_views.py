"""Pictures and files of position maps, looked at as a reader would."""

import io
import math
import xml.etree.ElementTree
from dataclasses import replace
from itertools import combinations

import matplotlib
import numpy
import pytest
import torch
from model_kit import loud_model, tokens
from PIL import Image
from safetensors.torch import save_file

import lengthwise as lw
from lengthwise.bias import DistanceBias, LevelBias
from lengthwise.inspect import load_maps, position_maps, position_views
from lengthwise.inspect.summarize import bias_map
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.views import LayerMap, PositionMaps, Profile
from lengthwise.views.estimates_plot import NOT_JUDGED, Estimate, estimates_figure
from lengthwise.views.figures import compare
from lengthwise.views.line_plot import Line, lines_figure
from lengthwise.views.step_plot import step_plot
from lengthwise.views.style import colour_scale, format_number, in_few_colours, png, save_picture
from lengthwise.views.tiles import tiles_of

KINDS = ["alibi", "kerple", "fire-short", "cable", "k-cable", "rope-dynamic", "dapev2-cable"]


def alibi_maps(length: int = 512, heads: int = 12) -> PositionMaps:
    """ALiBi's maps without a model."""
    level = torch.arange(length, dtype=torch.float64)[None, None]
    slope = torch.tensor([2 ** (-8 * h / heads) for h in range(1, heads + 1)])
    mean = -slope[:, None] * torch.arange(length)
    one = LayerMap(
        layer=11,
        queries=length,
        keys=length,
        causal=True,
        described=LevelBias(level, level, slope[None, :, None]),
        tiles=None,
        profile=Profile(0, mean, torch.zeros_like(mean)),
        context_dependence=torch.zeros(heads),
        diagonal_spread=torch.zeros(heads),
    )
    return PositionMaps(model="GPT-2 Small", encoding="alibi", quantity="bias", maps=(one,))


def panels(figure):
    return [axes for axes in figure.axes if axes.get_title()]


def test_the_grid_is_the_papers():
    figure = alibi_maps().figure()
    found = panels(figure)
    assert [axes.get_title() for axes in found] == [f"Head {n}" for n in range(1, 13)]
    least = [-321.9, -202.8, -127.8, -80.5, -50.7, -31.9, -20.1, -12.7, -8.0, -5.0, -3.2, -2.0]
    for axes, expected in zip(found, least, strict=True):
        assert axes.get_xticks().tolist() == axes.get_yticks().tolist() == [0, 100, 200, 300, 400, 500]
        assert axes.yaxis_inverted(), "queries go down"
        (image,) = axes.images
        assert image.norm.vmax == 0
        assert round(image.norm.vmin, 1) == expected
        drawn = image.get_array()
        assert drawn.mask[0, 1:].all(), "the future is left white"
        assert not drawn.mask[-1].any()
    figure.canvas.draw()
    bars = [axes for axes in figure.axes if not axes.get_title()]
    labels = [label.get_text() for label in bars[0].get_yticklabels()]
    assert "\N{MINUS SIGN}300" in labels
    assert not any("-" in label for label in labels)


def test_figure_12_has_the_ranges_and_the_ticks_that_the_paper_prints():
    alibi = lw.make("alibi", heads=12, width=768)
    one = bias_map(alibi.bias(torch.zeros(1, 512, 768), lw.layout(512)), 11, causal=True)
    maps = PositionMaps(model="GPT-2 Small", encoding="alibi", quantity="bias", maps=(one,))
    figure = maps.paper_figure(caption="Figure 12. " + "Words of a caption. " * 20)
    figure.canvas.draw()
    shown, bars = panels(figure), [axes for axes in figure.axes if not axes.get_title()]
    assert [axes.get_title() for axes in shown] == [f"Head {n}" for n in range(1, 13)]
    assert len({round(axes.get_position().x0, 6) for axes in shown}) == 3
    assert len({round(axes.get_position().y0, 6) for axes in shown}) == 4
    least = [-321.9, -202.8, -127.8, -80.5, -50.7, -31.9, -20.1, -12.7, -8.0, -5.0, -3.2, -2.0]
    steps = [50, 25, 20, 10, 10, 5, 2.5, 2, 1, 1, 0.5, 0.25]
    for axes, bar, low, step in zip(shown, bars, least, steps, strict=True):
        assert axes.get_xticks().tolist() == axes.get_yticks().tolist() == [0, 100, 200, 300, 400, 500]
        assert (round(bar.get_ylim()[0], 1), bar.get_ylim()[1]) == (low, 0)
        ticks = [tick for tick in bar.get_yticks() if low - 0.05 <= tick <= 0]
        assert ticks == pytest.approx([-step * n for n in reversed(range(len(ticks)))])
        assert low - 0.05 > ticks[0] - step, "the least tick is within a step of the end"
        assert not axes.texts
        assert not axes.get_xlabel()
        assert not axes.get_ylabel()
    lowest = min(axes.get_position().y0 for axes in shown)
    assert len(figure.texts) > 2
    for text in figure.texts:
        (left, bottom), (right, top) = text.get_window_extent().transformed(figure.transFigure.inverted()).get_points()
        assert 0 < left < right < 1
        assert 0 < bottom < top < lowest


def test_the_papers_colours_end_at_the_least_and_the_greatest():
    values = numpy.array([-1.5, 1.0])
    assert (colour_scale(values, about_zero=False).norm.vmin, colour_scale(values, about_zero=False).norm.vmax) == (
        -1.5,
        1.0,
    )


def test_one_range_may_be_shared_and_heads_chosen():
    figure = alibi_maps().figure(heads=[2, 11], shared=True)
    assert [axes.get_title() for axes in panels(figure)] == ["Head 3", "Head 12"]
    assert len({(axes.images[0].norm.vmin, axes.images[0].norm.vmax) for axes in panels(figure)}) == 1
    with pytest.raises(ValueError, match=r"Head 1 to Head 12 \(0 to 11 as indices\), got Head 13 \(index 12\)"):
        alibi_maps().figure(heads=[12])
    with pytest.raises(ValueError, match="heads must name at least one head"):
        alibi_maps().figure(heads=[])


@pytest.mark.parametrize("heads", [1, 5, 13])
def test_any_number_of_heads_has_its_panels(heads):
    assert len(panels(alibi_maps(41, heads).figure())) == heads


@pytest.mark.parametrize("form", ["png", "svg", "pdf"])
def test_pictures_are_small_files_that_do_not_grow_with_the_square_of_the_length(form, tmp_path):
    sizes = {}
    for length in (512, 2048):
        path = save_picture(alibi_maps(length, 2).figure(), tmp_path / f"{length}.{form}")
        sizes[length] = path.stat().st_size
    assert sizes[512] < 100_000
    assert sizes[2048] < 1.5 * sizes[512]
    if form == "svg":
        xml.etree.ElementTree.parse(path)


def test_the_same_picture_is_the_same_bytes(tmp_path):
    paths = [save_picture(alibi_maps(41, 2).figure(), tmp_path / f"{n}.svg") for n in range(2)]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_picture_in_few_colours_is_smaller_and_looks_the_same():
    whole = png(alibi_maps(100).figure())
    small = in_few_colours(whole)
    assert len(small) < len(whole) / 2
    first, second = (numpy.asarray(Image.open(io.BytesIO(one)).convert("RGB"), dtype=int) for one in (whole, small))
    # 256 colours of a map that has about as many: a step of viridis is 1/256 of the way from violet to yellow.
    assert abs(first - second).mean() < 2
    # No band in a colour bar: white, grey and black letters are among the 256, so that not every colour has its own.
    assert abs(first - second).max() <= 8


def test_a_picture_is_overwritten_only_by_force_and_only_in_a_format_that_can_be_written(tmp_path):
    figure = alibi_maps(41, 2).figure()
    path = save_picture(figure, tmp_path / "new" / "a.png")
    with pytest.raises(FileExistsError, match="--force"):
        save_picture(figure, path)
    save_picture(figure, path, force=True)
    with pytest.raises(ValueError, match=r"must end in .png, .svg, .pdf, got 'a.gif'"):
        save_picture(figure, tmp_path / "a.gif")
    (tmp_path / "b.png").mkdir()
    with pytest.raises(IsADirectoryError, match="got the folder"):
        save_picture(figure, tmp_path / "b.png", force=True)
    assert not list(tmp_path.rglob("*.part"))


def test_colours_are_two_about_zero_only_where_both_signs_matter():
    both, one, little = (torch.tensor(x).numpy() for x in ([-2.0, 1.0], [-2.0, 0.0], [-2.0, 0.01]))
    assert colour_scale(both).norm.vmin == -colour_scale(both).norm.vmax == -2
    assert (colour_scale(one).norm.vmin, colour_scale(one).norm.vmax) == (-2, 0)
    assert colour_scale(little).map.name == colour_scale(one).map.name == "viridis"
    assert colour_scale(both).masked != colour_scale(one).masked, "where white is 0 it cannot be masked as well"
    weights = colour_scale(torch.tensor([0.0, 0.003, 0.5]).numpy(), log=True).norm
    assert (weights.vmin, weights.vmax) == (0.5 / 10_000, 0.5)
    assert weights([0.0, 0.5]).tolist() == [0, 1]
    flat = colour_scale(torch.full((3,), -0.5).numpy()).norm
    assert flat.vmin < flat.vmax


def test_a_head_that_is_0_everywhere_is_white_and_said_to_be():
    maps = alibi_maps(41, 3)
    described = maps.maps[0].described
    some = replace(maps, maps=(replace(maps.maps[0], described=replace(described, slope=described.slope * 0)),))
    draws = (PositionMaps.figure, PositionMaps.paper_figure, PositionMaps.overview, lambda one: compare([maps, one]))
    for draw in draws:
        for one in (maps, some):
            texts = " ".join(text.get_text() for text in draw(one).texts).replace("\n", " ").lower()
            assert ("a head in white is 0 everywhere" in texts) == (one is some)
    for about_zero in (True, False):
        scale = colour_scale(numpy.zeros(3), about_zero=about_zero)
        assert scale.paint(numpy.zeros(1))[0, :3].min() > 240
        assert scale.paint(numpy.full(1, numpy.nan))[0, 0] < 230, "masked pairs are not white too"


def test_overview_curves_and_comparison_draw_every_head(tmp_path):
    views = [position_views(loud_model(case), tokens(2), "all") for case in ("cable", "rope-dynamic")]
    overview = views[0]["bias"].overview()
    assert [label.get_text() for label in overview.axes[0].get_yticklabels()] == ["Layer 1", "Layer 2"]
    curves = views[1]["profile"].curves(log=True)
    assert [len([line for line in axes.lines if line.get_label()[0] == "H"]) for axes in curves.axes] == [3, 3]
    both = compare([views[0]["bias"], views[1]["scores"]], heads=[1])
    assert [axes.get_title() for axes in panels(both)] == ["cable: bias, layer 2", "rope: scores, layer 1"]
    for number, figure in enumerate((overview, curves, both)):
        save_picture(figure, tmp_path / f"{number}.png")
    with pytest.raises(ValueError, match="the maps of at least one model"):
        compare([])


def in_tiles(maps: PositionMaps, pool: int, **changes: object) -> PositionMaps:
    """The same with tiles of pool x pool in the place of the bias."""
    (one,) = maps.maps
    tiles = tiles_of(one.described, -(-one.queries // pool), causal=True)
    return replace(maps, maps=(replace(one, described=None, tiles=tiles, **changes),))


def corner_numbers(figure) -> list[list[str]]:
    return [text.get_text().split("\n") for text in figure.axes[0].texts]


def test_layers_with_tiles_of_several_sizes_are_drawn_as_large_as_one_another():
    described = alibi_maps(300, 4)
    exact = in_tiles(described, 1, layer=3)
    for layers in ([described, exact], [exact, described]):
        figure = replace(described, maps=tuple(maps.maps[0] for maps in layers)).overview()
        sheet = figure.axes[0].images[0].get_array()
        assert sheet.shape[:2] == (2 * 306, 4 * 306)
        upper, lower = sheet[:300, :300].astype(int), sheet[306:606, :300].astype(int)
        # A tile of 3 x 3 on the diagonal has a colour where a part of it is masked.
        inside = numpy.tril(numpy.ones((300, 300), dtype=bool), -3)
        # A pair is two of 300 distances from a tile's mean at most: three of 256 colours, each near the next.
        steps = numpy.diff(matplotlib.colormaps["viridis"](range(256), bytes=True).astype(int), axis=0)
        assert abs(upper - lower)[inside].max() <= 3 * abs(steps).max()
        outside = numpy.triu(numpy.ones((300, 300), dtype=bool), 3)
        assert (upper[outside] == 255).all()
        assert (lower[outside] == 255).all()
        assert "each pixel: the mean of up to 3 x 3 pairs" in figure.texts[-1].get_text().replace("\n", " ")


def test_numbers_in_the_corners_of_an_overview_are_those_of_the_pairs_and_not_of_their_means():
    least = [-511 * 2 ** (-8 * head / 12) for head in range(1, 13)]
    numbers = corner_numbers(alibi_maps().overview())
    assert [high for high, _ in numbers] == ["0"] * 12
    assert [low for _, low in numbers] == [format_number(low) for low in least]


def test_an_overview_of_both_sides_has_no_corner_and_speaks_of_none():
    for causal in (True, False):
        bias = lw.make("alibi", heads=3, width=24).bias(torch.zeros(1, 41, 24), lw.layout(41, causal=causal))
        one = bias_map(bias, 0, causal=causal)
        figure = PositionMaps(model="x", encoding="alibi", quantity="bias", maps=(one,)).overview()
        assert ("in the corner" in figure.texts[-1].get_text()) == bool(figure.axes[0].texts) == causal


LONG = "a-folder-of-checkpoints/with_a_name_without_any_space_" + 3 * "that_is_long_" + " at its initial parameters"


@pytest.mark.parametrize("heads", [1, 3, 4, 12])
@pytest.mark.parametrize("draw", ["figure", "overview", "curves", "compare", "steps"])
def test_no_text_is_cut_at_the_edge_or_lies_on_another(heads, draw):
    maps = replace(alibi_maps(600, heads), model=LONG, sequences=3, encoding=",".join(["rope+self-extend:1024"] * 12))
    several = [maps, replace(maps, model=f"{LONG} 2")]
    drawn = {
        "figure": maps.figure,
        "overview": maps.overview,
        "curves": maps.curves,
        "compare": lambda: compare(several),
        "steps": lambda: step_plot({1: maps, 2: maps}),
    }
    figure = drawn[draw]()
    figure.canvas.draw()
    titles = [axes.title for axes in figure.axes if axes.get_title()]
    assert not overlap([*figure.texts, *titles], figure)
    panels_of = [axes.get_window_extent() for axes in figure.axes]
    assert not any(text.get_window_extent().overlaps(box) for text in figure.texts for box in panels_of)


@pytest.mark.parametrize("heads", [3, 24, 25, 32, 64])
def test_every_head_has_its_place_in_the_legend(heads):
    maps = alibi_maps(41, heads)
    for figure in (maps.curves(), compare([maps, maps])):
        figure.canvas.draw()
        (legend,) = [legend for axes in figure.axes if (legend := axes.get_legend()) is not None]
        assert [text.get_text() for text in legend.get_texts()] == [f"Head {head + 1}" for head in range(heads)]
        assert not overlap([legend, *panels(figure)], figure)


def test_models_with_other_heads_have_a_legend_of_their_own():
    figure = compare([alibi_maps(41, heads) for heads in (3, 12, 12)])
    legends = [axes.get_legend() for axes in panels(figure)]
    assert [legend and len(legend.get_texts()) for legend in legends] == [3, None, 12]
    figure.canvas.draw()
    boxes = [axes.get_window_extent() for axes in panels(figure)]
    assert not any(box.overlaps(legends[0].get_window_extent()) for box in boxes)


def test_a_comparison_shows_single_pairs_where_a_figure_does_and_says_where_it_does_not():
    for length, note in ((512, ""), (600, "each pixel: the mean of 2 x 2 pairs")):
        maps = alibi_maps(length, 3)
        figure, both = maps.figure(), compare([maps, maps])
        least, compared = ([axes.images[0].norm.vmin for axes in each.axes if axes.images] for each in (figure, both))
        assert compared == 2 * least
        for each in (figure, both, maps.paper_figure()):
            said = " ".join(text.get_text() for text in each.texts).replace("\n", " ").lower()
            assert ("each pixel" in said) == bool(note)
            assert note in said


def test_a_comparison_names_the_layer_that_it_shows():
    (one,) = alibi_maps(41, 3).maps
    maps = replace(alibi_maps(41, 3), encoding="rope:512,none", maps=(replace(one, layer=2), replace(one, layer=3)))
    titles = [axes.get_title() for axes in panels(compare([maps, maps.only(2)]))]
    assert titles == ["none: bias, layer 4", "rope:512: bias, layer 3"]


@pytest.mark.parametrize(
    ("diagonal", "context", "words"),
    [
        (0.0, 0.0, "the distance alone decides"),
        (0.5, 0.0, "the mean over all pairs of a distance, which depends on the position too"),
        (0.5, 0.5, "the mean over all pairs of a distance, which the tokens move"),
        (0.5, math.nan, "the mean over all pairs of a distance"),
    ],
)
def test_how_heads_moved_is_said_to_follow_the_tokens_only_where_they_do(diagonal, context, words):
    maps = alibi_maps(41, 4)
    spreads = {"diagonal_spread": torch.full((4,), diagonal), "context_dependence": torch.full((4,), context)}
    moved = replace(maps, maps=(replace(maps.maps[0], **spreads),))
    note = step_plot({0: maps, 5: moved}).texts[-1].get_text()
    assert note == f"each panel in a range of its own; {words}"


def test_numbers_of_a_hundred_and_more_are_written_out():
    maps = alibi_maps(41, 3)
    spreads = torch.tensor([234.5, 99.7, 99.4])
    figure = replace(maps, maps=(replace(maps.maps[0], diagonal_spread=spreads),)).figure()
    said = [axes.texts[0].get_text().split("\n")[1] for axes in panels(figure)]
    assert said == ["diagonals 234", "diagonals 100", "diagonals 99"]


def test_notes_of_large_numbers_are_short_and_beside_the_titles():
    bias = lw.make("alibi", heads=12, width=24).bias(torch.zeros(1, 41, 24), lw.layout(41, causal=False))
    one = replace(bias_map(bias, 0, causal=False), diagonal_spread=torch.full((12,), 3e38))
    figure = PositionMaps(model="x", encoding="alibi", quantity="bias", maps=(one,)).figure()
    figure.canvas.draw()
    assert not overlap([text for axes in panels(figure) for text in (axes.title, *axes.texts)], figure)
    assert "diagonals 3e38" in panels(figure)[0].texts[0].get_text()


def test_a_notebook_shows_maps_by_themselves():
    for maps in position_views(loud_model("kerple"), tokens(1), "all").values():
        assert maps._repr_png_().startswith(b"\x89PNG")


def test_hostile_token_and_model_names_are_drawn_as_they_are(tmp_path):
    config = LengthwiseConfig(vocab_size=101, n_embd=24, n_layer=1, n_head=3, n_positions=23, encoding="alibi")
    config.name_or_path = "$\\frac{<script>&"
    path = save_picture(position_maps(LengthwiseForCausalLM(config), tokens(1)).figure(), tmp_path / "a.svg")
    assert "<script>" not in path.read_text()
    texts = xml.etree.ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    assert any(config.name_or_path in (text.text or "") for text in texts)


@pytest.mark.parametrize("case", KINDS)
def test_saved_maps_come_back_as_they_were(case, tmp_path):
    for quantity, maps in position_views(loud_model(case), tokens(1), "all", tokens=["a", "<b>"]).items():
        again = load_maps(maps.save(tmp_path / "deep" / f"{quantity}.safetensors"))
        assert (again.title, again.tokens, again.layers) == (maps.title, ("a", "<b>"), maps.layers)
        for one, other in zip(maps.maps, again.maps, strict=True):
            assert type(one.described) is type(other.described)
            torch.testing.assert_close(one.profile.spread, other.profile.spread, equal_nan=True)
            assert (one.kernel is None) == (other.kernel is None)
        if quantity != "profile":
            torch.testing.assert_close(again.values, maps.values, equal_nan=True, rtol=0, atol=0)


def test_a_file_of_described_maps_grows_with_the_length_and_not_its_square(tmp_path):
    sizes = []
    for length in (500, 4000):
        model = LengthwiseForCausalLM(
            LengthwiseConfig(vocab_size=101, n_embd=24, n_layer=2, n_head=3, n_positions=512, encoding="kerple")
        )
        maps = position_maps(model, tokens(1, length=length), "all")
        assert isinstance(maps.maps[0].described, DistanceBias)
        sizes.append(maps.save(tmp_path / "maps").stat().st_size)
    assert sizes[1] < 8.5 * sizes[0] < 8.5 * 80_000


def test_a_file_that_is_broken_or_of_something_else_is_refused(tmp_path):
    path = alibi_maps(41).save(tmp_path / "maps.safetensors")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"expected a file of position maps, .* cannot be read"):
        load_maps(path)
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"expected a file of position maps, .* of something else"):
        load_maps(path)
    with pytest.raises(FileNotFoundError):
        load_maps(tmp_path / "nothing")


def long_study(count: int) -> list[Line]:
    """Lines that end at a few places only, two of them before the others."""
    lines = [Line(f"rope+self-extend:{i}", [128, 256], [1.0, y := 1 + i % 4], [0.9, y], [1.1, y]) for i in range(count)]
    return [*lines, Line("learned", [128], [1.0], [0.9], [1.1]), Line("absolute", [128], [1.0], [0.9], [1.1])]


def overlap(texts, figure) -> bool:
    boxes = [text.get_window_extent() for text in texts]
    assert all(figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1 for box in boxes)
    return any(a.overlaps(b) for a, b in combinations(boxes, 2))


@pytest.mark.parametrize("count", [11, 21, 60])
def test_of_many_lines_each_has_its_name_at_its_end(count):
    figure = lines_figure(long_study(count), title="", across="x", up="y", marked=128, whole_bars=True)
    figure.canvas.draw()
    (axes,) = figure.axes
    assert axes.get_legend() is None
    names = [text for text in axes.texts if text.get_text() != "trained at"]
    assert not overlap(names, figure)
    assert [text.get_text() for text in names[-2:]] == ["learned, to 128", "absolute, to 128"]
    # From the top: the order in which the lines end.
    ends = [1 + int(text.get_text().partition(":")[2]) % 4 for text in names[:-2]]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize("count", [2, 6, 21])
def test_a_bar_goes_through_its_point_near_its_length(count):
    (axes,) = lines_figure(long_study(count), title="", across="x", up="y").axes
    bars = [[segment[0, 0] for segment in bar.get_segments()] for bar in axes.collections]
    points = [list(line.get_xdata()) for line in axes.get_lines()[: len(bars)]]
    assert bars == points
    places = numpy.log2(numpy.concatenate(bars))
    assert numpy.abs(places - places.round()).max() <= 0.12 + 1e-9
    assert len({*places}) == len(places), "no bar hides another"


@pytest.mark.parametrize(("low", "high"), [(9.8, 10.4), (10.0, 10.00002), (2, 15), (0.9, 2900), (1, 3e9)])
def test_labels_of_an_axis_tell_its_values_apart_and_have_room(low, high):
    lines = [Line(name, [128, 256, 512], [low, (low + high) / 2, high]) for name in ("cable", "a-long-name")]
    figure = lines_figure(lines, title="", across="x", up="y", marked=512)
    figure.canvas.draw()
    (axes,) = figure.axes
    labels = [label for label in axes.get_yticklabels(which="both") if label.get_text()]
    read = [float(label.get_text().replace(",", "")) for label in labels]
    assert read == [*axes.get_yticks()]
    assert len(read) >= 3
    (trained,) = axes.texts
    assert not overlap([*labels, trained, axes.get_legend()], figure)
    assert trained.get_window_extent().y0 >= axes.get_window_extent().y1, "no line goes through it"


@pytest.mark.parametrize("count", [2, 21])
def test_points_at_one_length_stand_at_it_with_their_whole_bars(count):
    lines = [Line(f"{i}", [128], [y := 10 + i / 99], [y - 1], [y + 2]) for i in range(count)]
    (axes,) = lines_figure(lines, title="", across="x", up="y", marked=128).axes
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert (left, right) == (64, 256)
    assert all(numpy.abs(numpy.log2(line.get_xdata() / 128)).max() <= 0.12 + 1e-9 for line in axes.get_lines()[:count])
    assert low < 9
    assert high > 12 + (count - 1) / 99


@pytest.mark.parametrize("highest", [0.02, 0.5, 3.5, 12, 150])
def test_rises_have_labels_apart_and_rows_that_are_not_judged_are_grey(highest):
    rows = [Estimate("cable", [0.002], (-0.12, 0.01)), Estimate("none", [highest / 2], (0, highest), judged=False)]
    figure = estimates_figure(rows, title="")
    figure.canvas.draw()
    (axes,) = figure.axes
    assert not overlap(axes.get_xticklabels(), figure)
    assert [label.get_color() for label in axes.get_yticklabels()] == ["black", NOT_JUDGED]
    assert [text.get_text() for text in axes.texts] == ["grey: under-trained, not to be judged"]
    assert not estimates_figure(rows[:1], title="").axes[0].texts
    unknown = [Estimate("cable", [0.002], (math.nan, math.nan)), Estimate("rope", [highest], (math.nan, math.nan))]
    assert 0 in estimates_figure(unknown, title="").axes[0].get_xticks()
