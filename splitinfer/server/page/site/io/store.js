/* Conversations in the browser's own store (IndexedDB), which the server never sees. Where there is none, as in some
   private windows, they last as long as the page does.

   Each message has a record of its own, so that a save writes what has changed, however long the conversation is. What has
   not changed is the same object (``state/conversation.js``), and so it is found without looking into it. */

const NAME = "splitinfer", HEADS = "conversations", NODES = "messages";

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(HEADS, { keyPath: "id" });
      request.result.createObjectStore(NODES); // by [the conversation's id, the message's]
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("the store is in use by an older page"));
  });
}

const settled = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const whole = (transaction) => new Promise((resolve, reject) => {
  transaction.oncomplete = resolve;
  transaction.onerror = transaction.onabort = () => reject(transaction.error);
});

const ofConversation = (id) => IDBKeyRange.bound([id], [id, []]); // an array comes after every text

/* The store: ``all()``, ``put(conversation)``, ``remove(id)``; ``isLasting`` says whether it outlives the page. */
export async function openStore() {
  let database;
  try {
    database = await opened();
  } catch {
    const held = new Map();
    return {
      isLasting: false, all: async () => [...held.values()],
      put: async (one) => void held.set(one.id, one), remove: async (id) => void held.delete(id),
    };
  }
  const saved = new Map(); // by conversation: its messages as they were written last
  return {
    isLasting: true,
    async all() {
      const reading = database.transaction([HEADS, NODES]), nodes = reading.objectStore(NODES);
      const [heads, keys, values] = await Promise.all(
        [settled(reading.objectStore(HEADS).getAll()), settled(nodes.getAllKeys()), settled(nodes.getAll())]);
      const found = new Map(heads.map((head) => [head.id, { ...head, nodes: {} }]));
      keys.forEach(([id], i) => { if (found.has(id)) found.get(id).nodes[values[i].id] = values[i]; });
      found.forEach((conversation, id) => saved.set(id, { ...conversation.nodes }));
      return [...found.values()];
    },
    put({ nodes, ...head }) {
      const before = saved.get(head.id) ?? {}, writing = database.transaction([HEADS, NODES], "readwrite");
      const store = writing.objectStore(NODES);
      writing.objectStore(HEADS).put(head);
      for (const id of Object.keys(nodes)) if (nodes[id] !== before[id]) store.put(nodes[id], [head.id, id]);
      for (const id of Object.keys(before)) if (!nodes[id]) store.delete([head.id, id]);
      saved.set(head.id, nodes);
      return whole(writing).catch((error) => {
        saved.delete(head.id); // what of it was written is not known: all of it is, next time
        throw error;
      });
    },
    remove(id) {
      const writing = database.transaction([HEADS, NODES], "readwrite");
      writing.objectStore(HEADS).delete(id);
      writing.objectStore(NODES).delete(ofConversation(id));
      saved.delete(id);
      return whole(writing);
    },
  };
}
