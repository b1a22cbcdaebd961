/* The pipeline as the server tells it: the last document, and the spans of the last seconds on the server's clock. Pure.

   The server's spans are milliseconds before the moment at which it made them; here they become milliseconds of the
   browser's clock, by the arrival of the document. How long documents travel differs, and the spans of two of them must
   not overlap: so each is put where the quickest of the last ones would be (``offset``). */

export const KEPT = 20000; // milliseconds of the timeline
const HISTORY = 240; // points of the meters

export const KINDS = { p: "prefill", d: "decode", m: "mixed", s: "draft", v: "void", f: "free" };
export const CAUSES = { u: "upstream", w: "downstream", l: "link", h: "host", n: "nothing_to_do" };

/* What a person reads of them. */
export const DOES = { prefill: "reading prompts", decode: "generating", mixed: "reading and generating", draft: "checking drafts",
  void: "discarded", free: "moving KV" };
export const WAITS_FOR = { upstream: "the stage before", downstream: "tokens", link: "the link", host: "the processor",
  nothing_to_do: "requests" };

export const NOTHING = { pipeline: null, figures: null, tracks: [], history: [], last: null, isLive: false };

/* With an event. ``at``: milliseconds when it came. */
export function told(seen, name, document, at) {
  if (name === "pipeline") {
    const isOther = cutOf(seen.pipeline) !== cutOf(document);
    return { ...seen, pipeline: document, isLive: true, figures: isOther ? null : seen.figures,
      tracks: isOther ? document.stages.map(() => []) : seen.tracks };
  }
  if (name !== "figures" || document.stages.length !== seen.pipeline?.stages.length) return seen;
  const { tracks, words: _words, ...figures } = document;
  const point = [at / 1000, figures.generated_per_second, figures.running, figures.waiting];
  return {
    ...seen, isLive: true, last: at, figures: { ...figures, words: document.words },
    tracks: tracks.map((spans, stage) => withSpans(seen.tracks[stage] ?? [], spans, at)),
    history: [...seen.history.slice(-HISTORY + 1), point],
  };
}

/* Which stage has which layers: figures of another cut are of others. */
const cutOf = (pipeline) => JSON.stringify(pipeline?.stages.map((stage) => [stage.name, stage.layers]));

/* A track with further spans, without what is too old. None begins before the one before it ends. */
export function withSpans(track, spans, at) {
  const kept = track.filter((span) => span.end >= at - KEPT);
  let until = kept.length ? kept[kept.length - 1].end : -Infinity;
  const added = spans.map(([from, length, kind, cause, busy]) => {
    const start = Math.max(at + from, until), end = Math.max(at + from + length, start);
    until = end;
    return { start, end, kind: KINDS[kind] ?? "free", cause: CAUSES[cause] ?? "", busy: busy ?? length };
  });
  return [...kept, ...added];
}

/* The connection has ended. */
export function lost(seen) {
  return { ...seen, isLive: false };
}

/* The span and the gap of a track at a moment: {span}, {gap: {start, end, cause}}, or null. */
export function at(track, moment) {
  for (let i = track.length - 1; i >= 0; i--) {
    const span = track[i];
    if (moment >= span.start && moment <= span.end) return { span };
    if (moment > span.end) {
      const next = track[i + 1];
      return next ? { gap: { start: span.end, end: next.start, cause: next.cause } } : null;
    }
  }
  return null;
}

/* What the timeline shows as words, for those who do not see it: shares of the shown time by kind, for each stage. */
export function inWords(track, from, to) {
  const seconds = {};
  for (const span of track) {
    const length = Math.min(span.end, to) - Math.max(span.start, from);
    if (length > 0) seconds[span.kind] = (seconds[span.kind] ?? 0) + length * (span.busy / Math.max(span.end - span.start, 1e-9));
  }
  const parts = Object.entries(seconds).sort((a, b) => b[1] - a[1]);
  const whole = Math.max(to - from, 1);
  return parts.map(([kind, length]) => `${DOES[kind]} ${Math.round((100 * length) / whole)} %`).join(", ") || "idle";
}

/* Why a chat's answer pauses, if it does: the words of the figures. */
export function pauseOf(seen) {
  const words = seen.figures?.words ?? [];
  return words.find((one) => ["lost", "recut", "failed", "draining"].includes(one.code)) ?? null;
}
