"""The live page: the report's content, a button to stop the run, and the script that updates both."""

from __future__ import annotations

from typing import Any

from syncline.observe.page.document import document, text
from syncline.observe.report.record import RunRecord
from syncline.observe.report.report_page import content, heading, title_of
from syncline.observe.report.report_style import STYLE
from syncline.observe.report.script import SCRIPT

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
  const every = 1000, retry = 5000;
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const headers = {"X-Syncline-Token": token};
  const by = id => document.getElementById(id);
  const stop = by("stop"), status = by("status");
  let tag = null, asked = false;

  const put = update => {
    const chosen = document.querySelector("input[name=axis]:checked")?.id, focused = document.activeElement?.id;
    by("heading").innerHTML = update.heading;
    by("content").innerHTML = update.content;
    if (chosen && by(chosen)) by(chosen).checked = true;
    if (focused) by(focused)?.focus({preventScroll: true});
    stop.hidden = !update.can_stop;
    if (!update.can_stop && asked) { status.textContent = "The run has stopped; its work is saved."; asked = false; }
    document.title = update.title;
    document.body.dataset.status = update.status;
  };

  const look = async () => {
    let next = every;
    try {
      const answer = await fetch("/update", {headers: tag ? {...headers, "If-None-Match": tag} : headers});
      if (answer.status === 200) { tag = answer.headers.get("ETag"); put(await answer.json()); }
      else if (answer.status !== 304) throw new Error(String(answer.status));
      status.classList.remove("gone");
      if (status.dataset.gone) { status.textContent = ""; delete status.dataset.gone; }
    } catch {
      status.textContent = "No connection to syncline watch. Showing the last known state.";
      status.dataset.gone = "1";
      next = retry;
    }
    setTimeout(look, next);
  };

  stop.addEventListener("click", async () => {
    stop.disabled = true;
    const answer = await fetch("/stop", {method: "POST", headers}).catch(() => null);
    asked = answer?.status === 202;
    status.textContent = asked ? "Stopping after the current step." : "Cannot stop: the run is not live.";
    stop.disabled = asked;
  });
  setTimeout(look, every);
})();
"""


def live_page(run: RunRecord) -> str:
    """The whole page; its script then polls for updates."""
    hidden = "" if run.is_live else " hidden"
    body = f"""<header>
<div id="heading">{heading([run])}</div>
<div class="controls"><button id="stop" type="button"{hidden}>Stop and save</button>
<p id="status" role="status"></p></div>
</header>
<main id="content">
{content([run])}
</main>
<footer>Live view of <code>{text(run.name)}</code> by <code>syncline watch</code>. To save a copy:
<code>syncline report</code>.</footer>"""
    return document(title=title_of([run]), body=body, style=STYLE + _STYLE, script=SCRIPT + _SCRIPT, may_connect=True)


def update(run: RunRecord) -> dict[str, Any]:
    """What the script needs to update the page."""
    return {
        "heading": heading([run]), "content": content([run]), "title": title_of([run]), "status": run.status,
        "can_stop": run.is_live,
    }  # fmt: skip
