"""The command line, as a user runs it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lengthwise as lw
from lengthwise import loading
from lengthwise.attention import BACKENDS, info
from lengthwise.cli import COMMANDS, evaluate_parser, main, study_parser, train_parser
from lengthwise.data import load_tokenizer
from lengthwise.encodings.catalogue import page
from lengthwise.errors import UserError
from lengthwise.loading import resolve_checkpoint
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM


def test_encodings_prints_a_row_for_every_encoding(capsys):
    main(["encodings", "--all"])
    rows = capsys.readouterr().out.splitlines()[2:]
    cells = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in rows}
    assert list(cells) == list(lw.ENCODINGS)
    assert cells["fire"][:3] == ["bias", "DistanceBias", "462"]
    main(["encodings"])
    names = re.findall(r"^\| ([a-z0-9-]+) +\|", capsys.readouterr().out, re.MULTILINE)
    assert sorted(name for name in names if name != "name") == sorted(lw.ENCODINGS)


@pytest.mark.parametrize("name", ["alibi", "kerple+dapev2", "rope"])
def test_one_encoding_has_a_page_with_its_formula_options_and_cost(name, capsys):
    main(["encodings", name])
    printed = capsys.readouterr().out
    assert printed.startswith(f"{name}: ")
    for line in ("options  ", "hooks  ", "cost  ", "paper  ", "two-sided  "):
        assert line.strip() in printed
    with pytest.raises(SystemExit):
        main(["encodings", "no-such"])
    assert "no-such" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("rope+path", ["queries and keys; Replacing the scores", "block of rows by block", "window     none"]),
        ("rope+alibi", ["Added to the scores, by distance alone", "in the CPU kernel", "window     any"]),
        ("grape-a+t5", ["a function of the pair"]),
        ("rope+ssmax", ["no chunks or bands", "attention without a bias"]),
    ],
)
def test_the_page_of_a_composition_is_true_of_its_parts(name, facts):
    assert all(fact in page(name) for fact in facts)


def test_info_tells_for_every_backend_what_works_and_why_the_rest_does_not(capsys):
    main(["info"])
    out = capsys.readouterr().out
    for backend in BACKENDS:
        assert backend in out
    assert "sdpa: rescore replaces the scores" in out


def test_info_calls_a_backend_that_gives_other_numbers_faulty(monkeypatch):
    monkeypatch.setattr(BACKENDS["sdpa"], "run", lambda call, plan: (call.q + (call.k + call.v).mean(2, True), None))
    faults = {v.kind: v.fault for v in info.try_backends() if v.backend == "sdpa"}
    assert faults["no bias"] == "output or gradients differ from the reference"


@pytest.mark.parametrize(
    ("arguments", "words"), [(["bogus"], "unknown COMMAND 'bogus'; known: encodings"), ([], "COMMAND")]
)
def test_a_command_that_is_not_there_is_answered_with_those_that_are(arguments, words):
    done = subprocess.run([sys.executable, "-m", "lengthwise.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("lengthwise: ")
    assert words in line


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


def failure_line(capsys, arguments: list[str]) -> str:
    """The one line that a command with an error prints; nothing but the exit code 2 goes with it."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    output = capsys.readouterr()
    assert ended.value.code == 2, output
    (line,) = [line for line in output.err.strip().splitlines() if "%|" not in line]  # not the bars of transformers
    command = f"lengthwise {arguments[0]}" if arguments and arguments[0] in COMMANDS else "lengthwise"
    assert line.startswith(f"{command}: ")
    return line


def typed_options() -> Iterator[tuple[str, str, str]]:
    """Each option of each command that takes a value of some type, and a value of another."""
    for name, command in COMMANDS.items():
        for option, kind in command.parser().option_types.items():
            for kind_name, nonsense in (("int", "many"), ("float", "much"), ("dict", "7"), ("Literal", "neither")):
                if kind_name in str(kind) and option.startswith("--"):
                    yield name, option, nonsense


