"""What would be published: a wheel and a source distribution that are whole, and the README runs on the wheel alone."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUFFIXES = (".py", ".cpp", ".h", ".js", ".css", ".html", ".json", ".typed", ".safetensors")


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Both distributions, built from a copy of what git has, by the backend that is installed."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "hatchling", "build", "-d", folder / "out", cwd=source)
    return folder / "out"


def test_both_distributions_have_every_file_that_the_package_needs(dist):
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    package = ROOT / "src"
    needed = {
        path.relative_to(package).as_posix()
        for path in (package / "lengthwise").rglob("*")
        if path.is_file() and path.suffix in SUFFIXES
    }
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    assert needed <= in_wheel, sorted(needed - in_wheel)
    assert any(name.endswith("licenses/LICENSE") for name in in_wheel)
    assert not any(name.startswith(("tests", "benchmarks")) for name in in_wheel)
    with tarfile.open(source) as archive:
        in_source = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in needed} | {"README.md", "LICENSE", "pyproject.toml", "Makefile"} <= in_source


def test_the_metadata_can_be_published(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_string(archive.read(name).decode())
    assert metadata["Name"] == "lengthwise"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "# Lengthwise" in metadata.get_payload()
    pytest.importorskip("twine", reason="twine, which checks what is published, is not installed")
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())


def test_the_readme_runs_on_the_wheel_alone(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # The dependencies of this environment; a plain path, so that what is installed here as a link to the source is not.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    program = """
import re, sys, lengthwise
assert lengthwise.__file__.startswith(sys.prefix), lengthwise.__file__
scope = {}
for block in re.findall(r"^```python\\n(.*?)^```", open(sys.argv[1]).read(), re.DOTALL | re.MULTILINE):
    exec(block, scope)
from lengthwise.attention.native import build
print(build.fault())
"""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    fault = run(python, "-c", program, ROOT / "README.md", cwd=tmp_path, env=clean).splitlines()[-1]
    assert fault == "None" or "compiler" in fault
    assert "kerple" in run(tmp_path / "venv/bin/lengthwise", "encodings", cwd=tmp_path, env=clean)
