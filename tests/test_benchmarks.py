"""The comparison of two revisions: it runs, it counts right, and it never times what is wrong."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAULTY = """
right = attend

def attend(q, k, v, **given):
    fault = open(__file__.removesuffix("__init__.py") + "fault").read()
    if fault == "off its reference":
        return right(q, k, v, **given) * (1 if given.get("backend") == "reference" else 1.01)
    if fault == "another formula":
        return right(q, k, 1.01 * v, **given)
    import os
    os._exit(7)
"""
"""The end of a revision whose attention is wrong as the file beside it says."""


@pytest.fixture(scope="module")
def paired():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield importlib.import_module("paired")


@pytest.fixture(scope="module")
def ours(paired):
    with paired.workers(ROOT / "src") as (worker,):
        yield worker


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="there is no other revision outside a repository")
def test_a_revision_compared_with_itself_gives_a_row_with_its_certificate_and_leaves_no_worktree(tmp_path):
    before = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "benchmarks/attention.py", "--base", "HEAD", "--rounds", "2", "--out", str(out)]
    command += ["--lengths", "48", "--cases", "^kerple/train"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["encoding"], row["mode"], row["length"], row["rounds"]) == ("kerple", "train", 48, 2)
    assert row["ratio"]["median"] > 0
    assert row["interval"] is None
    assert row["verdict"] == "too few rounds"
    assert row["born"]["base"] == row["born"]["commit"].rstrip("+")
    assert "kerple/train/48" in done.stdout
    assert str(tmp_path) not in before
    after = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in after


def test_what_is_wrong_is_said_and_not_timed(paired, ours, tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    attention = tmp_path / "src/lengthwise/attention"
    with (attention / "__init__.py").open("a") as file:
        file.write(FAULTY)
    faults = {
        "off its reference": "base: out is off by",
        "another formula": "the revisions disagree: out",
        "a crash": "base: the process ended with code 7",
    }
    case = paired.Case("none", "forward", 16)
    with paired.workers(tmp_path / "src") as (base,):
        for fault, words in faults.items():
            (attention / "fault").write_text(fault)
            row = paired.compare(paired.Entry("ours", ours, case), paired.Entry("base", base, case), 2, same=True)
            assert words in row["wrong"]
            assert "ratio" not in row


def test_the_interval_of_the_median_is_that_of_the_order_statistics(paired):
    # P(B(20, 1/2) < 6) = 0.0207 and P(B < 7) = 0.0577: the sixth from either end.
    assert paired.median_interval(list(range(20, 0, -1))) == [6, 15]
    assert paired.median_interval(list(range(6))) == [0, 5]
    assert paired.median_interval(list(range(5))) is None


@pytest.mark.parametrize(
    ("interval", "median", "verdict"),
    [
        ([1.031, 1.2], 1.1, "over"),
        ([1.02, 1.2], 1.1, "open"),
        ([1.0, 1.2], 1.03, "within"),
        (None, 2, "too few rounds"),
    ],
)
def test_a_case_is_over_its_limit_only_if_the_whole_interval_is(paired, interval, median, verdict):
    assert paired.against_limit({"interval": interval, "ratio": {"median": median}}, 1.03) == verdict


@pytest.fixture(scope="module")
def rivals(paired):
    return importlib.import_module("against_rivals")


def test_encodings_take_turns_with_attention_without_a_bias(rivals):
    rows = {row["encoding"]: row for row in rivals.fast("train", 48, ["kerple", "cable"], 6)}
    assert list(rows) == ["sdpa", "plain", "kerple", "cable"]
    for row in rows.values():
        assert row["rounds"] == 6
        assert row["to_sdpa"]["quartiles"][0] <= row["to_sdpa"]["median"] <= row["to_sdpa"]["quartiles"][1]
        assert row["peak_bytes"] > 0
    assert rows["sdpa"]["to_sdpa"]["median"] == rows["plain"]["to_plain"]["median"] == 1
    assert rows["kerple"]["backend"] in ("native", "row_block")


def test_the_usual_ways_must_give_our_output_and_gradients_before_they_are_timed(rivals, monkeypatch):
    rows = list(rivals.slow("train", 48, "t5", 2))
    assert {"dense SDPA", "dense eager", "transformers", "x-transformers"} <= {row["rival"] for row in rows}
    module = importlib.import_module("rivals")
    wrong = module.RIVALS["dense eager"]
    broken = module.Rival(lambda setup: 1.01 * wrong.run(setup), wrong.takes)
    monkeypatch.setitem(module.RIVALS, "dense eager", broken)
    with pytest.raises(AssertionError, match="dense eager and Lengthwise differ"):
        list(rivals.slow("train", 48, "t5", 2))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("what", "targets"),
    [("train", {"cable / none", "cable / transformers BERT, sdpa"}), ("padding", {"cable, unpadded / cable, padded"})],
)
def test_the_benchmark_of_encoders_runs_to_its_end_and_has_its_targets(what, targets):
    command = [sys.executable, "benchmarks/encoder.py", what, "--quick", "--encodings", "none", "cable"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert targets <= {row.get("target") for row in rows}
    assert all(row["seconds"]["median"] > 0 for row in rows if "rival" in row)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("command", "cases"),
    [
        ("fit.py train", 3),
        ("fit.py decode", 3),
        ("accelerated.py train --models mpt mpnet", 4),
        ("accelerated.py decode --models mpt t5", 2),
        ("accelerated.py memory --models mpt", 1),
        ("stretch.py --specs rerope:1024 dca", 2),
    ],
)
def test_the_benchmarks_of_other_peoples_models_run_to_their_end_and_say_what_was_asked(command, cases):
    script, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *arguments, "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert sum("asked" in line for line in done.stdout.splitlines()) == cases


@pytest.fixture
def ring(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("ring")


def test_a_ring_trains_with_keys_sent_twice_and_their_gradients_returned(ring):
    given = ring.Assumptions(latency_us=0.0, bandwidth_gb=1e9, near_gb=1e9)
    length, devices = 4096, 4
    row = ring.simulate(length, devices, "plain", given)
    products = 2 + 2 + 5
    pairs = given.heads * length * (length + 1) / 2
    rate = given.tflops * 1e12 * given.plain_share
    # Zig-zag chunks have the same work but for the diagonal of each.
    assert row["seconds"] == pytest.approx(products * 2 * given.head_dim * pairs / rate / devices, rel=1e-2)
    # The first process needs all keys of the others, and each of them needs its first chunk of half a part.
    numbers = 2 * given.kv_heads * given.head_dim
    keys, returned = length * 3 // 4, 3 * length // 8
    assert row["received_gb"] == pytest.approx(numbers * (2 * 2 * keys + 4 * returned) / 1e9)


def test_what_a_slow_network_returns_last_is_waited_for(ring):
    fast, slow = (ring.Assumptions(latency_us=0.0, bandwidth_gb=b, near_gb=b) for b in (1e9, 1.0))
    computed, waiting = (ring.simulate(65_536, 2, "plain", given) for given in (fast, slow))
    # At 1 GB a second; some of the work is done meanwhile.
    assert waiting["received_gb"] < waiting["seconds"] < waiting["received_gb"] + computed["seconds"]


@pytest.mark.parametrize(
    ("words", "file", "window", "origin"),
    [
        ([], "docs.png", "window of 4,096", "measured on a CPU"),
        (["--window", "512"], "ring.png", "window of 512", "measured on a CPU"),
        (["--plain-share", "0.4", "--out", "own.png"], "own.png", "window of 4,096", "but for plain_share"),
    ],
)
def test_a_figure_of_other_assumptions_is_another_file_and_says_what_was_measured(
    ring, tmp_path, monkeypatch, words, file, window, origin
):
    from matplotlib.figure import Figure

    said = []

    def remember(figure, path, **options):
        said.append((Path(path).name, figure.get_suptitle(), [text.get_text() for text in figure.legends[0].texts]))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ring, "FIGURE", tmp_path / "docs.png")
    monkeypatch.setattr(ring, "DEVICES", [8])
    monkeypatch.setattr(Figure, "savefig", remember)
    monkeypatch.setattr(sys, "argv", ["ring.py", "simulate", *words])
    ring.main()
    ((name, title, labels),) = said
    assert name == file
    assert title.endswith(origin)
    assert window in labels


def test_no_share_of_a_decaying_bias_is_above_that_of_plain_attention(ring):
    taken = ring.measured()
    assert taken["decaying_share"] <= taken["plain_share"] <= 1
