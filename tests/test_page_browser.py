"""The page in a real browser: its numbers are the tensors', every control does what it says, and nothing gets out."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from browser_kit import Seen, needs_chromium, open_browser
from model_kit import LENGTH, loud_model, tokens

from lengthwise.bias import FunctionBias, SumBias
from lengthwise.encodings.kerple import kerple_log
from lengthwise.inspect import position_maps, position_views
from lengthwise.inspect.model_maps import position_records
from lengthwise.inspect.scores import LazyScores
from lengthwise.study.sections import Section, as_html
from lengthwise.views.page import Page, Snapshot, document
from lengthwise.views.page.payload import packed
from lengthwise.views.style import colour_scale

pytestmark = needs_chromium

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
PAIRS = [(0, 0), (LENGTH - 1, 0), (17, 5), (22, 22)]
TEXT = [f"w{place}" if place != 3 else HOSTILE for place in range(LENGTH)]


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


def views(case: str, resolution: int | None = None):
    return position_views(loud_model(case), tokens(3), "all", shown="first", resolution=resolution, tokens=TEXT)


@pytest.fixture(scope="module")
def seen(browser, tmp_path_factory):
    """Kerple beside CABLE, in every view, on one page that the tests share."""
    models = [[Snapshot(views("kerple"))], [Snapshot(views("cable"))]]
    page = Seen(browser, Page(models).save(tmp_path_factory.mktemp("page") / "heads.html"))
    page.ready()
    yield page
    page.close()


def open_page(browser, path, page: Page, **options: object) -> Seen:
    found = Seen(browser, page.save(path / "heads.html"), **options)
    found.ready()
    return found


def as_functions(views):
    """The same views with KERPLE's table as the function that it is filled in from, and a table added to it."""
    bias, maps = views["bias"], []
    for one, layer in zip(bias.maps, loud_model("kerple").transformer.h, strict=True):
        encoding, table = layer.attn.encoding, one.described
        parts = [x.detach() for x in (table.query, table.key, encoding.p, encoding.a)]
        function = FunctionBias(kerple_log, tuple(parts))
        described = SumBias((function, replace(table, table=torch.zeros_like(table.table))))
        maps.append(replace(one, described=described))
    return views | {"bias": replace(bias, maps=tuple(maps))}


@pytest.mark.parametrize(
    "case",
    ["kerple", "alibi", "cable", "k-cable", "fire-short", "function", "t5", "inkling", "deberta", "dapev2-cable"],
)
def test_numbers_read_from_the_page_are_those_of_the_tensors(browser, tmp_path, case):
    found = views(case) if case != "function" else as_functions(views("kerple"))
    page = open_page(browser, tmp_path, Page([[Snapshot(found)]]))
    page.tab.click("button.head[data-layer='1'][data-head='2']")
    for i, j in PAIRS:
        page.ready()
        page.go(i, j)
        assert page.read("distance") == i - j
        for quantity in ("bias", "content", "scores", "weights"):
            wanted = float(found[quantity].values[1, 2, i, j])
            # A described form is exact but for the last bit of a function; a cell has 15 bits after the first.
            allowed = 1e-6 if found[quantity].maps[1].described is not None else 2.0**-16
            assert page.read(quantity) == pytest.approx(wanted, rel=allowed, abs=1e-7), (quantity, i, j)
        wanted = float(found["bias"].maps[1].profile.mean[2, i - j])
        # A number that is sent with 11 bits has three digits.
        digits = page.tab.locator("#reading td[data-read=mean]").inner_text().split()[0].lstrip("\N{MINUS SIGN}0.")
        assert len(digits.partition("e")[0].replace(".", "")) <= 3
        assert page.read("mean") == pytest.approx(wanted, rel=2.0**-10, abs=1e-7)
    page.go(5, 9)
    assert "masked" in page.tab.inner_text("#reading")
    page.close()


