"""The page to try a model by hand: draw, upload a picture, type numbers or text.

One document without other resources; it asks the server that it comes from. What a model takes follows from its
metadata; a model from elsewhere, without metadata, gets rows of numbers. Not here: preparing inputs (`friendly.py`).
"""

from __future__ import annotations

from html import escape

from syncline.observe.page.base_style import BASE
from syncline.observe.page.document import document, text
from syncline.serving.server.registry import LoadedVersion, Registry

__all__ = ["try_page"]

_STYLE = """
form { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start; }
.input { flex: 0 1 20rem; } .output { flex: 1 1 16rem; min-height: 4rem; }
canvas {
  display: block; width: 100%; max-width: 280px; aspect-ratio: 1; background: #ffffff; border: 1px solid var(--rule);
  border-radius: 8px; touch-action: none; cursor: crosshair; margin-bottom: 0.6rem;
}
textarea {
  width: 100%; min-height: 6rem; padding: 0.5rem; font: 0.9rem ui-monospace, monospace;
  color: var(--ink); background: var(--panel); border: 1px solid var(--rule); border-radius: 6px;
}
label { display: block; font-weight: 500; margin-bottom: 0.3rem; }
input[type=file] { font: inherit; font-size: 0.9rem; max-width: 100%; margin-bottom: 0.6rem; }
button {
  font: inherit; font-size: 0.95rem; color: var(--ink); background: var(--panel); border: 1px solid var(--rule);
  border-radius: 6px; padding: 0.3rem 0.9rem; cursor: pointer; margin: 0.3rem 0.5rem 0 0;
}
button:hover { border-color: var(--soft); }
button:focus-visible, textarea:focus-visible, canvas:focus-visible { outline: 2px solid var(--link); }
.answer { font-size: 2.5rem; font-weight: 600; line-height: 1.2; overflow-wrap: anywhere; }
meter { width: 100%; height: 0.8rem; }
.numbers td:nth-child(2) { width: 70%; }
caption { text-align: left; color: var(--soft); font-size: 0.85rem; }
.wrong { color: var(--failed); }
"""

_SCRIPT = r"""
(() => {
  const token = new URLSearchParams(location.search).get("token");
  const headers = token ? {Authorization: "Bearer " + token} : {};
  const make = (tag, words, name) => {
    const made = document.createElement(tag);
    if (words !== undefined) made.textContent = words;
    if (name) made.className = name;
    return made;
  };

  const show = (output, answer) => {
    output.replaceChildren();
    for (const one of answer.predictions) {
      const label = one.class ?? one.next;
      if (label === undefined) { output.append(make("pre", JSON.stringify(one, null, 1))); continue; }
      output.append(make("div", one.next !== undefined ? JSON.stringify(label) : label, "answer"));
      output.append(make("p", (100 * one.probability).toFixed(1) + "% sure"));
      const all = Object.entries(one.probabilities ?? {}).sort((a, b) => b[1] - a[1]).slice(0, 5);
      if (!all.length) continue;
      const table = make("table", undefined, "numbers"), body = make("tbody");
      table.append(make("caption", "Most likely classes"), body);
      for (const [name, share] of all) {
        const row = make("tr"), head = make("th", name), bar = make("td"), meter = make("meter");
        head.scope = "row"; meter.value = share; meter.setAttribute("aria-label", name);
        bar.append(meter); row.append(head, bar, make("td", (100 * share).toFixed(1) + "%")); body.append(row);
      }
      output.append(table);
    }
    output.append(make("p", "Version " + answer.model_version, "lead"));
  };

  const ask = async (form, body, kind) => {
    const output = form.querySelector(".output");
    try {
      const address = "/v2/models/" + encodeURIComponent(form.dataset.model) + "/predict";
      const reply = await fetch(address, {method: "POST", headers: {...headers, "Content-Type": kind}, body});
      const answer = await reply.json();
      if (reply.ok) show(output, answer); else output.replaceChildren(make("p", answer.error, "wrong"));
    } catch {
      output.replaceChildren(make("p", "No connection to the server.", "wrong"));
    }
    form.dataset.asked = String(Number(form.dataset.asked ?? 0) + 1);
  };

  const rows = words => words.trim().split("\n").map(line => line.split(/[\s,;]+/).filter(Boolean).map(Number));

  const draw = form => {
    const canvas = form.querySelector("canvas");
    if (!canvas) return;
    const pen = canvas.getContext("2d");
    const clear = () => { pen.fillStyle = "#ffffff"; pen.fillRect(0, 0, canvas.width, canvas.height); };
    const at = event => {
      const box = canvas.getBoundingClientRect(), scale = canvas.width / box.width;
      return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    };
    let last = null;
    clear();
    pen.lineWidth = 20; pen.lineCap = pen.lineJoin = "round"; pen.strokeStyle = "#000000";
    canvas.addEventListener("pointerdown", event => { canvas.setPointerCapture(event.pointerId); last = at(event); });
    canvas.addEventListener("pointermove", event => {
      if (!last) return;
      const next = at(event);
      pen.beginPath(); pen.moveTo(...last); pen.lineTo(...next); pen.stroke();
      last = next;
    });
    canvas.addEventListener("pointerup", () => {
      if (last) canvas.toBlob(picture => ask(form, picture, "image/png"), "image/png");
      last = null;
    });
    form.querySelector(".clear").addEventListener("click", () => {
      clear(); form.querySelector(".output").replaceChildren();
    });
  };

  for (const form of document.querySelectorAll("form")) {
    draw(form);
    form.querySelector("input[type=file]")?.addEventListener("change", event => {
      const picture = event.target.files[0];
      if (picture) ask(form, picture, picture.type || "image/png");
    });
    form.addEventListener("submit", event => {
      event.preventDefault();
      const words = form.querySelector("textarea")?.value ?? "";
      const sent = form.dataset.kind === "text" ? {text: words} : {rows: rows(words)};
      ask(form, JSON.stringify(sent), "application/json");
    });
  }
})();
"""


