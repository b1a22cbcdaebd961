/* Tokens a second, and requests, over the last minutes, by uPlot. */

import { library } from "../io/scripts.js";
import { html, useEffect, useRef, useState } from "./html.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

export function Meters({ history }) {
  const place = useRef(null), plot = useRef(null), data = useRef(history), [isDark, setDark] = useState(dark.matches);
  data.current = history;
  useEffect(() => {
    const changed = () => setDark(dark.matches);
    dark.addEventListener("change", changed);
    return () => dark.removeEventListener("change", changed);
  }, []);
  useEffect(() => {
    let isGone = false;
    const link = Object.assign(document.createElement("link"), { rel: "stylesheet", href: new URL("../../vendor/uplot.css", import.meta.url).href });
    document.head.append(link);
    const sized = new ResizeObserver(() => place.current && plot.current?.setSize({ width: place.current.clientWidth, height: 150 }));
    library("uPlot").then((uPlot) => {
      if (isGone || place.current === null) return;
      const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
      const axis = { stroke: of("--dim"), grid: { stroke: of("--line"), width: 1 }, ticks: { stroke: of("--line"), width: 1 } };
      plot.current = new uPlot({
        width: place.current.clientWidth, height: 150, legend: { show: false }, cursor: { show: false },
        scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
        axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 30, 60], values: (self, ticks) => ticks.map((tick) => `${Math.round(tick - self.data[0][self.data[0].length - 1])} s`.replace("-", "−")) }, { ...axis, size: 46 }],
        series: [{}, { stroke: of("--decode"), width: 2, fill: of("--decode-fill"), points: { show: false } }],
      }, columns(data.current), place.current);
      sized.observe(place.current);
    }).catch(() => {});
    return () => { isGone = true; sized.disconnect(); plot.current?.destroy(); plot.current = null; link.remove(); };
  }, [isDark]);
  useEffect(() => { plot.current?.setData(columns(history)); }, [history]);
  return html`<div class="meter" ref=${place} role="img" aria-label="Tokens per second over the last minutes"></div>`;
}

const columns = (history) => [history.map((point) => point[0]), history.map((point) => point[1])];
