"""Store the results of a finished study in docs/results, which is what README and docs cite.

python docs/results.py study default
"""

import argparse
import json
import shutil
from pathlib import Path

from lengthwise import __version__

STORED = Path(__file__).parent / "results"
FILES = ("report.html", "report.md", "study.json", "rise.png", "lengths.png", "losses.png")
MORE_FILES = ("far.png", "retrieval.png", "contrastive.png", "tasks.png")
"""Of several encodings, and of a study with retrieval or tasks."""


def store_results(study: Path, name: str) -> Path:
    """Copy a study's report, values and figures; an error unless they are whole and of this version."""
    missing = [file for file in FILES if not (study / file).is_file()]
    if missing:
        raise FileNotFoundError(f"{study} must have the files of a finished study, got no {', '.join(missing)}")
    content = json.loads((study / "study.json").read_text())
    if content["missing"]:
        raise ValueError(f"all runs of a study must be measured, got none of {', '.join(content['missing'])}")
    version = content["born"]["versions"]["lengthwise"]
    if version != __version__:
        raise ValueError(f"results must be of Lengthwise {__version__}, got {version}; run the study again")
    folder = STORED / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*FILES, *(file for file in MORE_FILES if (study / file).is_file())):
        shutil.copyfile(study / file, folder / file)
    return folder


def stored_results(name: str) -> dict | None:
    """The values of a stored study, if it is there; with the version that measured them where it is another one."""
    path = STORED / name / "study.json"
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    version = content["born"]["versions"]["lengthwise"]
    return content | {"of_another_version": None if version == __version__ else version}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, help="the folder of a finished study")
    parser.add_argument("name", help="its name in docs/results")
    options = parser.parse_args()
    print(store_results(options.study, options.name))