def test_a_tile_is_shown_as_its_mean_its_least_and_its_greatest_and_a_head_in_detail_as_single_cells(browser, tmp_path):
    model, ids = loud_model("rope-dynamic"), tokens(1)
    maps = position_maps(model, ids, "all", "scores", resolution=7)
    exact = LazyScores(position_records(model, ids)).part("scores", 0, 1, slice(0, LENGTH), slice(0, LENGTH))
    page = open_page(browser, tmp_path, Page([[Snapshot({"scores": maps}, detail={"scores": {(0, 1): exact}})]]))
    page.go(18, 6)
    tiles = maps.maps[0].tiles
    assert tiles.pool == 5
    assert page.read("scores") == pytest.approx(float(tiles.mean[0, 3, 1]), rel=2.0**-11)
    least, greatest = float(tiles.least[0, 3, 1]), float(tiles.greatest[0, 3, 1])
    assert least - abs(least) / 128 <= page.read("scores", part="least") <= least
    assert greatest <= page.read("scores", part="greatest") <= greatest + abs(greatest) / 128
    assert "mean of 5 \N{MULTIPLICATION SIGN} 5" in page.tab.inner_text("#reading")
    assert "Tiles of 5 \N{MULTIPLICATION SIGN} 5 pairs" in page.tab.inner_text("#map-note")
    page.tab.click("button.head[data-head='1']")
    page.ready()
    assert page.read("scores") == pytest.approx(float(exact[18, 6]), rel=2.0**-16)
    assert "Single cells" in page.tab.inner_text("#map-note")
    # Large, the colours are those of every number; small, the tiles' means and theirs, as of any other head.
    large = page.tab.evaluate("[mapViews[0].scale.low, mapViews[0].scale.high]")
    button = page.tab.locator("button.head[data-head='1']")
    small = [float(button.get_attribute(f"data-{end}")) for end in ("low", "high")]
    for found, numbers in ((large, exact), (small, tiles.mean[1])):
        wanted = colour_scale(numbers.numpy()).norm
        assert found == pytest.approx((wanted.vmin, wanted.vmax), rel=2.0**-10)
    number = "small(mapViews[0].layer, 1).value(Math.floor(place / 6), place % 6)"
    seen = torch.tensor(page.tab.evaluate(f"Array.from({{ length: 36 }}, (_, place) => {number})")).view(6, 6)
    torch.testing.assert_close(seen, tiles.mean[1], rtol=2.0**-10, atol=0, equal_nan=True)
    page.close()


def test_a_long_described_head_has_the_range_of_all_its_numbers(browser, tmp_path):
    maps = position_maps(loud_model("cable"), tokens(1, 300), "all")
    page = open_page(browser, tmp_path, Page([[Snapshot({"bias": maps})]]))
    for layer in (0, 1):
        for head, numbers in enumerate(maps.values[layer].numpy()):
            button = page.tab.locator(f"button.head[data-layer='{layer}'][data-head='{head}']")
            wanted = colour_scale(numbers).norm
            found = [float(button.get_attribute(f"data-{end}")) for end in ("low", "high")]
            assert found == pytest.approx((wanted.vmin, wanted.vmax), rel=1e-5)
    page.close()


def test_two_maps_of_different_cells_are_each_named_with_their_own(browser, tmp_path):
    model, ids = loud_model("rope-dynamic"), tokens(1)
    maps = [position_maps(model, ids, "all", "scores", **options) for options in ({"resolution": 7}, {})]
    page = open_page(browser, tmp_path, Page([[Snapshot({"scores": one})] for one in maps]))
    tiles = "Tiles of 5 \N{MULTIPLICATION SIGN} 5 pairs, each its mean"
    name = page.tab.evaluate("nameOf(state.sides[0])")
    assert page.tab.inner_text("#map-note") == f"{tiles} ({name}); Single cells ({name})."
    page.close()


