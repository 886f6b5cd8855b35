"""The house rules that a machine can check: imports point down, what is shown runs, and nothing heavy loads unasked."""

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import lengthwise as lw
from lengthwise.encodings.catalogue import grouped, overview, page, two_sided_table
from lengthwise.testing import check_laws

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src/lengthwise").rglob("*.py"))
# Each room may import from itself and from those before it.
ROOMS = [
    "errors",
    "files",
    "options",
    "token_layout",
    "visibility",
    "bias",
    "rescore",
    "encodings",
    "origin",
    "attention",
    "testing",
    "model",
    "distributed",
    "tasks",
    "data",
    "runs",
    "loading",
    "views",
    "inspect",
    "evaluate",
    "train",
    "show",
    "study",
    "serve",
    "cli",
]
NAMED = re.compile(r"[\w/]+\.py\b")
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def imported(tree: ast.AST) -> list[str]:
    """Everything of ours that a file imports, at its top or later, by its full name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("lengthwise"):
            found += (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "lengthwise"
                else [node.module]
            )
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("lengthwise")]
        assert not (isinstance(node, ast.ImportFrom) and node.level), "imports name their module in full"
    return found


ROOM_SOURCES = [path for path in SOURCES if path != ROOT / "src/lengthwise/__init__.py"]


@pytest.mark.parametrize("path", ROOM_SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_imports_only_point_down(path):
    room = path.relative_to(ROOT / "src/lengthwise").parts[0].removesuffix(".py")
    for module in imported(ast.parse(path.read_text())):
        other = module.split(".")[1]
        if other == "__version__":
            continue
        assert ROOMS.index(other) <= ROOMS.index(room), f"{room} imports {module}, which is above it"


ATTENTION = ROOT / "src/lengthwise/attention"
BACKENDS = ("native", "row_block", "sdpa", "flex", "reference", "triton")


def backend_of(module: str) -> str | None:
    """The backend that a module of attention/ belongs to; None for what all of them share."""
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[:2] == ["lengthwise", "attention"] and parts[2] in BACKENDS else None


@pytest.mark.parametrize("path", sorted(ATTENTION.rglob("*.py")), ids=lambda p: str(p.relative_to(ATTENTION)))
def test_backends_never_import_one_another(path):
    module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    own, above = backend_of(module), tuple(f"lengthwise.attention.{name}" for name in ("__init__", "info", "prove"))
    names = imported_names(ast.parse(path.read_text()))
    others = {other for name in names if (other := backend_of(name)) is not None and other != own}
    assert not others or module in above, f"{module} imports {sorted(others)}"


def imported_names(tree: ast.AST) -> list[str]:
    """Every module of ours that a file imports, where `from lengthwise.attention import sdpa` is one of them."""
    return [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lengthwise")
        for alias in node.names
    ]


def test_modules_import_without_cycles():
    """Late imports included: a cycle that is hidden in a function is one."""
    modules = {
        ".".join(p.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"): p for p in SOURCES
    }
    graph = {}
    for name, path in modules.items():
        names = imported_names(ast.parse(path.read_text())) if name != "lengthwise" else []
        graph[name] = {n if n in modules else n.rpartition(".")[0] for n in names} - {name}
    assert list(TopologicalSorter(graph).static_order()), "an error names the cycle"


PUBLIC = ("", ".data", ".distributed", ".evaluate", ".inspect", ".model", ".runs", ".testing", ".train", ".views")


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_a_docstring(package):
    module = importlib.import_module(f"lengthwise{package}")
    for name in getattr(module, "__all__", []):
        value = getattr(module, name)
        if isinstance(value, type) or inspect.isfunction(value):
            assert inspect.getdoc(value), name
        for method, own in vars(value).items() if isinstance(value, type) else ():
            if inspect.isfunction(own) and not method.startswith("_"):
                assert inspect.getdoc(getattr(value, method)), f"{name}.{method}"


RETIRED = {"asked", "came", "found", "kept", "made", "may", "said", "told", "way"}
"""Names that say nothing: they may stand for a few lines inside a function, and nowhere else."""


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_names_say_what_a_thing_is(path):
    tree = ast.parse(path.read_text())
    names = {path.stem.strip("_")}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name.strip("_"))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
        if isinstance(node, ast.Module | ast.ClassDef):
            targets = [t for own in node.body if isinstance(own, ast.Assign) for t in own.targets]
            targets += [own.target for own in node.body if isinstance(own, ast.AnnAssign)]
            names |= {target.id.lower().strip("_") for target in targets if isinstance(target, ast.Name)}
    assert sorted(names & RETIRED) == []
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [text for text in texts if re.search(r"\bcame\b|\bMend\b", text)], "an error says what it got"


def test_python_files_that_the_kernels_name_are_there():
    folder = ROOT / "src/lengthwise/attention/native"
    named = [name for file in (*folder.glob("*.cpp"), *folder.glob("*.h")) for name in NAMED.findall(file.read_text())]
    assert named
    for name in named:
        assert any((place / name).is_file() for place in (folder, folder.parent, folder.parent.parent)), name


def test_the_rooms_are_those_that_exist():
    rooms = {p.relative_to(ROOT / "src/lengthwise").parts[0].removesuffix(".py") for p in SOURCES} - {"__init__"}
    assert rooms <= set(ROOMS)


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_using_or_proving_an_encoding_loads_neither_transformers_nor_matplotlib():
    use = "import sys, lengthwise as lw; lw.make('alibi', heads=4, width=32); lw.attend"
    code = f"{use}; import lengthwise.attention.prove; print(*sys.modules)"
    loaded = run_python(code).split()
    assert "torch" in loaded
    assert not {"transformers", "matplotlib"} & set(loaded)


def test_tests_are_collected_where_no_optional_package_is_installed():
    """Files that import one are read for their doctests, too; without it `make test` ended before its first test."""
    code = """
