"""What a report consists of, sections: rendered to one HTML file that opens offline, to Markdown and to JSON.

In HTML every string is escaped, pictures are inside the file, and there is no script.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from lengthwise.evaluate.table import markdown
from lengthwise.views.style import in_few_colours

STYLE = """
:root{color-scheme:light}body{font:16px/1.55 system-ui,sans-serif;max-width:60rem;margin:3rem auto;padding:0 1.2rem;
color:#1b1f24;background:#fff}h1{font-size:1.9rem;line-height:1.2}h2{margin-top:2.6rem;font-size:1.25rem;
border-bottom:1px solid #d8dee4;padding-bottom:.3rem}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;
margin:1rem 0 1rem 50%;transform:translateX(-50%);display:block;overflow-x:auto;width:max-content;min-width:100%;
max-width:calc(100vw - 3rem)}td,th{padding:.28rem .6rem;text-align:right;border-bottom:1px solid #eaeef2;
white-space:nowrap}td:first-child,th:first-child{text-align:left}th{border-bottom:2px solid #57606a}
img{max-width:100%;height:auto}
pre{background:#f6f8fa;padding:.9rem;overflow-x:auto;font-size:.8rem;line-height:1.5}small,figcaption{color:#57606a}
figure{margin:1.4rem 0}
"""

Rows = list[list[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG and its caption; one with a name is also a file of its own."""

    content: bytes
    caption: str
    name: str = ""


@dataclass(frozen=True)
class Section:
    """One part of the report; the first row of a table is its heading."""

    title: str
    paragraphs: Sequence[str] = ()
    table: Rows | None = None
    pictures: Sequence[Picture] = ()
    code: str = ""


def as_json(section: Section) -> dict[str, Any]:
    """A section without the pixels of its pictures."""
    return {
        "title": section.title,
        "paragraphs": list(section.paragraphs),
        "table": section.table,
        "pictures": [picture.caption for picture in section.pictures],
        "code": section.code,
    }


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """The report without pictures; sections that are nothing but pictures are left out."""
    blocks = [f"# {title}"]
    for section in sections:
        parts = [*section.paragraphs]
        parts += [markdown(section.table)] if section.table else []
        parts += [f"```\n{section.code}\n```"] if section.code else []
        blocks += [f"## {section.title}", *parts] if section.table or section.code or not section.pictures else []
    return "\n\n".join(blocks) + "\n"


def as_html(title: str, sections: Sequence[Section]) -> str:
    """The report as one file."""
    body = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        body += [f"<h2>{escape(section.title)}</h2>", *(f"<p>{escape(text)}</p>" for text in section.paragraphs)]
        body += [_html_table(section.table)] if section.table else []
        body += [_html_picture(picture) for picture in section.pictures]
        body += [f"<pre>{escape(section.code)}</pre>"] if section.code else []
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _html_table(rows: Rows) -> str:
    tagged = [("th", rows[0]), *(("td", row) for row in rows[1:])]
    lines = ["<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>" for tag, row in tagged]
    return "<table>" + "\n".join(lines) + "</table>"


def _html_picture(picture: Picture) -> str:
    data = base64.b64encode(in_few_colours(picture.content)).decode()
    caption = escape(picture.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )
