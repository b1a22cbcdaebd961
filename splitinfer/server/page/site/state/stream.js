/* An answer as it comes: bytes of server-sent events -> what has been said so far. Pure.

   The parser takes pieces of text that end anywhere (WHATWG HTML, 9.2.6, Interpreting an event stream), and gives whole
   events. ``begin``, ``take`` and ``end`` fold OpenAI's chunks into one answer. */

/* A parser: ``feed(text)`` returns the events that are whole now, as {name, data}. Comments (pings) are {comment}. */
export function eventParser() {
  let rest = "", name = "", data = [], isFirst = true;
  function line(text, found) {
    if (text === "") {
      if (data.length) found.push({ name: name || "message", data: data.join("\n") });
      name = "";
      data = [];
    } else if (text.startsWith(":")) found.push({ comment: text.slice(1).trim() });
    else {
      const colon = text.indexOf(":");
      const field = colon < 0 ? text : text.slice(0, colon);
      const value = colon < 0 ? "" : text.slice(colon + 1).replace(/^ /, "");
      if (field === "data") data.push(value);
      else if (field === "event") name = value;
    }
  }
  return {
    feed(text) {
      const found = [];
      if (isFirst && text) {
        text = text.replace(/^\ufeff/, "");
        isFirst = false;
      }
      rest += text;
      for (;;) {
        const end = rest.search(/[\r\n]/);
        if (end < 0 || (rest[end] === "\r" && end === rest.length - 1)) return found; // \r\n may be cut in the middle
        line(rest.slice(0, end), found);
        rest = rest.slice(end + (rest[end] === "\r" && rest[end + 1] === "\n" ? 2 : 1));
      }
    },
  };
}

/* An answer of which nothing has come. ``at``: milliseconds, of any clock. */
export function begin(at) {
  return { content: "", reasoning: "", calls: [], logprobs: [], first: null, began: at, last: at, ended: null,
    error: null, usage: null, isLoading: false, reading: null, isWhole: false };
}

/* The answer with one event's data. */
export function take(answer, data, at) {
  if (data === "[DONE]") return { ...answer, isWhole: true };
  let chunk;
  try {
    chunk = JSON.parse(data);
  } catch {
    return { ...answer, error: "The server sent something that is not JSON." };
  }
  if (chunk?.error) return { ...answer, error: chunk.error.message ?? "The server failed.", last: at };
  const usage = chunk?.usage ?? answer.usage, choice = chunk?.choices?.[0];
  if (!choice) return { ...answer, usage };
  const delta = choice.delta ?? {};
  const content = delta.content ?? "", reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  const calls = delta.tool_calls ?? [], probabilities = choice.logprobs?.content ?? [];
  const isSomething = content || reasoning || calls.length;
  return {
    ...answer, usage,
    reading: isSomething ? null : chunk.prompt_progress ?? answer.reading,
    content: answer.content + content,
    reasoning: answer.reasoning + reasoning,
    calls: calls.length ? withCalls(answer.calls, calls) : answer.calls,
    logprobs: probabilities.length ? [...answer.logprobs, ...probabilities] : answer.logprobs,
    first: answer.first ?? (isSomething ? at : null),
    last: isSomething ? at : answer.last,
    ended: choice.finish_reason ?? answer.ended,
  };
}

function withCalls(calls, deltas) {
  const found = [...calls];
  for (const delta of deltas) {
    const before = found[delta.index ?? found.length] ?? { id: "", name: "", arguments: "" };
    found[delta.index ?? found.length] = {
      id: delta.id ?? before.id,
      name: delta.function?.name ?? before.name,
      arguments: before.arguments + (delta.function?.arguments ?? ""),
    };
  }
  return found;
}

/* What is said of an answer's speed: milliseconds to the first token, tokens a second behind it, and its tokens. */
export function figuresOf(answer) {
  const usage = answer.usage, generated = usage?.completion_tokens ?? null;
  const seconds = answer.first === null ? 0 : (answer.last - answer.first) / 1000;
  return {
    ttft: answer.first === null ? null : Math.round(answer.first - answer.began),
    rate: generated > 1 && seconds > 0 ? (generated - 1) / seconds : null,
    generated,
    prompt: usage?.prompt_tokens ?? null,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
    reasoning: usage?.completion_tokens_details?.reasoning_tokens ?? null,
    tried: usage?.splitinfer?.drafts_tried ?? null,
    right: usage?.splitinfer?.drafts_right ?? null,
  };
}

/* What an answer waits for, in words. ``reading``: how far its prompt is read, as the server says it. */
export function waitOf({ isLoading, reading }) {
  if (!reading) return isLoading ? "Loading the model" : "Waiting for the first token";
  const { total, processed, cache, seconds_left: left } = reading, written = (count) => count.toLocaleString("en");
  if (left === null) return `Reading ${written(total - cache)} tokens`;
  const time = left < 90 ? `${Math.max(1, Math.ceil(left))} s` : `${Math.ceil(left / 60)} min`;
  return `Reading ${written(processed)} of ${written(total)} tokens, ${time} left`;
}

/* How an answer ended, for its message: ``stop``, ``length``, ``stopped`` by the user, or ``error``. */
export function endOf(answer, isStopped) {
  if (isStopped) return "stopped";
  if (answer.error) return "error";
  return answer.ended ?? (answer.isWhole ? "stop" : "cut");
}

/* What a screen reader says of that. */
export const announcementOf = (end) =>
  ({ stopped: "The answer was stopped.", cut: "The answer was interrupted.", error: "The answer failed." })[end] ?? "The answer is complete.";
