"""A model of transformers goes on: an encoding is fitted into it and trained, as safely as our own models are."""

import json

import pytest
import torch
import transformers as hf
from model_kit import loud_model
from safetensors.torch import load_file
from train_kit import assert_same_run, in_processes, numbers, small_config

import lengthwise as lw
from lengthwise.cli import main, train_parser
from lengthwise.data import load_tokenizer
from lengthwise.data.tokenizers import with_start_token
from lengthwise.evaluate.corpus import Corpus, TextWindow
from lengthwise.evaluate.losses import _stacked, token_losses
from lengthwise.loading import load_model
from lengthwise.model.fit import fit_of
from lengthwise.runs import Run, RunWriter
from lengthwise.train import train
from lengthwise.train.config import TrainConfig
from lengthwise.train.distributed import World
from lengthwise.train.loop import SummedLoss
from lengthwise.train.objectives import TokenObjective

SIZES = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MORE = SIZES | {"intermediate_size": 32, "max_position_embeddings": 132}
FAMILIES = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=132, bos_token_id=256)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**MORE, num_key_value_heads=2)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**MORE, rotary_pct=0.5)),
}


def checkpoint(folder, family="llama"):
    """A folder of transformers, with a tokenizer."""
    torch.manual_seed(0)
    place = folder / family
    FAMILIES[family]().save_pretrained(place)
    load_tokenizer("bytes").save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("start"), "gpt2")


def config_of(folder, name="run", *, start, **changes):
    """A few steps."""
    plain = {"sizes": None, "tokenizer": None, "encoding": "none", "start_from": start, "optimizer": None}
    return small_config(folder, name, **(plain | {"steps": 7, "evaluate_tokens": 66} | changes))


@pytest.mark.parametrize(
    ("family", "encoding"),
    [
        ("gpt2", "kerple"),
        pytest.param("llama", "none", marks=pytest.mark.prove),
        pytest.param("gpt_neox", "own+cable", marks=pytest.mark.prove),
    ],
)
def test_it_learns_and_its_final_model_is_a_fitted_one(tmp_path, family, encoding):
    start = checkpoint(tmp_path, family)
    run = train(config_of(tmp_path, start=start, encoding=encoding, steps=12))
    losses = [line["loss"] for line in run.metrics]
    assert losses[-1] < losses[0] - 0.3
    assert set(run.metrics[-1]["held_out"]) == {"33", "66", "132"}
    final = lw.load(run.final).eval()
    assert fit_of(final).label == encoding
    ids = torch.arange(20)[None]
    with torch.no_grad():
        logits = final(ids).logits
        assert torch.equal(load_model(run.folder).model(ids).logits, logits)
        assert not torch.equal(load_model(start).model(ids).logits, logits)
    assert json.loads((run.final / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    if family == "gpt2":
        # Its table of positions is replaced, learns nothing, and has no moments in a checkpoint.
        own = hf.AutoModelForCausalLM.from_pretrained(start).transformer.wpe.weight
        assert torch.equal(final.transformer.wpe.weight, own)
    # And on from there, with the encoding that it has.
    again = train(config_of(tmp_path, "again", start=str(run.folder), encoding=None, steps=2, warmup=1))
    assert fit_of(lw.load(again.final)).label == encoding
    assert again.metrics[0]["loss"] < losses[0]


def test_sequences_begin_as_the_tokenizer_begins_a_text_as_in_evaluation(tmp_path):
    place, tokenizer = tmp_path / "llama", load_tokenizer("bytes")
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    with_start_token(tokenizer).save_pretrained(place)
    hf.LlamaForCausalLM(hf.LlamaConfig(**(MORE | {"vocab_size": 258}))).save_pretrained(place)
    plain, begun = (
        TokenObjective(config_of(tmp_path, start=start, separate_documents=True).resolved())
        for start in (checkpoint(tmp_path, "gpt2"), str(place))
    )
    text = plain.inputs(0, 40)[0]
    assert torch.equal(plain.inputs(0, 40)[1], text)
    read, labels, positions = begun.inputs(0, 40)
    assert (read[:, 0] == 257).all()
    assert torch.equal(read[:, 1:], text[:, 1:])
    assert torch.equal(labels[:, 1:], text[:, 1:])
    assert (positions[:, 1] == 1).all(), "a window's first document sees it"
    assert (positions == 0).sum() > 40, "those behind it are kept apart, as without it"
    model = begun.make_model().eval()
    world = World(0, 1, torch.device("cpu"), sharded=False)
    loss = begun.loss(model, read[:4], labels[:4], None, world=world)
    corpus = Corpus("", text[:4].flatten().numpy(), *[text[:4].flatten().numpy()] * 2, start=257)
    windows = _stacked(corpus, [TextWindow(33 * i, 32, 32) for i in range(4)])
    torch.testing.assert_close(loss, token_losses(model, windows, scored=32).sum())
    assert begun.data_hashes != plain.data_hashes, "a run that began without it is not resumed with it"
    ours = small_config(tmp_path, tokenizer=str(place))
    of_ours = TokenObjective(ours.resolved())
    assert (of_ours.inputs(0, 2)[0][:, 0] == 257).all(), "a model of ours too"
    assert of_ours.make_model().config.bos_token_id == 257
    held_out = begun.held_out(model)
    assert (held_out.sample()[:, 0] == 257).all()
    assert held_out.losses(SummedLoss(model, begun, world), world, torch.float32).keys() == {"33", "66", "132"}


def test_a_fitted_checkpoint_goes_on_without_its_attention_dropout_and_the_log_says_so(tmp_path, caplog):
    fitted = lw.fit(FAMILIES["gpt2"](), "kerple")
    fitted.save_pretrained(tmp_path / "fitted")
    load_tokenizer("bytes").save_pretrained(tmp_path / "fitted")
    with caplog.at_level("INFO", logger="lengthwise"):
        run = train(config_of(tmp_path, start=str(tmp_path / "fitted"), encoding=None, steps=2, warmup=1))
    assert "GPT2LMHeadModel trains without its attention dropout, 0.1" in caplog.text
    assert fit_of(lw.load(run.final)).entry["attention_dropout"] == "leave out"


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.prove)])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, family, monkeypatch):
    start = checkpoint(tmp_path, family)
    whole = train(config_of(tmp_path, "whole", start=start, encoding="cable", maps_every=4))
    log = RunWriter.log

    def interrupted(self, line):
        if line["step"] == 6:
            raise KeyboardInterrupt
        log(self, line)

    config = {"start": start, "encoding": "cable", "maps_every": 4}
    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "log", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config_of(tmp_path, "parts", **config))
    resumed = train(config_of(tmp_path, "parts", **config, resume=True))
    assert_same_run(resumed, whole)
    for mine, other in zip(resumed.maps, whole.maps, strict=True):
        maps = [load_file(path) for path in (mine, other)]
        assert all(torch.equal(maps[0][name], maps[1][name]) for name in maps[0] | maps[1])