def test_of_two_models_the_second_is_moved_in_where_the_first_has_no_such_layer_or_no_such_token(browser, tmp_path):
    short = position_maps(loud_model("kerple", n_layer=1), tokens(1, 20), "all", tokens=TEXT[:20])
    long = position_maps(loud_model("kerple"), tokens(1), "all", tokens=TEXT)
    page = open_page(browser, tmp_path, Page([[Snapshot({"bias": maps})] for maps in (short, long)]))
    assert page.tab.inner_text("#about").split(" and ") == [
        "1 layer of 3 heads, 20 tokens, one sequence",
        "2 layers of 3 heads, 29 tokens, one sequence",
    ]
    page.tab.click(".grid[data-side='1'] button.head[data-layer='0'][data-head='1']")
    page.ready()
    page.go(27, 25)
    assert [page.read("query", side) for side in (0, 1)] == [19, 27]
    assert page.read("bias", 1) == pytest.approx(float(long.values[0, 1, 27, 25]), rel=1e-5)
    page.tab.click(".grid[data-side='1'] button.head[data-layer='1'][data-head='2']")
    page.ready()
    page.go(26, 11)
    assert (page.read("query"), page.read("key")) == (26, 11)
    page.tab.locator("canvas.map").nth(1).scroll_into_view_if_needed()
    box = page.tab.locator("canvas.map").nth(1).bounding_box()
    mouse = page.tab.mouse
    mouse.move(box["x"] + 200, box["y"] + 200)
    mouse.wheel(0, -100)
    page.ready()
    before = page.tab.evaluate("state.window")
    assert before["rows"] == 23
    mouse.down()
    mouse.move(box["x"] + 170, box["y"] + 150, steps=3)
    mouse.up()
    page.ready()
    assert page.tab.evaluate("state.window.i") > before["i"]
    mouse.dblclick(box["x"] + 150, box["y"] + 150)
    page.ready()
    assert page.tab.evaluate("state.window") is None
    for whole in (lambda: page.tab.click("#whole"), lambda: page.tab.locator("#tokens").press("0")):
        page.tab.click("#closer")
        page.ready()
        assert page.tab.evaluate("state.window.rows") == 15
        whole()
        page.ready()
        assert page.tab.evaluate("state.window") is None
    page.close()


def test_a_model_without_a_bias_is_said_to_add_none_and_one_of_0_is_white(browser, tmp_path):
    maps = views("alibi")["bias"]
    zeros = [replace(one, described=replace(one.described, slope=one.described.slope * 0)) for one in maps.maps]
    first = {"bias": replace(maps, maps=tuple(zeros))}
    page = open_page(browser, tmp_path, Page([[Snapshot(first)], [Snapshot(views("rope-dynamic"))]]))
    assert page.tab.inner_text("#map-note") == "0 everywhere."
    head = page.tab.locator("button.head").first
    assert head.evaluate("(head) => [...head.firstChild.getContext('2d').getImageData(0, 9, 1, 1).data]")[0] > 240
    page.tab.evaluate("choose(0, 0)")
    page.ready()
    missing = page.texts("#maps figcaption")[1]
    assert missing.endswith("adds no bias in layer 1; see the views content, scores, weights.")
    assert page.texts("#grids p") == ["Adds no bias."]


def test_a_two_sided_head_is_read_at_keys_ahead_too(browser, tmp_path):
    maps = position_maps(loud_model("deberta"), tokens(1), "all", "scores")
    # As of an encoder: nothing is masked.
    payload = Page([[Snapshot({"scores": maps})]]).payload()
    for layer in payload["models"][0]["snapshots"][0]["views"]["scores"]:
        layer["causal"] = False
        layer["profile"]["first"] = 1 - LENGTH
        size = (3, 2 * LENGTH - 1)
        layer["profile"] |= {name: packed(np.ones(size, np.float32)) for name in ("mean", "spread")}
    path = tmp_path / "two-sided.html"
    path.write_text(document(payload, title="two-sided"))
    page = Seen(browser, path)
    page.ready()
    page.go(LENGTH - 1, LENGTH - 1)
    plot = page.tab.locator("#curves-plot > svg")
    plot.focus()
    steps = [("ArrowLeft", -1, 27), ("ArrowLeft", -2, 26), ("Shift+ArrowLeft", -12, 16), ("ArrowRight", -11, 16)]
    for key, distance, query in steps:
        page.tab.keyboard.press(key)
        page.ready()
        assert (page.read("distance"), page.read("query")) == (distance, query)
    box = plot.bounding_box()
    scale = box["width"] / 460
    for x, distance in ((52, 1 - LENGTH), (460 - 14, LENGTH - 1)):
        page.tab.mouse.move(box["x"] + x * scale, box["y"] + box["height"] / 2)
        page.ready()
        assert page.read("distance") == distance
    page.close()


