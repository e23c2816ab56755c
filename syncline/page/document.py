"""The document around a page: one file that needs nothing else, no network, no font, no other script.

Here: `document`, and `text`, through which everything goes that was not written here. Not here: what pages say
(`bench/html.py`, `report/page.py`), how they look (`style.py`).
"""

from __future__ import annotations

import base64
import hashlib
from html import escape

from syncline.view.words import clean

__all__ = ["document", "region", "text"]


def document(*, title: str, body: str, style: str, script: str = "", may_ask_its_server: bool = False) -> str:
    """A whole page. A browser lets it load nothing but the pictures inside it, and run no script but this one."""
    policy = ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data:"]
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy.append(f"script-src 'sha256-{digest}'")
    if may_ask_its_server:
        policy.append("connect-src 'self'")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{"; ".join(policy)}">
<title>{text(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def text(words: str) -> str:
    """Text as it is to be read, whatever is in it."""
    return escape("\n".join(clean(line) for line in words.splitlines()))


def region(content: str, label: str) -> str:
    """Something that may be wider than the screen: it scrolls by itself, with the keyboard, too."""
    return f'<div class="scroll" role="region" aria-label="{text(label)}" tabindex="0">{content}</div>'
