"""A self-contained HTML page: tables, figures inside, readable on a phone, light or dark."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; } h3 { margin-top: 1.5rem; }
p.about { color: #888; font-size: .85rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
p, figure { max-width: 60rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; min-width: 3.2rem; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
tr.ours td { font-weight: 600; } tr.ours td:not(:first-child) { background: var(--soft); }
figure { margin: 1rem 0; } figcaption { font-size: .85rem; color: #888; }
img { max-width: 100%; height: auto; background: #fff; border-radius: .4rem; }
summary { cursor: pointer; padding: .3rem 0; }
pre { font-size: .8rem; background: var(--soft); padding: .6rem; border-radius: .4rem; }
code { background: var(--soft); padding: 0 .2rem; border-radius: .2rem; }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """The whole document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    """A heading."""
    return f"<h{level}>{html.escape(text)}</h{level}>"


def note(text: str) -> str:
    """A small line about where numbers come from."""
    return f'<p class="about">{html.escape(text)}</p>'


def paragraph(text: str) -> str:
    """A paragraph of Markdown text: `code` between backticks, of links the text."""
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(text.split()))
    parts = html.escape(plain).split("`")
    return "<p>" + "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts)) + "</p>"


def preformatted(text: str) -> str:
    """Text as it is, in its own scrolling box."""
    return f'<pre class="wide">{html.escape(text)}</pre>'


def table(markdown: str) -> str:
    """A Markdown table (of `markdown_table`) as HTML; RoLaQ's rows stand out."""
    lines = [_cells(line) for line in markdown.strip().split("\n") if line.startswith("|")]
    if not lines:
        return ""
    head = "".join(f"<th>{cell}</th>" for cell in lines[0])
    body = "\n".join(_row(cells) for cells in lines[2:])
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _cells(line: str) -> list[str]:
    return [html.escape(cell.strip()) for cell in line.strip().strip("|").split("|")]


def _row(cells: list[str]) -> str:
    ours = ' class="ours"' if cells[0].startswith("rolaq") else ""
    return f"<tr{ours}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def figure(title: str, path: Path) -> str:
    """A PNG file, embedded."""
    data = base64.b64encode(path.read_bytes()).decode()
    caption = html.escape(title)
    return f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'


def folded(title: str, content: str) -> str:
    """Content that opens on a tap."""
    return f"<details><summary>{html.escape(title)}</summary>{content}</details>"
