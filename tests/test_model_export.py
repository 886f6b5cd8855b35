"""An exported folder loads and runs in a process that has no Lengthwise."""

import ast
import json
import subprocess
import sys

import pytest
import torch
from model_kit import CASES, SCHEDULES, loud_model, tokens
from safetensors import safe_open
from transformers.utils.logging import enable_progress_bar

import lengthwise as lw
from lengthwise.cli import main
from lengthwise.loading import LoadError, resolve_checkpoint
from lengthwise.model import LengthwiseConfig, LengthwiseEncoderConfig, LengthwiseForSequenceClassification
from lengthwise.model.export import (
    FOOTER,
    ExportError,
    check_exportable,
    export,
    exported_modules,
    flat_files,
    flat_name,
)

ELSEWHERE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lengthwise", "jaxtyping", "jsonargparse"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModel, AutoModelForCausalLM
for folder in sys.argv[1:]:
    saved = torch.load(folder + "/expected.pt")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        error = (model(saved["ids"]).logits - saved["logits"]).abs().max() / saved["logits"].abs().max()
        new = model.generate(saved["ids"][:, :9], max_new_tokens=5, do_sample=False, pad_token_id=0)
        if saved["stock"]:
            model.set_attn_implementation("sdpa")
            error = max(error, (model(saved["ids"]).logits - saved["logits"]).abs().max() / saved["logits"].abs().max())
    assert error < 1e-5, (folder, error)
    assert torch.equal(new, saved["new"]), folder
    print("same", folder)
"""


def assert_loads_elsewhere(cases, tmp_path):
    folders = []
    for case in cases:
        model, ids = loud_model(case), tokens()
        model.save_pretrained(tmp_path / "run" / case)
        out = export(tmp_path / "run" / case, tmp_path / "out" / case.replace("-", "_").replace(" ", "_"))
        new = model.generate(ids[:, :9], max_new_tokens=5, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            saved = {"ids": ids, "logits": model(ids).logits, "new": new, "stock": not model.config.stock_attention}
        torch.save(saved, out / "expected.pt")
        folders.append(str(out))
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, *folders], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same") == len(folders)


def test_exported_models_load_side_by_side_where_lengthwise_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert_loads_elsewhere(["cable", "kerple", "dapev2-cable", "learned", "chunks"], tmp_path)


def test_a_classifier_keeps_its_head(tmp_path):
    torch.manual_seed(0)
    model = LengthwiseForSequenceClassification(LengthwiseEncoderConfig(n_layer=1, n_embd=24, n_head=3, num_labels=5))
    model.save_pretrained(tmp_path / "model")
    out = export(tmp_path / "model", tmp_path / "out")
    with safe_open(out / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("score.weight"), model.score.weight)
    assert "AutoModelForMaskedLM" not in json.loads((out / "config.json").read_text())["auto_map"]


@pytest.mark.prove
def test_every_exported_encoding_loads_where_lengthwise_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert_loads_elsewhere([*CASES, *SCHEDULES], tmp_path)


def test_exported_files_are_ours_byte_for_byte_but_for_the_lines_that_import_our_own_modules():
    files, modules = flat_files(), exported_modules()
    for module, path in modules.items():
        text = files.pop(f"{flat_name(module)}.py").partition(FOOTER)[0]
        compile(text, path.name, "exec")
        ours = path.read_text().splitlines()
        theirs = text.splitlines()
        assert len(ours) == len(theirs)
        for line, copied in zip(ours, theirs, strict=True):
            assert line == copied or line.lstrip().startswith(("from lengthwise.", "from jaxtyping "))
    assert set(files) == {"shapes.py"}


def test_exported_files_import_nothing_but_one_another_and_what_every_model_of_transformers_has():
    names = {name.removesuffix(".py") for name in flat_files()}
    for text in flat_files().values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert {node.module} <= names if node.module else {alias.name for alias in node.names} <= names
            elif isinstance(node, ast.Import | ast.ImportFrom):
                roots = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                tops = {str(root).partition(".")[0] for root in roots}
                assert tops <= {*sys.stdlib_module_names, "torch", "numpy", "transformers", "huggingface_hub"}


def test_an_encoding_of_somebody_else_cannot_be_exported():
    class Stranger(lw.Encoding):
        paper, kind = "unpublished", None

    lw.register("stranger", Stranger)
    try:
        with pytest.raises(ExportError, match="'stranger'"):
            check_exportable(LengthwiseConfig(encoding="stranger"))
    finally:
        del lw.ENCODINGS["stranger"]


def test_the_command_exports_the_only_checkpoint_of_a_run(tmp_path, capsys):
    model = loud_model("alibi")
    model.save_pretrained(tmp_path / "run" / "checkpoints" / "last")
    (tmp_path / "run" / "checkpoints" / "last" / "tokenizer.json").write_text("{}")
    capsys.readouterr()
    enable_progress_bar()  # which another test's training may have disabled
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert "trust_remote_code" in printed.out
    assert printed.err == "", "no progress bars where there is no terminal"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_lengthwise.LengthwiseForCausalLM"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    with pytest.raises(FileExistsError, match="new or empty"):
        export(tmp_path / "run", tmp_path / "out")
    model.save_pretrained(tmp_path / "run" / "checkpoints" / "first")
    with pytest.raises(LoadError, match=r"first.*last"):
        resolve_checkpoint(tmp_path / "run")
