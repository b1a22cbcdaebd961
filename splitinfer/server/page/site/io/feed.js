/* The figures while somebody looks: one connection, which a hidden tab gives up, and which comes back after an end of the
   server, at first soon and then every few seconds. */

import { events } from "./api.js";

const FIRST = 500, MOST = 8000; // milliseconds between attempts

/* ``tell(name, document)`` for each event, ``end(error)`` for each end of the connection. */
export function feed(tell, end) {
  let isWanted = false, running = null, wait = FIRST, timer = 0;

  async function run(controller) {
    try {
      for await (const found of events("v1/splitinfer/figures", { signal: controller.signal })) {
        for (const one of found) if (one.name) tell(one.name, JSON.parse(one.data));
        wait = FIRST;
      }
      if (!controller.signal.aborted) again(null);
    } catch (error) {
      if (!controller.signal.aborted) again(error);
    }
  }

  function again(error) {
    running = null;
    end(error);
    if (error?.status === 401 || error?.status === 403) return; // until there is a key
    timer = setTimeout(update, wait);
    wait = Math.min(MOST, wait * 2);
  }

  function update() {
    const isDue = isWanted && !document.hidden;
    clearTimeout(timer);
    if (isDue && running === null) {
      running = new AbortController();
      run(running);
    } else if (!isDue && running !== null) {
      running.abort();
      running = null;
      end(null);
    }
  }

  document.addEventListener("visibilitychange", () => {
    wait = FIRST;
    update();
  });
  return { want(value) { isWanted = value; update(); } };
}
