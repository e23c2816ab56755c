"""The HTML document around a page: one self-contained file, without network, fonts or other scripts.

Here: `document`, and `text`, which escapes everything that comes from users. Not here: the content
(`lab/bench/html.py`, `observe/report/report_page.py`), how they look (`style.py`).
"""

from __future__ import annotations

import base64
import hashlib
from html import escape

from syncline.observe.formatting import clean


def document(*, title: str, body: str, style: str, script: str = "", may_connect: bool = False) -> str:
    """A whole page. Its content security policy allows only embedded images and this script."""
    policy = ["default-src 'none'", "style-src 'unsafe-inline'", "img-src data:"]
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy.append(f"script-src 'sha256-{digest}'")
    if may_connect:
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
    """Escaped for HTML, without control characters."""
    return escape("\n".join(clean(line) for line in words.splitlines()))


def region(content: str, label: str) -> str:
    """A scrollable region for wide content, also by keyboard."""
    return f'<div class="scroll" role="region" aria-label="{text(label)}" tabindex="0">{content}</div>'
