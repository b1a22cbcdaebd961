/* Conversations in the browser's own store (IndexedDB), which the server never sees. Where there is none, as in some
   private windows, they last as long as the page does. */

const NAME = "splitinfer", STORE = "conversations";

function opened() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
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

/* The store: ``all()``, ``put(conversation)``, ``remove(id)``; ``isLasting`` says whether it outlives the page. */
export async function openStore() {
  try {
    const database = await opened();
    return {
      isLasting: true,
      all: () => settled(database.transaction(STORE).objectStore(STORE).getAll()),
      put: (conversation) => written(database, (store) => store.put(conversation)),
      remove: (id) => written(database, (store) => store.delete(id)),
    };
  } catch {
    const held = new Map();
    return {
      isLasting: false, all: async () => [...held.values()],
      put: async (one) => void held.set(one.id, one), remove: async (id) => void held.delete(id),
    };
  }
}

function written(database, write) {
  const transaction = database.transaction(STORE, "readwrite");
  write(transaction.objectStore(STORE));
  return whole(transaction);
}
