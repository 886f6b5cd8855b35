"""The command line, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lengthwise as lw
from lengthwise.attention import BACKENDS, info
from lengthwise.cli import main
from lengthwise.errors import UserError
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM


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


def broken_checkpoint(folder: Path, options: str) -> Path:
    config = LengthwiseConfig(encoding="alibi", vocab_size=64, n_layer=1, n_head=2, n_embd=8, n_positions=8)
    LengthwiseForCausalLM(config).save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"encoding_options": json.loads(options)}))
    return folder


@pytest.mark.parametrize("options", ['{"slope": 1}', '{"slopes": 1}'], ids=["unknown", "wrong"])
@pytest.mark.parametrize("command", ["train", "train --dry_run", "study", "study --plan", "evaluate"])
def test_a_wrong_encoding_option_is_one_line_and_the_exit_code_is_2(command, options, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("a crow and a ship\n" * 50)
    out = ["--out", str(tmp_path / "run")]
    name, *more = command.split()
    data = ["--data", str(tmp_path / "text.txt"), "--tokenizer", "bytes"]
    arguments = {
        "train": ["--encoding", "alibi", "--encoding_options", options, *data, *out],
        "study": ["--encodings", '["alibi"]', "--encoding_options", f'{{"alibi": {options}}}', *data, *out],
        "evaluate": [str(broken_checkpoint(tmp_path / "checkpoint", options)), *out],
    }
    with pytest.raises(SystemExit) as ended:
        main([name, *more, *arguments[name]])
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"lengthwise {name}: ")
    assert "slope" in said


def test_errors_of_users_are_still_those_that_python_has_for_them():
    for kind in (UserError, TypeError, ValueError):
        with pytest.raises(kind, match="unknown option 'slope' for 'alibi'"):
            LengthwiseConfig(encoding="alibi", encoding_options={"slope": 1})