def test_a_finger_that_leaves_after_a_pinch_does_not_undo_it(browser, tmp_path):
    maps = position_maps(loud_model("kerple"), tokens(1), "all", tokens=TEXT)
    page = open_page(browser, tmp_path, Page([[Snapshot({"bias": maps})]]))
    page.tab.evaluate("mapViews[0].canvas.setPointerCapture = () => {}")

    def put(kind: str, finger: int, across: float) -> dict:
        page.tab.locator("canvas.map").evaluate(
            """(canvas, [kind, pointerId, across]) => {
                const { left, top, width, height } = canvas.getBoundingClientRect();
                const [clientX, clientY] = [left + width / 2 + across, top + height / 2];
                canvas.dispatchEvent(new PointerEvent(kind, { pointerId, pointerType: "touch", clientX, clientY }));
            }""",
            [kind, finger, across],
        )
        page.ready()
        return page.tab.evaluate("state.window")

    put("pointerdown", 1, -30)
    put("pointerdown", 2, 30)
    put("pointermove", 2, 60)
    pinched = put("pointermove", 1, -60)
    assert pinched["rows"] < LENGTH * 0.6
    assert put("pointerup", 2, 60) == pinched
    assert put("pointermove", 1, -62) == pinched
    # The finger that stays drags, and its lifting is no click.
    dragged = put("pointermove", 1, -160)
    assert dragged["rows"] == pinched["rows"]
    assert dragged["j"] > pinched["j"]
    cursor = page.tab.evaluate("state.cursor")
    assert put("pointerup", 1, -160) == dragged
    assert page.tab.evaluate("state.cursor") == cursor
    page.close()


def test_a_page_of_the_profile_alone_or_without_tokens_promises_nothing_that_it_has_not(browser, tmp_path):
    model, found = loud_model("kerple"), {}
    for name, quantity, names in (("profile", "profile", TEXT), ("scores", "scores", None)):
        maps = position_maps(model, tokens(1), "all", quantity, tokens=names)
        page = Seen(browser, Page([[Snapshot({quantity: maps})]]).save(tmp_path / f"{name}.html"))
        page.ready()
        found[name] = page.tab.inner_text("#text-note")
        page.close()
    assert found == {
        "profile": "Not shaded: this page has no number for each query and key here. Click a token to look from there.",
        "scores": "Seen from query 28: softmax of the row's scores.",
    }


def test_hostile_tokens_are_shown_as_they_are_and_nothing_leaves_the_machine(seen):
    assert HOSTILE in seen.texts(".tokens[data-side='0'] span")
    seen.go(20, 3)
    assert HOSTILE in seen.tab.inner_text("#reading")
    assert seen.tab.locator("img").count() == 0
    assert all(url.startswith("file:") for url in seen.requests)
    assert len(seen.requests) == 1
    blocked = seen.tab.evaluate("fetch('http://127.0.0.1:9/').then(() => 'got out', () => 'stopped')")
    assert blocked == "stopped"
    seen.faults.clear()


def test_every_view_can_be_chosen_and_the_two_models_share_one_cursor(seen):
    assert seen.tab.locator("canvas.map").count() == 2
    seen.go(19, 7)
    first, second = (seen.read("bias", side) for side in (0, 1))
    assert first != second
    for quantity in ("content", "scores", "weights", "profile", "bias"):
        seen.tab.locator(f"#whats label:has(input[value={quantity}])").click()
        seen.ready()
        assert seen.tab.evaluate("state.what") == quantity
        assert seen.tab.locator("canvas.map").first.is_visible() == (quantity != "profile")
        assert seen.tab.locator("button.head").count() == 2 * 2 * 3
    box = seen.tab.locator("canvas.map").nth(1).bounding_box()
    plot = seen.tab.evaluate("mapViews[1].plot")
    cell = plot["side"] / LENGTH
    seen.tab.mouse.move(box["x"] + plot["left"] + 4.5 * cell, box["y"] + plot["top"] + 11.5 * cell)
    seen.ready()
    assert (seen.read("query"), seen.read("key")) == (11, 4)
    assert (seen.read("query", 1), seen.read("key", 1)) == (11, 4)
    seen.tab.mouse.move(5, 5)


def test_colours_have_a_range_of_their_own_or_share_one(seen):
    def ranges():
        heads = seen.tab.locator("button.head").all()
        return {(float(head.get_attribute("data-low")), float(head.get_attribute("data-high"))) for head in heads}

    assert len(ranges()) > 6
    seen.tab.locator("#range label").nth(1).click()
    assert len(ranges()) == 1
    seen.tab.locator("#range label").nth(0).click()


