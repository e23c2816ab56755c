"""Tooltips: the values of all lines under the pointer. The page is complete without it.

The values are read back from the drawing, so that the page contains them once.
"""

from __future__ import annotations

SCRIPT = r"""
"use strict";
(() => {
  const SIDE = 1000;
  const range = (plot, name) => plot.dataset[name].split(" ").map(Number);
  const points = path => {
    path.points ??= path.getAttribute("d").replace(/h0$/, "").slice(1).split("L").map(p => p.split(" ").map(Number));
    return path.points;
  };
  const short = value => String(Number(value.toPrecision(4)));
  const two = n => String(Math.floor(n)).padStart(2, "0");
  const clock = s => s < 60 ? `${Math.round(s * 10) / 10} s`
    : s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}`
    : `${Math.floor(s / 3600)}:${two(s % 3600 / 60)}:${two(s % 60)}`;

  const element = (kind, parent) => {
    const found = parent.querySelector(`.${kind}`);
    if (found) return found;
    const made = document.createElement("div");
    made.className = kind;
    made.setAttribute("aria-hidden", "true");
    return parent.appendChild(made);
  };

  const hide = area => area.querySelectorAll(".tip, .cursor").forEach(e => e.remove());

  const show = (area, event) => {
    const plot = area.parentElement, box = area.getBoundingClientRect();
    const at = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) * SIDE;
    const paths = [...area.querySelectorAll("path[data-label]")];
    const nearest = paths.map(path => points(path).reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
    if (!nearest.length) return;
    const x = nearest.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)[0];
    const [x0, x1] = range(plot, "x"), [y0, y1] = range(plot, "y");
    const tip = element("tip", area), cursor = element("cursor", area);
    tip.replaceChildren();
    const head = document.createElement("div"), value = x0 + x / SIDE * (x1 - x0), unit = plot.dataset.unit;
    head.textContent = unit === "time" ? clock(value) : `${unit} ${unit === "step" ? Math.round(value) : short(value)}`;
    tip.append(head);
    paths.forEach((path, i) => {
      const row = document.createElement("div"), key = document.createElement("i"), bold = document.createElement("b");
      row.className = [...path.classList].find(name => /^c\d$/.test(name));
      const part = 1 - nearest[i][1] / SIDE;
      const y = plot.dataset.log ? y0 * (y1 / y0) ** part : y0 + part * (y1 - y0);
      bold.textContent = plot.dataset.percent ? `${(100 * y).toFixed(2)}%` : short(y);
      row.append(key, bold, ` ${path.dataset.label}`);
      tip.append(row);
    });
    const part = x / SIDE;
    cursor.style.left = `${100 * part}%`;
    tip.style.left = part < 0.5 ? `calc(${100 * part}% + 0.6rem)` : "auto";
    tip.style.right = part < 0.5 ? "auto" : `calc(${100 * (1 - part)}% + 0.6rem)`;
  };

  document.addEventListener("pointermove", event => {
    const area = event.target.closest?.(".area");
    document.querySelectorAll(".area:has(.tip)").forEach(other => other !== area && hide(other));
    if (area) show(area, event);
  });
  document.addEventListener("pointerleave", () => document.querySelectorAll(".area").forEach(hide));
})();
"""
