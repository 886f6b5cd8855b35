"""The command line, as a user runs it."""

import subprocess
import sys

import pytest

import lengthwise as lw
from lengthwise.attention import BACKENDS, info
from lengthwise.cli import main


def test_encodings_prints_a_row_for_every_encoding(capsys):
    main(["encodings"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == list(lw.ENCODINGS)
    assert "| fire         | bias    | DistanceBias | 462 " in "\n".join(rows)


def test_info_tells_for_every_backend_what_works_and_why_the_rest_does_not(capsys):
    main(["info"])
    out = capsys.readouterr().out
    for backend in BACKENDS:
        assert backend in out
    assert "sdpa: rescore replaces the scores" in out


def test_info_calls_a_backend_that_gives_other_numbers_faulty(monkeypatch):
    monkeypatch.setattr(BACKENDS["sdpa"], "run", lambda call, plan: (call.q + call.k + call.v, None))
    faults = {v.kind: v.fault for v in info.try_backends() if v.backend == "sdpa"}
    assert faults["no bias"] == "output or gradients differ from the reference"


@pytest.mark.parametrize(("arguments", "words"), [(["bogus"], "invalid choice: 'bogus'"), ([], "COMMAND")])
def test_a_command_that_is_not_there_is_answered_with_those_that_are(arguments, words):
    done = subprocess.run([sys.executable, "-m", "lengthwise.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert words in done.stderr