def test_weights_are_coloured_as_in_the_figures(browser, tmp_path):
    found = views("cable", resolution=7)
    page = open_page(browser, tmp_path, Page([[Snapshot(found)]]))
    page.tab.locator("#whats label:has(input[value=weights])").click()
    page.ready()
    for one in found["weights"].maps:
        for head, image in enumerate(one.tiles.mean.numpy()):
            wanted = colour_scale(image, log=True)
            button = page.tab.locator(f"button.head[data-layer='{one.layer}'][data-head='{head}']")
            low, high = (float(button.get_attribute(f"data-{end}")) for end in ("low", "high"))
            # A tile's mean has 11 bits in the file.
            assert (low, high) == pytest.approx((wanted.norm.vmin, wanted.norm.vmax), rel=2.0**-10)
            drawn = button.evaluate("(head) => [...head.firstChild.getContext('2d').getImageData(0, 0, 6, 6).data]")
            expected = wanted.paint(image)[..., :3].astype(int)
            colours = np.array(drawn).reshape(6, 6, 4)
            seen = colours[..., 3] == 255
            assert (seen == ~np.isnan(image)).all()
            # One step of the colour map, since numbers are rounded.
            assert np.abs(colours[..., :3][seen] - expected[seen]).max() <= 4
    assert "logarithm" in page.tab.inner_text("#map-note")
    page.close()


def test_a_view_that_cannot_be_drawn_says_so_and_the_page_goes_on(browser, tmp_path):
    page = Page([[Snapshot(views("cable"))]])
    payload = page.payload()
    for layer in payload["models"][0]["snapshots"][0]["views"]["content"]:
        layer["matrix"]["mean"]["text"] = "AAAA"
    path = tmp_path / "broken.html"
    path.write_text(document(payload, title="broken"))
    seen = Seen(browser, path)
    seen.ready()
    assert "content of layer 2 cannot be read" in seen.tab.inner_text("#message")
    assert seen.tab.locator("button.head").count() == 6
    for quantity in ("scores", "content", "weights", "content", "bias"):
        seen.tab.locator(f"#whats label:has(input[value={quantity}])").click()
        seen.ready()
        if quantity == "content":
            assert "content of this model cannot be drawn" in seen.tab.inner_text("#message")
            assert seen.tab.locator("#whats input:checked").get_attribute("value") != "content"
        else:
            assert seen.tab.evaluate("state.what") == quantity
            assert seen.tab.locator("canvas.map").is_visible()
    seen.close()


def test_heads_are_sorted_by_what_is_asked_for(browser, tmp_path):
    found = views("cable")
    page = open_page(browser, tmp_path, Page([[Snapshot({"bias": found["bias"]})]]))
    mean = found["bias"].maps[0].profile.mean
    distance = torch.arange(LENGTH, dtype=torch.float64)
    x = (1 + distance).log2()
    x = x - x.mean()
    wanted = {
        "steepness": torch.stack([-(one.profile.mean.double() @ x) / (x @ x) for one in found["bias"].maps]),
        "reach": torch.stack([one.profile.mean.double().softmax(-1) @ distance for one in found["bias"].maps]),
        "context": found["bias"].context_dependence,
    }
    assert mean.isfinite().all()
    for order, values in wanted.items():
        page.tab.select_option("#order", order)
        heads = page.tab.locator("button.head").all()
        places = [(int(head.get_attribute("data-layer")), int(head.get_attribute("data-head"))) for head in heads]
        measures = [float(head.get_attribute("data-measure")) for head in heads]
        assert measures == sorted(measures, reverse=True)
        assert len(set(places)) == 6
        for (layer, head), measure in zip(places, measures, strict=True):
            assert measure == pytest.approx(float(values[layer, head]), rel=2.0**-7)
    page.close()


def test_zoom_and_pan_by_button_wheel_drag_and_hold_by_click(seen):
    tab = seen.tab
    seen.go(14, 9)
    tab.click("#closer")
    seen.ready()
    window = tab.evaluate("state.window")
    assert (window["rows"], window["columns"]) == (15, 15)
    assert window["i"] <= 14 < window["i"] + 15
    canvas = tab.locator("canvas.map").first
    box = canvas.bounding_box()
    tab.mouse.move(box["x"] + 150, box["y"] + 150)
    tab.mouse.wheel(0, -100)
    seen.ready()
    assert tab.evaluate("state.window.rows") == 12
    before = tab.evaluate("state.window")
    tab.mouse.down()
    tab.mouse.move(box["x"] + 90, box["y"] + 100, steps=4)
    tab.mouse.up()
    seen.ready()
    after = tab.evaluate("state.window")
    assert after["i"] > before["i"]
    assert after["j"] > before["j"]
    assert not tab.evaluate("state.held")
    tab.mouse.click(box["x"] + 120, box["y"] + 120)
    held = tab.evaluate("state.cursor")
    tab.mouse.move(box["x"] + 200, box["y"] + 90)
    seen.ready()
    assert tab.evaluate("state.cursor") == held
    tab.mouse.click(box["x"] + 200, box["y"] + 90)
    tab.click("#further")
    tab.click("#whole")
    seen.ready()
    assert tab.evaluate("state.window") is None


