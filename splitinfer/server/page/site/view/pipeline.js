/* The pipeline, live: what it does in words, its stages and links, and the last seconds. */

import { DOES, WAITS_FOR } from "../state/figures.js";
import { Dials } from "./dials.js";
import { html, useState } from "./html.js";
import { Meters } from "./meters.js";
import { Timeline } from "./timeline.js";

const percent = (share) => `${Math.round(100 * share)} %`;
const wide = (share) => `${100 * share}%`;
const bytes = (count) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const unit = Math.min(units.length - 1, count > 0 ? Math.floor(Math.log10(count) / 3) : 0);
  return `${(count / 1000 ** unit).toFixed(unit && count / 1000 ** unit < 100 ? 1 : 0)} ${units[unit]}`;
};
const KEYS = ["prefill", "decode", "mixed", "draft", "void", "link", "host"];

export function Pipeline({ state, actions }) {
  const { seen } = state;
  const [seconds, setSeconds] = useState(10);
  if (!seen.pipeline || !seen.figures) return html`<section class="pipeline" aria-label="Pipeline"><p class="dim">Waiting for figures …</p></section>`;
  const { pipeline, figures } = seen;
  return html`<section class="pipeline" aria-label="Pipeline" tabindex="0">
    ${!seen.isLive && html`<p class="error" role="status">The server does not answer; these figures are old.</p>`}
    <${Words} words=${figures.words} />
    <div class="numbers">
      <${Figure} value=${figures.generated_per_second.toFixed(1)} label="tokens/s" />
      <${Figure} value=${figures.running} label=${`running (max ${figures.max_running})`} />
      <${Figure} value=${figures.waiting} label="waiting" />
      ${figures.acceptance !== null && html`<${Figure} value=${percent(figures.acceptance)} label="drafts right" />`}
      <${Figure} value=${percent(figures.void)} label="computed tokens discarded" />
    </div>
    <h2>Stages of ${pipeline.model}</h2>
    <ol class="stages">${pipeline.stages.map((stage, i) => html`
      ${i > 0 && html`<${Link} key=${`link${i}`} link=${pipeline.links[i - 1]} figures=${figures.links[i - 1]} />`}
      <${Stage} key=${stage.name} stage=${stage} figures=${figures.stages[i]} />`)}</ol>
    <div class="row heading"><h2>Last seconds</h2>
      <label class="dim">Show <select aria-label="Seconds shown" value=${seconds} onChange=${(event) => setSeconds(Number(event.currentTarget.value))}>
        ${[1, 3, 10, 18].map((one) => html`<option value=${one}>${one} s</option>`)}</select></label></div>
    <${Timeline} seen=${seen} seconds=${seconds} />
    <ul class="keys">${KEYS.map((name) => html`<li key=${name}><span class=${`key ${name}`}></span>${DOES[name] ?? `waiting for ${WAITS_FOR[name]}`}</li>`)}</ul>
    <h2>Tokens per second</h2>
    <${Meters} history=${seen.history} />
    <${Dials} given=${state.dials} set=${pipeline.dials} problem=${state.dialProblem} actions=${actions} />
  </section>`;
}

function Words({ words }) {
  return html`<ul class="words" aria-live="polite">${words.map((one) => html`<li key=${one.code + one.stage}><p>${one.text}</p>${one.help && html`<p class="dim">${one.help}</p>`}</li>`)}</ul>`;
}

function Figure({ value, label }) {
  return html`<div class="figure"><b>${value}</b><span class="dim">${label}</span></div>`;
}

function Link({ link, figures }) {
  const way = figures.way_ms === null ? "" : `${figures.way_ms.toFixed(1)} ms · `;
  return html`<li class="link"><span aria-hidden="true">→</span> <span class="dim">${way}${bytes(figures.bytes_per_second)}/s<br />${link.transport}${link.codec && link.codec !== "none" ? `, ${link.codec}` : ""}</span></li>`;
}

function Stage({ stage, figures }) {
  const kv = figures.kv + figures.kv_kept, gaps = Object.entries(figures.gaps).sort((a, b) => b[1] - a[1]);
  return html`<li class=${`stage ${stage.state}`}>
    <h3>${stage.name}${stage.state !== "ready" && html` <span class="error">${stage.state}</span>`}</h3>
    <p class="dim">Layers ${stage.layers[0]}–${stage.layers[1] - 1} · ${bytes(stage.weight_bytes)}${stage.device && html`<br />${stage.device}`}</p>
    <div class="bar" role="img" aria-label=${`computes ${percent(figures.duty)} of the time`}>
      <span class="busy" style=${{ width: wide(figures.duty) }}></span>
      ${gaps.map(([cause, share]) => html`<span key=${cause} class=${`gap gap-${cause}`} style=${{ width: wide(share) }} title=${`waits for ${WAITS_FOR[cause]} ${percent(share)}`}></span>`)}</div>
    <p>computes ${percent(figures.duty)}${gaps.length ? html`<span class="dim"> · waits for ${gaps.slice(0, 2).map(([cause, share]) => `${WAITS_FOR[cause]} ${percent(share)}`).join(", ")}</span>` : ""}</p>
    ${stage.ranks.length > 0 && html`<p class="dim">${stage.ranks.map((rank, i) => html`${rank.name}: computes ${percent(figures.ranks[i] ?? 0)} · ${bytes(rank.free_bytes)} free<br />`)}a sum takes ${stage.sum_ms.toFixed(2)} ms</p>`}
    ${figures.experts !== null && html`<p class="dim">experts: ${percent(figures.experts)} found in memory, ${bytes(figures.experts_read)} read for each token, waits for the disk ${percent(figures.experts_waiting)}</p>`}
    <p class="dim">KV: ${bytes(figures.kv)} in use, ${bytes(figures.kv_kept)} kept${figures.kv_budget ? `, of ${bytes(figures.kv_budget)}` : ""}</p>
    ${figures.kv_budget > 0 && html`<meter min="0" max="1" high="0.9" value=${Math.min(1, kv / figures.kv_budget)} aria-label="Memory for KV"></meter>`}
  </li>`;
}
