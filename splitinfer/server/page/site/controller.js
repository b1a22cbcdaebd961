/* What the page does: it asks the server, keeps conversations, and lets the views know. One state, changed only here.

   state  {view, models, needsKey, problem, conversations: {id: conversation}, current, live: {node id: answer}, seen, dials,
           dialProblem, isLasting} */

import * as api from "./io/api.js";
import { feed } from "./io/feed.js";
import { openStore } from "./io/store.js";
import * as conv from "./state/conversation.js";
import * as figures from "./state/figures.js";
import { KIND, fromFile, toFile, toMessages } from "./state/library.js";
import { continuationOf, requestOf } from "./state/sampling.js";
import { announcementOf, begin, endOf, figuresOf, take } from "./state/stream.js";

const SAVE_EVERY = 2000; // milliseconds, of an answer that is coming
const newId = () => crypto.randomUUID?.() ?? [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");

export function makeController() {
  let state = { view: viewOf(location.hash), models: [], needsKey: false, problem: null, conversations: {}, current: null,
    live: {}, seen: figures.NOTHING, dials: null, dialProblem: null, isLasting: true, defaults: {}, announced: "" };
  const listeners = new Set(), aborts = new Map();
  let store = null, isDrawn = false;

  /* Views are told once a frame, however many tokens come in it. */
  function set(changes) {
    state = { ...state, ...changes };
    if (!isDrawn) {
      isDrawn = true;
      const draw = () => { isDrawn = false; listeners.forEach((listen) => listen(state)); };
      document.hidden ? setTimeout(draw, 250) : requestAnimationFrame(draw);
    }
  }

  const live = feed(
    (name, document) => set({ seen: figures.told(state.seen, name, document, performance.now()) }),
    (error) => set({ seen: figures.lost(state.seen), ...(error?.status === 401 ? { needsKey: true } : {}) }),
  );
  const look = () => live.want(!state.needsKey && (state.view === "pipeline" || Object.keys(state.live).length > 0));

  // -- conversations ---------------------------------------------------------------------------

  const current = () => state.conversations[state.current] ?? null;
  const modelFor = (conversation) => conv.modelOf(state.models, conversation);

  function keep(conversation, isSaved = true) {
    set({ conversations: { ...state.conversations, [conversation.id]: conversation } });
    if (isSaved) save(conversation.id);
    return conversation;
  }

  function save(id) {
    const conversation = state.conversations[id];
    if (conversation && conversation.root.length) {
      store?.put(conversation).catch(() => set({ problem: "The conversation was not saved: the browser's storage is full." }));
    }
  }

  function begun() {
    const made = conv.newConversation(newId(), Date.now(), state.defaults);
    keep(made, false);
    set({ current: made.id });
    return made;
  }

  // -- answers ---------------------------------------------------------------------------------

  /* Ask for an answer behind the user's message ``parent``. */
  function answerTo(conversation, parent) {
    const id = newId();
    const made = keep(conv.add(conversation, parent, { id, role: "assistant" }, Date.now()));
    const model = modelFor(made), body = requestOf(model.name, conv.messagesTo(made, parent), made.sampling);
    read(made.id, id, { ...begin(performance.now()), isLoading: !model.isLoaded }, body);
  }

  async function read(conversationId, id, answer, body) {
    const abort = new AbortController();
    aborts.set(id, abort);
    show(id, answer);
    look();
    const saving = setInterval(() => settle(conversationId, id, state.live[id], null), SAVE_EVERY);
    try {
      for await (const found of api.answer(body, abort.signal)) {
        let next = state.live[id];
        for (const one of found) if (one.data !== undefined) next = take(next, one.data, performance.now());
        if (next !== state.live[id]) show(id, next);
        if (next.isWhole) break;
      }
    } catch (error) {
      if (!abort.signal.aborted) {
        show(id, { ...state.live[id], error: error.message });
        if (error.status === 401) set({ needsKey: true });
      }
    } finally {
      clearInterval(saving);
      aborts.delete(id);
      const { [id]: last, ...rest } = state.live;
      const end = endOf(last, abort.signal.aborted);
      settle(conversationId, id, last, end);
      set({ live: rest, announced: announcementOf(end) });
      look();
      if (state.models.length > 1) connect(); // others may be loaded now
    }
  }

  const show = (id, answer) => set({ live: { ...state.live, [id]: answer } });

  /* Put what has come into the conversation; ``ended`` is null while more is coming. */
  function settle(conversationId, id, answer, ended) {
    const conversation = state.conversations[conversationId];
    if (!conversation || !answer) return;
    const error = answer.error ?? (ended === "cut" ? "The connection ended before the answer was complete." : null);
    keep(conv.change(conversation, id, { content: answer.content, reasoning: answer.reasoning, calls: answer.calls,
      logprobs: answer.logprobs, error, ended, figures: ended ? figuresOf(answer) : null }, Date.now()));
  }

  const isBusy = () => current() && conv.path(current()).some((id) => state.live[id]);

  const actions = {
    send(text, files = []) {
      if (!state.models.length || isBusy() || (!text.trim() && !files.length)) return false;
      const conversation = current() ?? begun(), shown = conv.path(conversation), id = newId();
      const message = { id, role: "user", content: text, files };
      answerTo(conv.add(conversation, shown[shown.length - 1] ?? conv.ROOT, message, Date.now()), id);
      return true;
    },
    retry(id) {
      if (!isBusy()) answerTo(current(), current().nodes[id].parent);
    },
    edit(id, text) {
      const node = current().nodes[id], made = newId();
      if (isBusy()) return;
      if (node.role === "user") answerTo(conv.add(current(), node.parent, { id: made, role: "user", content: text, files: node.files }, Date.now()), made);
      else keep(conv.add(current(), node.parent, { id: made, role: "assistant", content: text, ended: "edited" }, Date.now()));
    },
    /* Continue an answer that was cut. A template writes reasoning in its own way, so only answers without it. */
    continue(id) {
      if (isBusy()) return;
      const conversation = current(), { content, logprobs } = conversation.nodes[id];
      const answer = { ...begin(performance.now()), content, logprobs: logprobs ?? [] };
      read(conversation.id, id, answer, continuationOf(modelFor(conversation).name, conv.messagesTo(conversation, id), conversation.sampling));
    },
    stop() {
      if (current()) conv.path(current()).forEach((id) => aborts.get(id)?.abort());
    },
    step: (id, by) => keep(conv.step(current(), id, by)),
    removeMessage: (id) => { if (!isBusy()) keep(conv.remove(current(), id)); },
    open: (id) => set({ current: id, problem: null }),
    newChat() {
      if (!current() || current().root.length) begun();
    },
    removeChat(id) {
      Object.keys(state.conversations[id]?.nodes ?? {}).forEach((node) => aborts.get(node)?.abort());
      const { [id]: _gone, ...rest } = state.conversations;
      store?.remove(id);
      set({ conversations: rest, current: state.current === id ? null : state.current });
    },
    rename: (id, title) => keep({ ...state.conversations[id], title }),
    configure(changes) {
      const conversation = current() ?? begun();
      keep({ ...conversation, ...changes, sampling: { ...conversation.sampling, ...changes.sampling } });
      const { system, sampling, model } = state.conversations[conversation.id];
      set({ defaults: { system, sampling, model } });
    },
    async importFiles(files) {
      for (const file of files) {
        try {
          const found = fromFile(await file.text(), file.name, newId, Date.now());
          found.forEach((one) => keep(one));
          if (found.length) set({ current: found[0].id, problem: null });
        } catch (error) {
          set({ problem: `Not imported: ${error.message}.` });
        }
      }
    },
    exportOne: () => current() && saveAs(`${current().title || "conversation"}.json`, toMessages(current())),
    exportAll: () => saveAs(`${KIND}.json`, toFile(Object.values(state.conversations).filter((one) => one.root.length))),
    setView(view) {
      history.replaceState(null, "", view === "pipeline" ? "#pipeline" : "#chat");
      set({ view });
      look();
    },
    async readDials() {
      try {
        set({ dials: await api.dials(), dialProblem: null });
      } catch (error) {
        set(error.status === 401 ? { needsKey: true } : { dialProblem: error.message });
      }
    },
    /* Turn dials; whether that was done. */
    async turnDials(changes) {
      try {
        set({ dials: await api.turn(state.dials.model, changes), dialProblem: null, announced: "Settings applied." });
        return true;
      } catch (error) {
        set({ dialProblem: error.message });
        return false;
      }
    },
    dismiss: () => set({ problem: null }),
    async enter(key) {
      try {
        await api.buySession(key);
        set({ needsKey: false, problem: null });
        await connect();
      } catch (error) {
        set({ problem: error.status === 401 ? "This key is not valid." : error.message });
      }
    },
  };

  async function connect() {
    try {
      set({ models: await api.models(), needsKey: false, problem: null });
      look();
    } catch (error) {
      if (error.status === 401) set({ needsKey: true });
      else {
        set({ problem: error.message });
        setTimeout(connect, 3000);
      }
    }
  }

  async function start() {
    window.addEventListener("hashchange", () => { set({ view: viewOf(location.hash) }); look(); });
    connect();
    store = await openStore();
    const found = await store.all();
    set({ isLasting: store.isLasting,
      conversations: { ...Object.fromEntries(found.map((one) => [one.id, settledOf(one)])), ...state.conversations } });
  }

  return { actions, start, get state() { return state; },
    listen(listener) { listeners.add(listener); return () => listeners.delete(listener); } };
}

/* A conversation whose page was closed while an answer came: that answer was cut. */
function settledOf(conversation) {
  const cut = Object.values(conversation.nodes).filter((node) => node.role === "assistant" && node.ended === null);
  return cut.reduce((made, node) => conv.change(made, node.id, { ended: "stopped" }), conversation);
}

const viewOf = (hash) => (hash === "#pipeline" ? "pipeline" : "chat");

function saveAs(name, document_) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(document_, null, 1)], { type: "application/json" }));
  link.download = name.replace(/[\\/:*?"<>|\n]+/g, " ").slice(0, 80);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