def try_page(registry: Registry) -> str:
    """The page for all models."""
    versions = [registry.find(name, None) for name in registry.names() if registry.has_stable(name)]
    models = "\n".join(_section(version) for version in versions)
    body = f"""<header>
<h1>Try it</h1>
<p class="lead">Models served by <code>syncline serve</code>, over the Open Inference Protocol.</p>
</header>
<main>
{models}
</main>"""
    return document(title="Try it", body=body, style=BASE + _STYLE, script=_SCRIPT, may_connect=True)


def _section(version: LoadedVersion) -> str:
    name = version.served.model
    metadata = version.metadata
    kind = metadata.kind if metadata is not None else "table"
    field = {"image": _image_field, "text": _text_field}.get(kind, _row_field)(version)
    shapes = ", ".join(f"{spec.name} {spec.datatype} {list(spec.shape)}" for spec in version.signature.inputs)
    data = f" Trained on {text(metadata.data)}." if metadata is not None and metadata.data else ""
    return f"""<section aria-labelledby="model-{escape(name, quote=True)}">
<h2 id="model-{escape(name, quote=True)}">{text(name)}</h2>
<p>Takes {text(shapes)}.{data}</p>
<form data-model="{escape(name, quote=True)}" data-kind="{kind}">
<div class="input">{field}</div>
<div class="output" role="status" aria-label="Answer of {escape(name, quote=True)}"></div>
</form>
</section>"""


def _image_field(version: LoadedVersion) -> str:
    name = escape(version.served.model, quote=True)
    is_handwriting = version.metadata is not None and version.metadata.is_handwriting
    canvas = (
        '<canvas width="280" height="280" role="img" aria-label="Draw a digit here"></canvas>'
        '<button type="button" class="clear">Clear</button>'
        if is_handwriting
        else ""
    )
    return f"""{canvas}<label for="picture-{name}">Picture</label>
<input type="file" id="picture-{name}" accept="image/*">"""


def _text_field(version: LoadedVersion) -> str:
    name = escape(version.served.model, quote=True)
    return f"""<label for="text-{name}">Text; the answer is the next character</label>
<textarea id="text-{name}"></textarea>
<button type="submit">Predict</button>"""


def _row_field(version: LoadedVersion) -> str:
    name = escape(version.served.model, quote=True)
    columns = version.metadata.columns if version.metadata is not None else None
    hint = f": {text(', '.join(columns))}" if columns else ""
    return f"""<label for="rows-{name}">Numbers, one row per line{hint}</label>
<textarea id="rows-{name}"></textarea>
<button type="submit">Predict</button>"""