@pytest.mark.parametrize(("command", "option", "nonsense"), [*typed_options()])
def test_a_value_of_another_type_is_one_line_with_the_option_and_the_value(command, option, nonsense, capsys):
    line = failure_line(capsys, [command, option, nonsense])
    assert option in line
    assert nonsense in line
    assert "must be" in line


NONSENSE = {
    "info": {"--device": "x"},
    "export": {"--out": "/dev/null/x"},
    "show": {
        **{
            "--out": "/dev/null/x.png",
            "--layer": "x",
            "--detail": "x",
            "--heads": "x",
            "--quantity": "x",
            "--what": "x",
            "--part": "x",
        },
        "--text": "",
    },
    "train": {
        **{"--config": "/dev/null/x", "--out": "/dev/null/x", "--encoding": "x", "--preset": "x", "--data": "x"},
        **{"--held-out": "x", "--tokenizer": "x", "--device": "x", "--positions": "x", "--start-from": "cabel"},
        "--token-store": "moon://x",
    },
    "evaluate": {
        **{"--text": "x", "--stretch": "x", "--tasks": "x", "--device": "x", "--out": "/dev/null/x"},
        "--retrieval-set": "x",
    },
    "study": {
        **{"--config": "/dev/null/x", "--out": "/dev/null/x", "--encodings": "x", "--paper": "x", "--preset": "x"},
        **{"--stretch": "x", "--tasks": "x", "--data": "x", "--tokenizer": "x", "--device": "x", "--text": "x"},
        **{"--positions": "x", "--retrieval-set": "x", "--address": "x", "--beside": "x"},
        **{"--upload": "moon://x", "--token-store": "moon://x"},
    },
}
ANYTHING = {"study": {"--title"}}
"""Any text will do for a title."""


def test_every_option_that_is_a_string_has_its_nonsense_here():
    for name, command in COMMANDS.items():
        types = command.parser().option_types
        strings = {n for n, kind in types.items() if n.startswith("--") and kind in (str, str | None, list[str])}
        assert strings == NONSENSE.get(name, {}).keys() | ANYTHING.get(name, set()), name


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A checkpoint, a text, and the options with which each command would work."""
    folder = tmp_path_factory.mktemp("run")
    config = LengthwiseConfig(encoding="alibi", vocab_size=257, n_layer=1, n_head=2, n_embd=8, n_positions=8)
    LengthwiseForCausalLM(config).save_pretrained(folder / "model")
    load_tokenizer("bytes").save_pretrained(folder / "model")
    (folder / "text.txt").write_text("a crow and a ship\n" * 50)
    training = ["--data", str(folder / "text.txt"), "--tokenizer", "bytes", "--length", "8", "--batch-tokens", "8"]
    training += ["--steps", "1", "--out", str(folder / "out")]
    model = str(folder / "model")
    return {
        "info": ["--prove", "--quick"],
        "export": [model],
        "show": [model, "--length", "8"],
        "train": training,
        "evaluate": [model, "--text", str(folder / "text.txt"), "--lengths", "8"],
        "study": [*training, "--encodings", "alibi"],
    }


@pytest.mark.parametrize(
    ("command", "option", "nonsense"), [(c, o, n) for c, options in NONSENSE.items() for o, n in options.items()]
)
def test_nonsense_for_a_string_is_one_line(command, option, nonsense, small_run, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path / "cache"))
    failure_line(capsys, [command, *small_run[command], option, nonsense])


@pytest.mark.parametrize("words", [["--learning-rate", "0.5"], ["--learning_rate", "0.5"], ["--learning_rate=0.5"]])
def test_options_have_dashes_and_underscores_are_taken_too(words):
    assert train_parser().parse_args(words).learning_rate == 0.5
    assert train_parser().parse_args(["--no_resume", "--sizes.n_layer", "2"]).sizes == {"n_layer": 2}
    assert "--learning_rate" not in train_parser().format_help()


@pytest.mark.parametrize("words", [["12", "34"], ["[12, 34]"], ["[12,34]"]])
def test_a_list_is_words_or_json(words):
    assert evaluate_parser().parse_args(["a", "--lengths", *words, "--windows", "3"]).lengths == [12, 34]
    assert evaluate_parser().parse_args(["--stretch", "yarn:8", "dca"]).stretch == ["yarn:8", "dca"]


def test_help_loads_neither_torch_nor_transformers_nor_matplotlib():
    code = """