import sys, pytest
sys.modules.update(dict.fromkeys(["triton", "ray", "submitit", "sentence_transformers", "datasets", "starlette"]))
sys.exit(pytest.main(["--collect-only", "--ignore-glob=tests/test_*", "src", "tests"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:]


def test_asking_for_help_does_not_wait_for_torch():
    assert "torch" not in run_python("import sys, lengthwise.cli; print(*sys.modules)").split()


def test_every_public_name_is_there_and_an_unknown_one_is_not():
    for name in lw.__all__:
        assert getattr(lw, name) is not None
    with pytest.raises(AttributeError, match="bogus"):
        lw.bogus  # noqa: B018


def test_the_blocks_of_the_readme_run_in_order():
    scope: dict[str, object] = {}
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda p: p.name)
def test_links_lead_to_files_that_are_there(path):
    for link in LINK.findall(path.read_text()):
        assert (path.parent / link).exists(), link


def test_the_readme_shows_the_table_that_the_command_prints():
    assert overview() in (ROOT / "README.md").read_text(), "run `make table`"
    pages = (ROOT / "docs/encodings.md").read_text()
    assert grouped() in pages, "run `make table`"
    assert all(page(name) in pages for name in lw.ENCODINGS), "run `make table`"
    assert two_sided_table() in (ROOT / "docs/encoders.md").read_text(), "run `make table`"


def test_a_newcomer_who_follows_contributing_gets_an_encoding_that_obeys_all_laws(tmp_path):
    (block,) = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
    file = tmp_path / "root.py"
    file.write_text(block)
    spec = importlib.util.spec_from_file_location("root", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    try:
        assert lw.make("root", heads=12, width=768, steepest=0.5).learned_parameters == 12
        check_laws("root")
    finally:
        del lw.ENCODINGS["root"]


def test_a_broken_law_is_named():
    class Clairvoyant(lw.Encoding):
        paper = "unpublished"
        kind = lw.DenseBias

        def bias(self, x, layout, state=None):
            level = x.mean(-1).cumsum(1).flip(1)
            return lw.DenseBias(level[:, None, :, None] * level[:, None, None, :])

    lw.register("clairvoyant", Clairvoyant)
    try:
        with pytest.raises(AssertionError, match="Changing the last token"):
            check_laws("clairvoyant")
    finally:
        del lw.ENCODINGS["clairvoyant"]