def test_the_text_is_shaded_by_weight_and_searched(seen):
    tab = seen.tab
    seen.go(18, 2)
    shades = tab.locator(".tokens[data-side='0'] span").evaluate_all(
        "spans => spans.map((one) => one.style.backgroundColor)"
    )
    shares = [float(shade.rstrip(")").rpartition(",")[2]) if shade else 0.0 for shade in shades]
    row = torch.tensor(tab.evaluate("[...sharesOf(state.sides[0])]")[:19])
    assert float(row.sum()) == pytest.approx(1, abs=1e-4)
    # A shade is a hundredth, kept in 8 bits.
    assert torch.allclose(torch.tensor(shares[:19]) / max(shares), row / row.max(), atol=0.01)
    assert not any(shares[19:])
    tab.fill("#search", "W1")
    assert tab.inner_text("#found") == "11 found"
    for quantity in ("scores", "bias"):
        tab.locator(f"#whats label:has(input[value={quantity}])").click()
        seen.ready()
        assert tab.locator(".tokens[data-side='0'] .found").count() == 11
    tab.press("#search", "Enter")
    seen.ready()
    assert seen.read("query") == 19
    tab.press("#search", "Shift+Enter")
    tab.click("#previous")
    seen.ready()
    assert seen.read("query") == 17
    tab.click("#next")
    tab.fill("#search", "")
    tab.locator(".tokens[data-side='0'] span").nth(6).click()
    seen.ready()
    assert seen.read("query") == 6
    assert tab.inner_text("#found") == ""