def test_two_processes_train_the_same_model_as_one(tmp_path):
    start = checkpoint(tmp_path)
    options = {"start": start, "encoding": "cable"}
    alone = train(config_of(tmp_path, "alone", **options))
    assert in_processes(lambda: train(config_of(tmp_path, "both", **options)), 2) == [0, 0]
    both = Run(tmp_path / "both")
    for mine, theirs in zip(numbers(both), numbers(alone), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
    weights = [lw.load(run.final).state_dict() for run in (alone, both)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=2e-3)


def test_the_command_drops_rope_and_other_commands_read_what_it_wrote(tmp_path, capsys, monkeypatch):
    start = checkpoint(tmp_path)
    config = config_of(tmp_path, "drope", start=start)
    options = ["--from", start, "--encoding", "none", "--data", config.data, "--out", config.out]
    options += ["--length", "33", "--batch-tokens", "165", "--steps", "3", "--evaluate-lengths", "33"]
    assert train_parser().parse_args(["--from", "x"]).start_from == "x"
    assert train_parser().parse_args(["--from=x"]).start_from == "x"
    main(["train", *options, "--dry-run"])
    assert "with none" in capsys.readouterr().out
    main(["train", *options])
    assert "has the model" in capsys.readouterr().out
    main(["evaluate", config.out, "--text", config.data, "--lengths", "33", "--windows", "2"])
    assert "drope" in capsys.readouterr().out
    main(["show", config.out, "--length", "24", "--out", str(tmp_path / "drope.png")])
    assert (tmp_path / "drope.png").is_file()


def test_a_name_that_is_no_folder_here_is_one_on_the_hub_with_and_without_an_owner(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "openai-community/gpt2"):
        assert TrainConfig(start_from=name, encoding="kerple").resolved().goes_on
    loud_model("rope").save_pretrained(tmp_path / "gpt2/final")
    assert not TrainConfig(start_from="gpt2").resolved().goes_on, "a run of ours of that name"
    with pytest.raises(ValueError, match="there is no such folder here"):
        TrainConfig(start_from="runs/gpt2").resolved()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoding": None}, "is not fitted yet, so an encoding must be given"),
        ({"encoding": "cabel"}, "did you mean 'cable'"),
        ({"preset": "tiny"}, "decides the sizes of the model, got --preset tiny"),
        ({"tokenizer": "bytes"}, "decides the tokenizer, got --tokenizer bytes"),
        ({"sizes": {"n_layer": 3}}, "goes on without --sizes"),
        ({"layers": "none"}, "--encoding and --layers say the same thing"),
        ({"optimizer": "muon"}, "use --optimizer adamw"),
        ({"context_parallel": 2}, "without --context-parallel"),
        ({"encoding": "own", "length": 200, "batch_tokens": 200}, "ends at 132, got length 200"),
    ],
)
def test_what_such_a_run_cannot_have_is_refused_before_its_folder_is_made(tmp_path, gpt2, changes, message):
    with pytest.raises((ValueError, lw.PositionError), match=message):
        train(config_of(tmp_path, start=gpt2, **changes))
    assert not (tmp_path / "run" / "config.yaml").exists()
