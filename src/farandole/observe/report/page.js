// Zoom of the timelines: wheel, drag, pinch and buttons change what part of the drawing is shown. Without it, all is.
"use strict";
for (const zoom of document.querySelectorAll(".zoom")) {
  const svg = zoom.querySelector("svg");
  const across = zoom.querySelector(".across");
  const box = svg.viewBox.baseVal;
  const whole = box.width, height = box.height, span = Number(zoom.dataset.span);
  let left = 0, width = whole;

  const label = (value, gap) => value.toLocaleString("en", { maximumFractionDigits: Math.max(0, -Math.floor(Math.log10(gap))), useGrouping: true });
  const show = () => {
    width = Math.min(whole, Math.max(whole / 500, width));
    left = Math.min(whole - width, Math.max(0, left));
    svg.setAttribute("viewBox", `${left} 0 ${width} ${height}`);
    const first = left / whole * span, last = (left + width) / whole * span;
    const rough = (last - first) / 4, scale = 10 ** Math.floor(Math.log10(rough));
    const gap = [1, 2, 2.5, 5, 10].find(f => f * scale >= rough * 0.999) * scale;
    across.replaceChildren();
    for (let n = Math.ceil(first / gap - 1e-9); n * gap <= last * (1 + 1e-9); n++) {
      const share = (n * gap - first) / (last - first), mark = document.createElement("span");
      mark.className = share < 0.03 ? "at first" : share > 0.97 ? "at last" : "at";
      mark.style.left = `${share * 100}%`;
      mark.textContent = n ? `${label(n * gap, gap)} ${zoom.dataset.unit}` : "0";
      across.append(mark);
    }
  };
  const zoomBy = (factor, share) => {
    const wanted = Math.min(whole, Math.max(whole / 500, width * factor));
    left += share * (width - wanted);
    width = wanted;
    show();
  };
  const share = event => {
    const place = svg.getBoundingClientRect();
    return (event.clientX - place.left) / place.width;
  };

  const bar = document.createElement("div");
  bar.className = "zoom-bar";
  for (const [text, name, act] of [
    ["+", "zoom in", () => zoomBy(0.5, 0.5)],
    ["\u2212", "zoom out", () => zoomBy(2, 0.5)],
    ["\u2190", "earlier", () => { left -= width / 3; show(); }],
    ["\u2192", "later", () => { left += width / 3; show(); }],
    ["All", "show all", () => { left = 0; width = whole; show(); }],
  ]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.title = name;
    button.setAttribute("aria-label", name);
    button.addEventListener("click", act);
    bar.append(button);
  }
  zoom.prepend(bar);

  svg.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls as ever
    event.preventDefault();
    zoomBy(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, share(event));
  }, { passive: false });
  const held = new Map();
  svg.addEventListener("pointerdown", event => { held.set(event.pointerId, event.clientX); svg.setPointerCapture(event.pointerId); });
  for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, event => held.delete(event.pointerId));
  svg.addEventListener("pointermove", event => {
    if (!held.has(event.pointerId)) return;
    const before = held.get(event.pointerId), wide = svg.getBoundingClientRect().width;
    if (held.size === 1) {
      left -= (event.clientX - before) / wide * width;
      show();
    } else if (held.size === 2) {
      const fixed = [...held].find(([id]) => id !== event.pointerId)[1];
      const was = Math.abs(before - fixed), is = Math.abs(event.clientX - fixed);
      const place = svg.getBoundingClientRect();
      if (was > 4 && is > 4) zoomBy(was / is, (fixed - place.left) / place.width);
    }
    held.set(event.pointerId, event.clientX);
  });
  svg.addEventListener("dblclick", event => zoomBy(0.5, share(event)));
}

// A table that is wider than its place says so; on paper the evidence of findings is shown.
const mark = () => { for (const wide of document.querySelectorAll(".wide")) wide.classList.toggle("scrolls", wide.scrollWidth > wide.clientWidth + 1); };
mark();
addEventListener("resize", mark);
const opened = [];
addEventListener("beforeprint", () => { for (const fold of document.querySelectorAll("#what-to-do details:not([open]), .finding details:not([open])")) { fold.open = true; opened.push(fold); } });
addEventListener("afterprint", () => { for (const fold of opened.splice(0)) fold.open = false; });
