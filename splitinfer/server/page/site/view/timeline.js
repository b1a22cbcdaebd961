/* The last seconds of all stages, drawn: a row for each, a step as a block of its kind's colour, gaps by their cause. */

import { DOES, WAITS_FOR, at, inWords } from "../state/figures.js";
import { html, useEffect, useRef, useState } from "./html.js";

const ROW = 34, SPACE = 20, LABELS = 20; // pixels; below each row its name
const DELAY = 700; // milliseconds by which the right end is behind, so that what is drawn has come

/* Colours by the names of the style sheet, so that they follow light and dark. */
function colours() {
  const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
  return { prefill: of("--prefill"), decode: of("--decode"), mixed: of("--mixed"), draft: of("--draft"), void: of("--void"),
    free: of("--dim"), text: of("--dim"), line: of("--line"), link: of("--gap-link"), host: of("--gap-host") };
}

export function Timeline({ seen, seconds }) {
  const canvas = useRef(null), data = useRef(seen), [tip, setTip] = useState(null);
  data.current = seen;
  const stages = seen.pipeline.stages, height = stages.length * (ROW + SPACE) + LABELS;
  useEffect(() => {
    let frame = 0, palette = colours(), isStopped = false;
    const scheme = matchMedia("(prefers-color-scheme: dark)"), changed = () => { palette = colours(); };
    const slow = matchMedia("(prefers-reduced-motion: reduce)");
    scheme.addEventListener("change", changed);
    const again = () => { if (!isStopped) frame = slow.matches ? setTimeout(draw, 1000) : requestAnimationFrame(draw); };
    function draw() {
      if (canvas.current === null) return; // it has gone, and is told so only later
      paint(canvas.current, data.current, seconds, palette);
      again();
    }
    again();
    return () => { isStopped = true; cancelAnimationFrame(frame); clearTimeout(frame); scheme.removeEventListener("change", changed); };
  }, [seconds]);
  const point = (event) => {
    const box = canvas.current.getBoundingClientRect(), stage = Math.floor((event.clientY - box.top) / (ROW + SPACE));
    const moment = performance.now() - DELAY - seconds * 1000 * (1 - (event.clientX - box.left) / box.width);
    const found = stage < stages.length ? at(seen.tracks[stage] ?? [], moment) : null;
    setTip(found && { x: event.clientX - box.left, y: event.clientY - box.top, text: tipOf(found) });
  };
  const now = seen.last ?? 0;
  return html`<div class="timeline" onPointerMove=${point} onPointerLeave=${() => setTip(null)}>
    <canvas ref=${canvas} style=${{ height: `${height}px` }} role="img" aria-label=${stages.map((stage, i) => `${stage.name}: ${inWords(seen.tracks[i] ?? [], now - seconds * 1000, now)}`).join("; ")}></canvas>
    ${tip && html`<div class="tip" style=${{ left: `${tip.x}px`, top: `${tip.y}px` }}>${tip.text}</div>`}
  </div>`;
}

function tipOf(found) {
  const { span, gap } = found, it = span ?? gap, ms = (it.end - it.start).toFixed(1);
  return span ? `${DOES[span.kind]}, ${ms} ms` : gap.cause ? `waiting for ${WAITS_FOR[gap.cause]}, ${ms} ms` : `idle, ${ms} ms`;
}

function paint(canvas, seen, seconds, palette) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d"), to = performance.now() - DELAY, from = to - seconds * 1000;
  const x = (moment) => ((moment - from) / (to - from)) * width;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  seen.tracks.forEach((track, stage) => row(pen, track, stage * (ROW + SPACE), x, from, to, palette));
  pen.fillStyle = palette.text;
  pen.font = "11px system-ui";
  pen.textAlign = "left";
  seen.pipeline.stages.forEach((stage, i) => pen.fillText(stage.name, 0, i * (ROW + SPACE) + ROW + 12));
  scale(pen, seconds, width, height, palette);
}

function row(pen, track, top, x, from, to, palette) {
  pen.fillStyle = palette.line;
  pen.fillRect(0, top + ROW - 1, x(to), 1);
  track.forEach((span, i) => {
    if (span.end < from || span.start > to) return;
    const before = track[i - 1], left = x(span.start), width = Math.max(1, x(Math.min(span.end, to)) - left);
    if (before && palette[span.cause] && span.start - before.end < 2000) {
      pen.fillStyle = palette[span.cause];
      pen.fillRect(x(before.end), top + ROW - 8, left - x(before.end), 7);
    }
    pen.globalAlpha = 0.35 + 0.65 * Math.min(1, span.busy / Math.max(span.end - span.start, 1e-6));
    pen.fillStyle = palette[span.kind];
    pen.fillRect(left, top, width > 3 ? width - 0.6 : width, ROW - 2);
    pen.globalAlpha = 1;
  });
}

function scale(pen, seconds, width, height, palette) {
  pen.fillStyle = palette.text;
  pen.font = "11px system-ui";
  const step = seconds > 5 ? 2 : seconds > 2 ? 1 : 0.5;
  for (let back = 0; back <= seconds; back += step) {
    const at = width * (1 - back / seconds);
    pen.textAlign = back === 0 ? "right" : back + step > seconds ? "left" : "center";
    pen.fillText(back === 0 ? "now" : `−${back} s`, at, height - 5);
  }
}
