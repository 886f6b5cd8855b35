"""`lengthwise info --prove`, on the CPU: the block of Markdown that users of GPUs paste into an issue."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lengthwise.attention import BACKENDS, prove
from lengthwise.attention.info import CALLS
from lengthwise.cli import main
from lengthwise.options import CommandFailed

REPORTS = Path(__file__).parents[1] / "docs/gpu"


def test_a_quick_proof_on_the_cpu_is_one_whole_block(capsys, monkeypatch):
    monkeypatch.setattr(prove, "QUICK", replace(prove.QUICK, lengths=(5, 9), repeats=2, timed=(128,)))
    # Before every case that is timed; amid the objects of a whole test run it takes longer than all cases.
    monkeypatch.setattr(prove.gc, "collect", lambda: 0)
    main(["info", "--prove", "--quick"])
    text = capsys.readouterr().out
    assert prove.is_whole(text)
    assert not prove.is_whole(text.replace("float32", "float16"))
    assert all(f"| {kind} |" in text for kind in CALLS)
    assert all(name in text for name in BACKENDS)
    assert "WRONG" not in text
    assert "FAILED" not in text
    assert "| bits" not in text
    assert "| 128 | levels | row_block |" in text
    assert "- flex: FlexAttention has no backward pass on the CPU" in text


EXTENT = prove.Extent((5,), (8,), 3, (), 1, 8, 0.01)


def laws(name: str) -> str:
    """What the report says of a backend without a bias."""
    return prove._verdict(name, CALLS["no bias"], torch.device("cpu"), torch.float32, EXTENT, {})


def test_what_is_proved_and_timed_has_the_plan_that_a_user_gets(monkeypatch):
    meta, plans = torch.device("meta"), []
    call = prove._call_on(CALLS["DistanceBias"], meta, torch.float32, 37, 16)
    plan = BACKENDS["triton"].plan
    assert plan(call).notes == {"offset.0.0": 0}
    monkeypatch.setattr(BACKENDS["triton"], "run", lambda call, own: plans.append(own) or (call.q, None))
    prove._results("triton", call)
    monkeypatch.setattr(prove, "_measured", lambda step, where, seconds: (step(), ([1.0], 0.0))[1])
    monkeypatch.setattr(BACKENDS["triton"], "skipped_share", lambda call: plans.append(plan(call)) or 0.0)
    list(prove._timed(meta, EXTENT, torch.float32, 37, "table", "triton", prove._by("triton")))
    assert len(plans) == 4
    assert all(own == plan(call) for own in plans)


def test_heads_of_64_and_128_are_proved():
    assert set(prove.FULL.widths) == {64, 128}
    call = prove._call_on(CALLS["ContextualPositions"], torch.device("cpu"), torch.float32, 5, 64)
    assert call.q.shape[3] == 64


def test_a_proof_shows_what_is_wrong(monkeypatch):
    assert "e-0" in laws("sdpa")
    plain = BACKENDS["sdpa"].run

    def wrong(call, plan):
        out, lse = plain(call, plan)
        return 1.01 * out, lse

    monkeypatch.setattr(BACKENDS["sdpa"], "run", wrong)
    assert laws("sdpa").startswith("WRONG 1e-02")

    def restless(call, plan):
        out, lse = plain(call, plan)
        return out * (1 + 1e-7 * torch.rand(out.shape)), lse

    monkeypatch.setattr(BACKENDS["sdpa"], "run", restless)
    assert laws("sdpa").startswith("bits")

    def not_finite(call, plan):
        out, lse = plain(call, plan)
        return out / 0, lse

    monkeypatch.setattr(BACKENDS["sdpa"], "run", not_finite)
    assert laws("sdpa").startswith("NOT FINITE")

    def broken(call, plan):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(BACKENDS["sdpa"], "run", broken)
    assert laws("sdpa").startswith("FAILED")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prove", "--device", "cuda"], "CUDA is not available here"),
        (["--prove", "--device", "tpu"], "--device must be 'cpu'"),
        (["--quick"], "--quick must be with --prove"),
        (["--device", "cpu"], "--device must be with --prove"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_what_cannot_be_proved_is_one_line(arguments, words):
    with pytest.raises(CommandFailed, match=words):
        main(["info", *arguments])


def test_the_reports_that_are_kept_are_as_they_were_printed():
    for file in REPORTS.glob("*.md"):
        assert file.name == "README.md" or prove.is_whole(file.read_text()), file


def test_a_report_goes_on_where_a_backend_fails(monkeypatch):
    def fail(call, plan):
        raise RuntimeError("the compiler | stopped")

    monkeypatch.setattr(BACKENDS["row_block"], "run", fail)
    monkeypatch.setattr(prove, "QUICK", replace(prove.QUICK, lengths=(5,), repeats=1, timed=(64,)))
    monkeypatch.setattr(prove.gc, "collect", lambda: 0)
    lines = prove.report(quick=True).splitlines()
    assert any("| DenseBias |" in line and "FAILED" in line for line in lines)
    assert any("row_block | FAILED: RuntimeError: the compiler / stopped" in line for line in lines)
