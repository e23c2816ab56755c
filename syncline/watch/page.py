"""The live page: the report's content, with a button to stop the run, and the script that keeps it up to date."""

from __future__ import annotations

from typing import Any

from syncline.page.document import document, text
from syncline.report.page import content, heading, title_of
from syncline.report.record import RunRecord
from syncline.report.script import SCRIPT
from syncline.report.style import STYLE

__all__ = ["TOKEN_HEADER", "live_page", "news"]

TOKEN_HEADER = "X-Syncline-Token"  # the name of a header, not a secret

_STYLE = """
.controls { display: flex; flex-wrap: wrap; gap: 0.5rem 1rem; align-items: center; min-height: 2.2rem; }
.controls p { margin: 0; color: var(--soft); font-size: 0.9rem; }
button {
  font: inherit; font-size: 0.95rem; color: var(--ink); background: var(--panel); border: 1px solid var(--rule);
  border-radius: 6px; padding: 0.3rem 0.9rem; cursor: pointer;
}
button:hover:enabled { border-color: var(--soft); }
button:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }
button:disabled { color: var(--soft); cursor: default; }
"""

_SCRIPT = r"""
(() => {
  const every = 1000, patience = 5000;
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const headers = {"X-Syncline-Token": token};
  const by = id => document.getElementById(id);
  const stop = by("stop"), told = by("told");
  let tag = null, asked = false;

  const put = news => {
    const chosen = document.querySelector("input[name=axis]:checked")?.id, focused = document.activeElement?.id;
    by("heading").innerHTML = news.heading;
    by("content").innerHTML = news.content;
    if (chosen && by(chosen)) by(chosen).checked = true;
    if (focused) by(focused)?.focus({preventScroll: true});
    stop.hidden = !news.can_stop;
    if (!news.can_stop && asked) { told.textContent = "It has stopped; its work is saved."; asked = false; }
    document.title = news.title;
    document.body.dataset.status = news.status;
  };

  const look = async () => {
    let next = every;
    try {
      const answer = await fetch("/news", {headers: tag ? {...headers, "If-None-Match": tag} : headers});
      if (answer.status === 200) { tag = answer.headers.get("ETag"); put(await answer.json()); }
      else if (answer.status !== 304) throw new Error(String(answer.status));
      told.classList.remove("gone");
      if (told.dataset.gone) { told.textContent = ""; delete told.dataset.gone; }
    } catch {
      told.textContent = "syncline watch does not answer: this is what was known last.";
      told.dataset.gone = "1";
      next = patience;
    }
    setTimeout(look, next);
  };

  stop.addEventListener("click", async () => {
    stop.disabled = true;
    const answer = await fetch("/stop", {method: "POST", headers}).catch(() => null);
    asked = answer?.status === 202;
    told.textContent = asked ? "Asked to stop: it saves after the current step." : "The run could not be asked.";
    stop.disabled = asked;
  });
  setTimeout(look, every);
})();
"""


def live_page(run: RunRecord) -> str:
    """The whole page as it is now; from then on it asks for news."""
    hidden = "" if run.is_live else " hidden"
    body = f"""<header>
<div id="heading">{heading([run])}</div>
<div class="controls"><button id="stop" type="button"{hidden}>Stop, and save the work</button>
<p id="told" role="status"></p></div>
</header>
<main id="content">
{content([run])}
</main>
<footer>Live from <code>{text(run.name)}</code>, by <code>syncline watch</code>. To keep it:
<code>syncline report</code>.</footer>"""
    return document(
        title=title_of([run]), body=body, style=STYLE + _STYLE, script=SCRIPT + _SCRIPT, may_ask_its_server=True
    )


def news(run: RunRecord) -> dict[str, Any]:
    """What the page needs to be up to date."""
    return {
        "heading": heading([run]), "content": content([run]), "title": title_of([run]), "status": run.status,
        "can_stop": run.is_live,
    }  # fmt: skip
