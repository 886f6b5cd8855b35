"""The server: it answers as the page needs, on this machine alone, and goes on answering whatever is sent to it."""

import http.client
import json
import shutil
import socket
import threading
import time

import numpy as np
import pytest
import torch
from browser_kit import Seen, needs_chromium, open_browser

from lengthwise.cli import main
from lengthwise.data import load_tokenizer
from lengthwise.errors import UserError
from lengthwise.inspect import position_maps
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.model.modeling import LengthwiseAttention
from lengthwise.serve.catalog import Catalog
from lengthwise.serve.server import bind, make_server
from lengthwise.serve.session import LOOKS, SAMPLES, LookCancelledError, Progress, Session
from lengthwise.views.style import colour_scale

LIMIT = 700
HOSTILE = "<img src=x onerror=alert(1)> and so on, for as long as this text goes on. "


def make_checkpoint(folder, encoding: str) -> None:
    tokenizer = load_tokenizer("bytes")
    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 3}
    model = LengthwiseForCausalLM(LengthwiseConfig(vocab_size=len(tokenizer), encoding=encoding, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Served:
    """A running server and a way to ask it."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.socket = bind(0)
        self.port = self.socket.getsockname()[1]
        self.session = Session(Catalog([str(folder)]), limit=LIMIT)
        self.server = make_server(self.session)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()

    def ask(self, method: str, path: str, body: bytes | str | None = None, **headers: str):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        found = answer.read()
        connection.close()
        return answer, found

    def look(self, expect: int = 200, **wanted: object) -> dict:
        asked = {"model": "kerple-tiny", "layer": "all", "text": None, "length": None if "text" in wanted else 31}
        asked |= wanted
        answer, body = self.ask("POST", "/api/look", json.dumps(asked), Content_Type="application/json")
        assert answer.status == expect, body[:300]
        last = json.loads(body.splitlines()[-1])
        return last["model"] if expect == 200 else last

    def cells(self, key: str, **asked: object):
        query = {
            "look": key,
            "quantity": "scores",
            "layer": 1,
            "head": 2,
            "i": 3,
            "j": 0,
            "rows": 2,
            "columns": 5,
        } | asked
        return self.ask("GET", "/api/cells?" + "&".join(f"{name}={value}" for name, value in query.items()))

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for encoding in ("kerple", "cable"):
        make_checkpoint(folder / f"{encoding}-tiny", encoding)
    (folder / "secret.txt").write_text("secret")
    rows = [{"encoding": "<b>kerple</b>", "values": {"64": 17.25, "128": None}}]
    (folder / "study.json").write_text(json.dumps({"metric": "perplexity", "train_length": 64, "rows": rows}))
    run = folder / "half-run"
    run.mkdir()
    (run / "config.yaml").write_text("encoding: alibi\n")
    (run / "metrics.jsonl").write_text('{"step": 1200, "loss": 3.5}\n')
    found = Served(folder)
    yield found
    found.close()


def test_what_there_is_to_choose_is_listed_with_runs_and_studies(served):
    answer, found = served.ask("GET", "/api/choices")
    said = json.loads(found)
    assert answer.status == 200
    assert said["limit"] == LIMIT
    assert [group["label"] for group in said["groups"]][:2] == ["runs", "checkpoints"]
    assert said["groups"][1]["names"] == ["cable-tiny", "kerple-tiny"]
    (run,), (study,) = said["runs"], said["studies"]
    shown = [run[name] for name in ("name", "encoding", "step", "loss", "state", "finished")]
    assert shown == ["half-run", "alibi", 1200, "3.500", "stopped", False]
    assert study["rows"] == [["<b>kerple</b>", "17.25", "-"]]


def test_a_run_that_diverged_and_one_that_cannot_be_read_are_cards_too(tmp_path):
    for name, line in (("diverged", '{"step": 9, "loss": NaN}\n'), ("damaged", "nonsense\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("encoding: alibi\n")
        (tmp_path / name / "metrics.jsonl").write_text(line)
    damaged, diverged = Catalog([str(tmp_path)]).cards()["runs"]
    assert "cannot be read: " in damaged["state"]
    assert (diverged["loss"], diverged["losses"]) == ("nan", [])
    json.dumps([damaged, diverged], allow_nan=False)


def test_single_cells_of_any_head_are_those_of_the_tensors(served):
    text = "So that a text of some length is read by the model."
    said = served.look(text=text)
    model = LengthwiseForCausalLM.from_pretrained(served.folder / "kerple-tiny")
    ids = torch.tensor([load_tokenizer("bytes")(text)["input_ids"]])
    for quantity in ("bias", "content", "scores", "weights"):
        wanted = position_maps(model, ids, "all", quantity, resolution=64).values[1, 2, 3:5, :5].numpy()
        answer, found = served.cells(said["snapshots"][-1]["look"], quantity=quantity)
        assert answer.status == 200
        np.testing.assert_allclose(np.frombuffer(found, np.float32).reshape(2, 5), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("wanted", "status", "words"),
    [
        ({"text": "   "}, 400, "must have at least one word"),
        ({"text": "x" * (LIMIT + 1)}, 400, "at most 700 tokens here, got 701"),
        ({"length": LIMIT + 1}, 400, "from 1 to 700 tokens here, got 701"),
        ({"length": 0}, 400, "from 1 to 700 tokens"),
        ({"length": "9"}, 400, "must have a model"),
        ({"model": "kerple-tinny"}, 404, "got 'kerple-tinny'"),
        ({"model": "../secret.txt"}, 404, "must be one that is offered now"),
        ({"model": "/etc"}, 404, "must be one that is offered now"),
        ({"layer": "3"}, 400, "layer 'all' or 'last'"),
    ],
)
def test_a_look_that_cannot_be_had_is_answered_in_words(served, wanted, status, words):
    assert words in served.look(expect=status, **wanted)["error"]


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ({"look": "unknown"}, 404, "not in memory any more"),
        ({"quantity": "profile"}, 400, "quantity must be"),
        ({"quantity": "passwords"}, 400, "quantity must be one of bias"),
        ({"layer": 7}, 400, "Layer 8, Head 3"),
        ({"rows": 31, "i": 9}, 400, "rows must"),
        ({"rows": "1e9"}, 400, "rows must be an int"),
        ({"rows": 900000, "columns": 900000}, 400, "524,288 cells"),
    ],
)
def test_cells_that_cannot_be_had_are_answered_in_words(served, asked, status, words):
    key = served.look()["snapshots"][-1]["look"]
    answer, found = served.cells(asked.pop("look", key), **asked)
    assert answer.status == status
    assert words in json.loads(found)["error"]


def test_looks_are_kept_for_two_viewers_at_once_but_not_for_ever(served):
    answers: dict[str, dict] = {}
    viewers = [
        threading.Thread(target=lambda name=name: answers.update({name: served.look(model=name)}))
        for name in ("kerple-tiny", "cable-tiny")
    ]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join()
    keys = {name: said["snapshots"][-1]["look"] for name, said in answers.items()}
    assert {name: said["encoding"] for name, said in answers.items()} == {
        "kerple-tiny": "kerple",
        "cable-tiny": "cable",
    }
    first, second = (served.cells(keys[name], quantity="bias")[1] for name in ("kerple-tiny", "cable-tiny"))
    assert first != second
    for _ in range(LOOKS):
        served.look()
    assert served.cells(keys["kerple-tiny"])[0].status == 404


def test_a_text_that_is_too_long_takes_no_other_text_out_of_memory(served):
    session = Session(Catalog([str(served.folder)]), limit=LIMIT)
    wanted = {"layer": "last", "length": None}
    session.look("kerple-tiny", text="a text", **wanted)
    for length in range(LIMIT + 1, LIMIT + 1 + SAMPLES):
        with pytest.raises(ValueError, match="at most 700 tokens here"):
            session.look("kerple-tiny", text="x" * length, **wanted)
    assert [name.rpartition("\n")[2] for name in session._samples] == ["a text"]


def test_snapshots_of_a_run_are_of_the_layers_that_are_looked_at(tmp_path):
    make_checkpoint(tmp_path / "run" / "final", "cable")
    (tmp_path / "run" / "final" / "seal.json").write_text('{"sha256": {}}')
    (tmp_path / "run" / "config.yaml").write_text("encoding: cable\n")
    model = LengthwiseForCausalLM.from_pretrained(tmp_path / "run" / "final")
    position_maps(model, torch.arange(19)[None], "all").save(tmp_path / "run" / "maps" / "step-00000250.safetensors")
    session = Session(Catalog([str(tmp_path)]))
    for layer, wanted in (("last", [1]), ("all", [0, 1])):
        said = session.look("run", layer=layer, text="a text", length=None)
        assert [[one["layer"] for one in snapshot["views"]["bias"]] for snapshot in said["snapshots"]] == [wanted] * 2


@pytest.mark.parametrize("count", [0, 1, 59, 60, 61, 119, 150])
def test_a_curve_of_losses_has_at_most_sixty_points_and_ends_with_the_last(tmp_path, count):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("encoding: alibi\n")
    lines = [json.dumps({"step": step, "loss": float(step)}) + "\n" for step in range(count)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    (run,) = Catalog([str(tmp_path)]).cards()["runs"]
    assert len(run["losses"]) == min(count, 60)
    assert run["losses"][:1] + run["losses"][-1:] == ([0.0, count - 1.0] if count else [])
    assert run["losses"] == sorted(set(run["losses"]))


def test_text_is_streamed_and_read_once_for_the_same_look(served, monkeypatch):
    read = []

    def endless(source, split):
        while True:
            read.append(source)
            yield "some words of a text that never ends. " * 9

    monkeypatch.setattr("lengthwise.loading.documents", endless)
    session = Session(Catalog([str(served.folder)]))
    first = session.look("kerple-tiny", layer="last", text=None, length=33)
    count = len(read)
    assert 0 < count < 1000
    assert session.look("kerple-tiny", layer="last", text=None, length=33)["encoding"] == first["encoding"]
    assert len(read) == count


def test_a_pickle_and_a_run_without_held_out_text_are_refused_in_words(tmp_path):
    pickled = tmp_path / "pickled"
    make_checkpoint(pickled, "alibi")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    run = tmp_path / "run"
    make_checkpoint(run / "final", "alibi")
    (run / "final" / "seal.json").write_text('{"sha256": {}}')
    (tmp_path / "empty.txt").write_text("")
    (run / "config.yaml").write_text(f"encoding: alibi\ndata: {tmp_path / 'empty.txt'}\n")
    session = Session(Catalog([str(tmp_path)]))
    for name, words in (("pickled", "safetensors"), ("run", "held-out split of .* must have text, got none")):
        with pytest.raises((UserError, ValueError), match=words):
            session.look(name, layer="last", text=None, length=9)


def test_an_encoding_that_is_named_is_the_first_of_its_group():
    assert Catalog(["cable"]).groups()[-1]["names"][:2] == ["cable", "alibi"]


def test_models_of_one_name_are_told_apart_by_folders_and_no_run_passes_for_an_encoding(tmp_path):
    for place in ("a/runs/cable", "b/runs/cable", "c/runs/cable", "a/runs/mine"):
        make_checkpoint(tmp_path / place, "alibi")
    catalog = Catalog([str(tmp_path / name) for name in ("a", "b", "c", "a/runs/mine")])
    assert list(catalog.checkpoints()) == ["runs/cable", "mine", "b/runs/cable", "c/runs/cable"]
    assert [catalog.source(name) for name in ("runs/cable", "c/runs/cable", "cable")] == [
        str(tmp_path / "a/runs/cable"),
        str(tmp_path / "c/runs/cable"),
        "cable",
    ]


def test_a_model_that_was_trained_anew_is_read_anew(tmp_path):
    make_checkpoint(tmp_path / "model", "alibi")
    session = Session(Catalog([str(tmp_path)]))
    first = session.look("model", layer="all", text="a text", length=None)
    shutil.rmtree(tmp_path / "model")
    make_checkpoint(tmp_path / "model", "kerple")
    second = session.look("model", layer="all", text="a text", length=None)
    assert (first["encoding"], second["encoding"]) == ("alibi", "kerple")


def test_a_run_that_disappears_is_answered_in_words(tmp_path):
    make_checkpoint(tmp_path / "model", "alibi")
    session = Session(Catalog([str(tmp_path)]))
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(LookupError, match="one that is offered now"):
        session.look("model", layer="all", text=None, length=9)


def test_only_this_machine_under_its_own_names_is_answered(served):
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80"):
        answer, found = served.ask("GET", "/", Host=host)
        assert answer.status == 400
        assert b"Invalid host" in found
    assert served.ask("GET", "/", Host="localhost:1")[0].status == 200
    assert served.socket.getsockname()[0] == "127.0.0.1"


def test_every_answer_says_what_a_browser_may_do_with_it(served):
    for path in ("/", "/api/choices", "/nothing"):
        answer, _ = served.ask("GET", path)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers


@pytest.mark.parametrize(
    "path", ["/../secret.txt", "/%2e%2e/secret.txt", "/static/..%2f..%2fsecret.txt", "//etc/passwd", "/.git/config"]
)
def test_no_path_leads_to_a_file(served, path):
    answer, found = served.ask("GET", path)
    assert answer.status == 404
    assert b"secret" not in found
    assert b"root:" not in found


def test_what_is_not_our_own_page_cannot_post(served):
    body = json.dumps({"model": "kerple-tiny", "layer": "all", "text": None, "length": 9})
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer, found = served.ask("POST", "/api/look", body, Content_Type=kind)
        assert answer.status == 400
        assert b"application/json" in found
    for broken in ("{", "[" * 100_000, "[]", "null"):
        answer, found = served.ask("POST", "/api/look", broken, Content_Type="application/json")
        assert answer.status == 400
        assert b"Traceback" not in found
    assert served.ask("PUT", "/api/look")[0].status == 405


@pytest.mark.parametrize("announced", [True, False])
def test_a_hundred_megabytes_are_refused_without_being_read(served, announced):
    length = b"Content-Length: 104857600" if announced else b"Transfer-Encoding: chunked"
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        connection.sendall(b"POST /api/look HTTP/1.1\r\nHost: localhost\r\n" + length + b"\r\n\r\n")
        sent = 0
        try:
            while sent < 100 * 2**20:
                chunk = b"x" * 65536
                sent += connection.send(chunk if announced else b"10000\r\n" + chunk + b"\r\n")
        except OSError:
            pass
        assert sent < 50 * 2**20
    assert served.ask("GET", "/")[0].status == 200


def test_two_hundred_idle_connections_keep_nobody_waiting(served):
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(200)]
    try:
        for half in idle[:50]:
            half.sendall(b"GET / HTTP/1.1\r\nHo")
        begun = time.monotonic()
        assert served.ask("GET", "/")[0].status == 200
        assert served.look()["encoding"] == "kerple"
        assert time.monotonic() - begun < 10
    finally:
        for one in idle:
            one.close()


@pytest.mark.prove
def test_a_connection_that_says_nothing_is_closed_after_ten_seconds(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    ("option", "words"),
    [("port", "port must be free, got {0.port}"), ("folder", "it has none"), ("typo", "there is no such folder here")],
)
def test_a_port_in_use_and_a_folder_without_models_are_answered_on_the_terminal(
    served, tmp_path, capsys, option, words
):
    arguments = {"port": ["--port", str(served.port)], "folder": [str(tmp_path)], "typo": ["runs/no-such-run"]}[option]
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert words.format(served) in f"{ended.value.code}{capsys.readouterr().err}"


class Slow:
    """A model whose last layer waits at a gate, so that a test can see a look in the middle."""

    def __init__(self, monkeypatch) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()
        forward = LengthwiseAttention.forward

        def slow(layer, *arguments, **options):
            if layer.layer_idx == 1:
                self.entered.set()
                assert self.gate.wait(30)
            return forward(layer, *arguments, **options)

        monkeypatch.setattr(LengthwiseAttention, "forward", slow)


def wanted_look(**options: object) -> str:
    return json.dumps({"model": "kerple-tiny", "layer": "all", "text": None, "length": 31} | options)


def begin_look(served: Served) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("POST", "/api/look", wanted_look(), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def test_a_look_reports_its_layers_as_they_are_done(served, monkeypatch):
    slow = Slow(monkeypatch)
    connection, answer = begin_look(served)
    lines = [json.loads(answer.readline())]
    while lines[-1]["done"] < 1:
        lines.append(json.loads(answer.readline()))
    assert lines[-1] == {"done": 1, "layers": 2}
    assert not slow.gate.is_set()
    slow.gate.set()
    assert json.loads(answer.read().splitlines()[-1])["model"]["encoding"] == "kerple"
    connection.close()


def test_a_look_that_nobody_waits_for_ends_and_the_next_is_computed(served, monkeypatch):
    slow = Slow(monkeypatch)
    ends = []
    look = Session.look

    def watched_look(session, *arguments, **options):
        try:
            return look(session, *arguments, **options)
        except LookCancelledError:
            ends.append("cancelled")
            raise

    monkeypatch.setattr(Session, "look", watched_look)
    connection, answer = begin_look(served)
    assert slow.entered.wait(30)
    answer.close()
    connection.close()
    time.sleep(0.5)
    slow.gate.set()
    assert served.look(model="cable-tiny")["encoding"] == "cable"
    assert ends == ["cancelled"]


def test_a_look_is_cancelled_before_its_next_module_and_while_it_waits_for_its_turn(served):
    wanted = {"layer": "all", "text": None, "length": 31}
    progress = Progress()
    progress.cancel()
    with pytest.raises(LookCancelledError):
        served.session.look("kerple-tiny", **wanted, progress=progress)
    assert progress.done == 0
    with served.session._turn, pytest.raises(LookCancelledError):
        served.session.look("kerple-tiny", **wanted, progress=progress)
    assert served.look()["encoding"] == "kerple"


def test_an_error_in_the_middle_of_a_look_is_its_last_line(served, monkeypatch):
    def fail(*arguments, **options):
        time.sleep(0.3)
        raise NotImplementedError("this layer cannot be drawn")

    monkeypatch.setattr("lengthwise.serve.session.training_snapshots", fail)
    answer, body = served.ask("POST", "/api/look", wanted_look(), Content_Type="application/json")
    assert answer.status == 200
    assert "this layer cannot be drawn" in json.loads(body.splitlines()[-1])["error"]
    assert b"Traceback" not in body


@pytest.fixture
def live(served):
    """The served page in a browser of its own, once its first heads are drawn."""
    own = Served(served.folder)
    with open_browser() as browser:
        seen = Seen(browser, f"http://127.0.0.1:{own.port}/")
        seen.tab.wait_for_selector("button.head")
        seen.ready()
        yield own, seen
        seen.close()
    own.close()


@needs_chromium
def test_in_a_browser_it_opens_on_heads_and_a_look_shows_progress_and_can_be_stopped(live, monkeypatch):
    _, seen = live
    tab = seen.tab
    assert tab.inner_text("#title") == "cable (cable-tiny)"
    assert tab.locator("button.head").count() == 3, "the last layer alone, to be quick"
    assert tab.locator(".card.run").count() == 1
    assert "step 1,200" in tab.inner_text(".card.run")
    assert "<b>kerple</b>" in tab.inner_text(".card.study")
    assert not tab.is_visible("#progress")

    slow = Slow(monkeypatch)
    tab.select_option("#first", "kerple-tiny")
    tab.select_option("#layers", "all")
    tab.click("#look")
    tab.locator("#progress-text", has_text="1 of 2 layers").wait_for()
    assert "kerple-tiny" in tab.inner_text("#progress")
    tab.click("#stop")
    tab.wait_for_selector("#progress", state="hidden")
    assert not tab.is_visible("#message")
    assert tab.inner_text("#title") == "cable (cable-tiny)", "what was there stays"
    slow.gate.set()
    tab.click("#look")
    tab.locator("#title", has_text="kerple (kerple-tiny)").wait_for()
    seen.ready()
    assert tab.locator("button.head").count() == 6


@needs_chromium
def test_in_a_browser_a_text_is_typed_and_two_live_models_are_seen_cell_by_cell(live):
    own, seen = live
    tab = seen.tab
    tab.select_option("#reads", "text")
    tab.click("#look")
    tab.wait_for_selector("#message:not([hidden])")
    assert "must have at least one word" in tab.inner_text("#message")
    seen.faults.clear()
    tab.select_option("#first", "kerple-tiny")
    tab.select_option("#second", "cable-tiny")
    tab.fill("#words", HOSTILE * 9)
    tab.select_option("#layers", "all")
    tab.click("#look")
    tab.locator("#title", has_text=" and ").wait_for()
    seen.ready()
    assert tab.inner_text("#title") == "kerple (kerple-tiny) and cable (cable-tiny)"
    assert not tab.is_visible("#message")
    tab.locator("#whats label:has(input[value=scores])").click()
    seen.ready()
    seen.go(600, 333)
    model = LengthwiseForCausalLM.from_pretrained(own.folder / "kerple-tiny")
    ids = torch.tensor([load_tokenizer("bytes")(HOSTILE * 9)["input_ids"]])
    head = position_maps(model, ids, -1, "scores", resolution=ids.shape[1]).values[0]
    wanted = head[600, 333]
    # First the mean of a tile is shown; the single number comes from the server.
    for _ in range(100):
        if seen.read("scores") == pytest.approx(float(wanted), rel=1e-5):
            break
        tab.wait_for_timeout(100)
    assert seen.read("scores") == pytest.approx(float(wanted), rel=1e-5)
    # Of the whole map the cursor's row alone is known cell by cell, of a small part of it everything.
    tiles = "Tiles of 2 \N{MULTIPLICATION SIGN} 2 pairs, each its mean, and some single cells."
    tab.wait_for_function("tiles => find('map-note').textContent === tiles", arg=tiles)
    tab.evaluate("show({ i: 400, j: 200, rows: 100, columns: 100 }, extent())")
    tab.wait_for_function("() => find('map-note').textContent.startsWith('Single cells; queries 400 to 499')")
    low, high = tab.evaluate("[mapViews[0].scale.low, mapViews[0].scale.high]")
    numbers = colour_scale(head.numpy()).norm
    assert (low, high) == pytest.approx((numbers.vmin, numbers.vmax), rel=1e-5)
    assert "<b>kerple</b>" in tab.inner_text("#cards")
    assert all(url.startswith(f"http://127.0.0.1:{own.port}/") for url in seen.requests)
    own.close()
    tab.click("#look")
    tab.wait_for_selector("#message:not([hidden])")
    assert "does not answer" in tab.inner_text("#message")