def test_the_keyboard_alone_is_enough(seen):
    tab = seen.tab
    tab.locator("button.head[aria-pressed=true]").first.focus()
    for key in ("Home", "ArrowRight", "ArrowDown"):
        tab.keyboard.press(key)
        seen.ready()
    assert tab.inner_text("#head-title") == "Layer 2, head 2"
    tab.locator("canvas.map").first.focus()
    seen.go(10, 4)
    for key in ("ArrowDown", "Shift+ArrowDown", "ArrowRight", "+"):
        tab.keyboard.press(key)
        seen.ready()
    assert (seen.read("query"), seen.read("key")) == (21, 5)
    assert "distance 16" in tab.inner_text("#spoken")
    assert tab.evaluate("state.window.rows") == 15
    tab.keyboard.press("Enter")
    assert tab.evaluate("state.held")
    for key in ("Enter", "0", "End"):
        tab.keyboard.press(key)
    seen.ready()
    assert seen.read("distance") == 0
    tab.locator("#curves-plot > svg").focus()
    tab.keyboard.press("ArrowRight")
    seen.ready()
    assert seen.read("distance") == 1
    reached = set()
    tab.evaluate("document.activeElement.blur()")
    for _ in range(40):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("(({ id, name, classList }) => id || name || classList[0])(document.activeElement)"))
    assert {"theme", "what", "range", "order", "head", "closer", "map", "log", "search", "tokens"} <= reached
    unnamed = tab.locator("button, select, input, canvas[tabindex]").evaluate_all(
        "all => all.filter((e) => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert unnamed == []


def test_two_steps_of_one_run_are_compared_and_a_slider_goes_through_its_training(browser, tmp_path):
    found = {step: views(case)["bias"] for step, case in ((0, "kerple"), (500, "t5"), (1000, "alibi"))}
    run = [Snapshot({"bias": maps}, step) for step, maps in found.items()]
    page = open_page(browser, tmp_path, Page([run]))
    page.go(20, 4)
    for place, maps in enumerate(found.values()):
        page.tab.locator("#snapshot-0").fill(str(place))
        page.ready()
        assert page.read("bias") == pytest.approx(float(maps.values[-1, 0, 20, 4]), rel=1e-6)
    assert "step 1,000" in page.tab.inner_text("#sides")
    page.tab.click("#compare")
    page.ready()
    assert page.read("bias", 1) == pytest.approx(float(found[0].values[-1, 0, 20, 4]), rel=1e-6)
    page.tab.click("#compare")
    page.ready()
    assert page.tab.locator("canvas.map").count() == 1
    page.close()
    # Snapshots of training may have another view than the model at its end, and have read another text.
    short = position_maps(loud_model("kerple"), tokens(1, 20), "all")
    run = [Snapshot({"scores": views("kerple")["scores"]}, 0), Snapshot({"bias": short}, 500)]
    (tmp_path / "other").mkdir()
    page = open_page(browser, tmp_path / "other", Page([[*run, Snapshot({"bias": found[500]}, 1000)]]))
    for place, length in ((2, LENGTH), (1, 20)):
        page.tab.locator("#snapshot-0").fill(str(place))
        page.ready()
        assert f"of 3 heads, {length} tokens" in page.tab.inner_text("#about")
    # The pointer reads the distance that is drawn where it is, on both sides of 0.
    page.tab.evaluate("state.log = true")
    for distance in (-300, -7, 0, 5, 40, 511):
        share = f"(bend({distance}) - bend(-400)) / (bend(511) - bend(-400))"
        assert page.tab.evaluate(f"between(-400, 511, {share})") == pytest.approx(distance, abs=1e-6)
    page.close()


def test_on_a_phone_and_in_the_dark_nothing_runs_over_the_edge(browser, tmp_path):
    page = open_page(
        browser,
        tmp_path,
        Page([[Snapshot(views("kerple"))], [Snapshot(views("cable"))]]),
        viewport={"width": 360, "height": 740},
        color_scheme="dark",
        has_touch=True,
    )
    assert page.tab.evaluate("document.documentElement.scrollWidth") == 360
    dark = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    page.tab.click("#theme")
    assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.tab.locator("canvas.map").first.scroll_into_view_if_needed()
    box = page.tab.locator("canvas.map").first.bounding_box()
    page.tab.touchscreen.tap(box["x"] + 60, box["y"] + 200)
    page.ready()
    assert page.read("query") > 20
    page.close()


def test_in_a_notebook_the_maps_show_themselves_cut_off_from_the_notebook(browser, tmp_path):
    maps = position_maps(loud_model("kerple"), tokens(1), "all", tokens=TEXT)
    cell = tmp_path / "cell.html"
    cell.write_text(f"<!doctype html><meta charset=utf-8><script>secret = 1</script>{maps._repr_html_()}")
    page = Seen(browser, cell)
    (frame,) = page.tab.frames[1:]
    frame.wait_for_selector("body[aria-busy=false]")
    assert frame.locator("button.head").count() == 6
    assert HOSTILE in frame.locator(".tokens span").all_text_contents()
    assert "SecurityError" in frame.evaluate(
        "() => { try { return String(parent.secret); } catch (error) { return error.name; } }"
    )
    assert not page.faults
    page.close()


@pytest.mark.parametrize(
    ("width", "columns", "wider", "scrolls"), [(1280, 4, True, False), (1280, 2, False, False), (390, 4, False, True)]
)
def test_a_table_of_a_report_takes_the_room_beside_the_text_before_it_scrolls(
    browser, tmp_path, width, columns, wider, scrolls
):
    rows = [["rise since 128", *["2,048"] * columns], ["t5-clamped", *["+256.0% (+203.7% to +319.2%)"] * columns]]
    path = tmp_path / "report.html"
    path.write_text(as_html("A study", [Section("Rise", ["Words."], rows)]))
    page = Seen(browser, path, viewport={"width": width, "height": 800})
    sizes = page.tab.evaluate("""() => {
        const [text, table] = ["p", "table"].map((name) => document.querySelector(name));
        const [inner, outer] = [text, table].map((element) => element.getBoundingClientRect());
        return {wider: outer.left < inner.left - 1 && outer.right > inner.right + 1,
                scrolls: table.scrollWidth > table.clientWidth, page: document.documentElement.scrollWidth};
    }""")
    assert sizes == {"wider": wider, "scrolls": scrolls, "page": width}
    page.close()