import sys
from lengthwise.cli import COMMANDS, main
for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
    try:
        main(words)
    except SystemExit:
        pass
    print("loaded:", *words, *({"torch", "transformers", "matplotlib", "numpy"} & {*sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("usage: lengthwise") == 1 + len(COMMANDS)
    loaded = [line for line in done.stdout.splitlines() if line.startswith("loaded:")]
    assert loaded == ["loaded: --help", *(f"loaded: {name} --help" for name in COMMANDS)]


@pytest.mark.parametrize("command", ["show", "evaluate", "export"])
def test_a_name_of_the_hub_without_a_network_is_one_line(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = failure_line(capsys, [command, "owner/no-such-model", "--out", str(tmp_path / "a.png")])
    assert "an encoding, a run, a checkpoint folder or a name on the hub" in line
    assert "'owner/no-such-model'" in line


@pytest.mark.parametrize("command", ["serve", "show", "evaluate"])
def test_a_mistyped_folder_is_refused_at_once_and_a_bare_name_of_the_hub_is_not(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()

    def ask(url, timeout):
        if "gpt2" not in url:
            raise ConnectionError("no network")

    monkeypatch.setattr(loading, "get_hf_file_metadata", ask)
    monkeypatch.setattr("transformers.utils.hub.cached_files", lambda *_, **__: pytest.fail("the hub was asked again"))
    line = failure_line(capsys, [command, "runz"])
    assert line.endswith("the hub cannot be asked: no network; did you mean 'runs'?")
    (tmp_path / "kerple+dapev2-1").mkdir()
    line = failure_line(capsys, [command, "kerple+dapev2-2"])
    assert line.endswith("did you mean 'kerple+dapev2-1'?"), "which no model on the hub can be called"
    line = failure_line(capsys, [command, "mine"])
    assert line.endswith("got 'mine': there is no such folder here, and the hub cannot be asked: no network")
    assert resolve_checkpoint("gpt2") == "gpt2"
    (tmp_path / "gpt2-alibi").mkdir()
    assert resolve_checkpoint("gpt2") == "gpt2", "as the hub says, whatever folders are here"
    monkeypatch.setattr(loading, "get_hf_file_metadata", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.setattr(loading, "try_to_load_from_cache", lambda name, _: f"cache/{name}/config.json")
    assert resolve_checkpoint("gpt2") == "gpt2", "in the cache"


def test_weights_to_start_from_that_are_missing_are_named_before_the_hub_is_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/first").mkdir(parents=True)
    words = ["train", "--out", "out", "--encoding", "alibi", "--preset", "tiny", "--from"]
    with monkeypatch.context() as patch:
        patch.setattr("transformers.utils.hub.cached_files", lambda *_, **__: pytest.fail("the hub was asked"))
        for name in ("runs/missing", "./missing", "a/b/missing"):
            assert failure_line(capsys, [*words, name]).endswith(f"got {name!r}: there is no such folder here")
            assert "there is no such folder here" in failure_line(capsys, ["show", name])
        assert "did you mean 'runs/first'?" in failure_line(capsys, [*words, "runs/frist"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = failure_line(capsys, [word for word in words if word not in ("--preset", "tiny")] + ["owner/no-such-model"])
    assert "there is no such folder here, and as a name on the hub: We couldn't connect" in line


DAMAGE = {
    "half of the weights": ("model.safetensors", lambda content: content[: len(content) // 2]),
    "no weights": ("model.safetensors", lambda content: b""),
    "no object in the config": ("config.json", lambda content: b"[1]"),
    "another encoding": ("config.json", lambda content: content.replace(b'"alibi"', b"7")),
    "weights of another width": ("config.json", lambda content: content.replace(b'"n_embd": 8', b'"n_embd": 16')),
    "half of the tokenizer": ("tokenizer.json", lambda content: content[: len(content) // 2]),
}


@pytest.mark.parametrize(("file", "change"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_one_line(file, change, small_run, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(small_run["export"][0], model)
    (model / file).write_bytes(change((model / file).read_bytes()))
    for command in ("show", "evaluate", "export"):
        if command != "export" or not file.startswith("tokenizer"):
            assert str(model) in failure_line(capsys, [command, str(model), "--out", str(tmp_path / "a.png")])


def test_numbers_without_end_are_one_line(small_run, capsys):
    for option, value in (("--learning-rate", ".inf"), ("--weight-decay", ".nan"), ("--clip", ".inf")):
        line = failure_line(capsys, ["train", *small_run["train"], option, value])
        assert f"{option[2:].replace('-', '_')} must be a number" in line
    for option, value, words in (
        ("--layer", "1-99999999999", "layer must be numbers from 1 on"),
        ("--length", "99999999999", "length must be at most 1,048,576 tokens, got 99,999,999,999"),
    ):
        assert words in failure_line(capsys, ["show", small_run["export"][0], option, value])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ('{"n_layers": 2}', "sizes must be options of LengthwiseConfig, such as n_layer, got 'n_layers'"),
        ('{"n_layer": "two"}', "sizes must be of the types of LengthwiseConfig, got {'n_layer': 'two'}"),
    ],
)
def test_sizes_that_are_none_are_one_line(sizes, words, small_run, capsys):
    assert words in failure_line(capsys, ["train", *small_run["train"], "--dry-run", "--sizes", sizes])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["train", "evaluate", "study"])
def test_a_device_that_is_not_there_is_one_line(command, small_run, capsys):
    line = failure_line(capsys, [command, *small_run[command], "--device", "cuda"])
    assert "device must be 'auto' or one that works here, got 'cuda'" in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"steps: [3\n", "--config must be YAML, got an error in line 2, column 1: did not find expected ',' or ']'"),
        (b"stepz: 3\n", "unknown option 'stepz' in the config; did you mean 'steps'? See lengthwise"),
        (b"", "--config must be a YAML mapping from options to values, got an empty file"),
        (b"# steps: 3\n# seed: 4\n", "--config must be a YAML mapping from options to values, got an empty file"),
        (b"[1]\n", "--config must be a YAML mapping from options to values, got '[1]'"),
        (b"- a\n- b\n", "--config must be a YAML mapping from options to values, got '- a'"),
        (b"separate_documents: maybe\n", "an option of the config must be true or false, got 'maybe'"),
        (b"steps: many\n", "--steps must be an int or null, got 'many'"),
        ("data: Zoë.txt\n".encode("latin-1"), "a config must be UTF-8, got byte 0xeb at offset 8"),
    ],
)
@pytest.mark.parametrize("command", ["train", "study"])
def test_a_config_file_with_an_error_is_one_line(command, content, words, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_bytes(content)
    assert words in failure_line(capsys, [command, "--config", str(tmp_path / "bad.yaml")])


@pytest.mark.parametrize("command", ["train", "study --plan", "evaluate a", "export a", "show --paper"])
def test_a_file_for_a_folder_is_refused_before_anything_is_read(command, tmp_path, capsys):
    path = tmp_path / "file"
    path.touch()
    line = failure_line(capsys, [*command.split(), "--out", str(path)])
    assert line.endswith(f"--out must be a folder, got the file {str(path)!r}")
    assert f"got '{path}/a' in the file" in failure_line(capsys, [*command.split(), "--out", f"{path}/a"])


def test_a_run_whose_config_is_damaged_is_not_resumed(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("version: [1\n")
    assert "config.yaml" in failure_line(capsys, ["train", "--resume", "--out", str(tmp_path)])


WORDS = {
    "export a": "expected --out (the folder to write, new or empty), got none",
    "train --optimizer sgd": "--optimizer must be 'adamw' or 'muon' or null, got 'sgd'",
    'study --rates {"alibi":0.1}': '--rates must be a dictionary such as {"fire": {"encoding_learning_rate": 0.06}}',
    "train --stepz 3": "unknown option --stepz; did you mean '--steps'? See lengthwise train --help",
    "train extra": "expected options, which begin with --, got 'extra'",
    "encodings alibi kerple": "expected no more words, got 'kerple'",
    "evaluate --bogus": "unknown option --bogus; see lengthwise evaluate --help",
    "train --steps": "--steps must be an int or null, got none",
    "info --quick=3": "--quick is given without a value, got '3'",
    "train --config none.yaml": "--config must be a YAML file that can be read, got",
    "train --out a --layers rope:512,": "encodings between commas, as in 'rope:512,none', got 'rope:512,'",
}
"""Command lines with an error that is not one of a value, and what must be said of it."""


@pytest.mark.parametrize("command", WORDS)
def test_a_mistake_is_answered_with_what_was_expected_and_what_was_got(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert WORDS[command] in failure_line(capsys, command.split())


def test_an_interrupted_command_ends_with_the_exit_code_of_shells_and_no_traceback(monkeypatch, capsys):
    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "info", COMMANDS["info"]._replace(run=interrupted))
    with pytest.raises(SystemExit) as ended:
        main(["info"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", ["encodings", "train --print-config"])
def test_a_command_whose_reader_has_ended_ends_quietly_as_others_of_unix_do(words):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lengthwise.cli", *words.split()]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_command_without_a_standard_output_succeeds():
    command = shlex.join([sys.executable, "-m", "lengthwise.cli", "encodings"])
    done = subprocess.run(["sh", "-c", f"{command} >&-"], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_config_file_of_the_first_edition_is_read(tmp_path):
    """As its --print_config wrote it, with null for what was left open."""
    path = tmp_path / "old.yaml"
    path.write_text("lengths: null\ntext: null\nstride: null\nwindows: 64\nsteps: null\ntrain: false\nsizes: null\n")
    parsed = study_parser().parse_args(["--config", str(path)])
    assert (parsed.lengths, parsed.text, parsed.windows, parsed.train) == (None, None, 64, False)


def test_an_empty_folder_is_refused_by_what_it_lacks(tmp_path, capsys):
    for command in ("show", "evaluate"):
        line = failure_line(capsys, [command, str(tmp_path)])
        assert "an encoding, a run, a checkpoint folder or a name on the hub" in line
        assert "config.json" in line


def test_bytes_that_are_not_utf_8_are_named_with_their_file(small_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path / "cache"))
    (tmp_path / "old.txt").write_bytes("Zoë saw a ship\n".encode("latin-1") * 50)
    for command, option in (("train", "--data"), ("evaluate", "--text")):
        line = failure_line(capsys, [command, *small_run[command], option, str(tmp_path / "old.txt")])
        assert "UTF-8" in line
        assert "old.txt" in line


def test_a_package_that_is_not_installed_is_named_with_its_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.delitem(sys.modules, "lengthwise.serve.server", raising=False)
    for module in [name for name in sys.modules if name.startswith("starlette.")]:
        monkeypatch.delitem(sys.modules, module)
    assert "in a clone of Lengthwise: pip install '.[serve]'" in failure_line(capsys, ["serve"])
