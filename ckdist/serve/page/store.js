// Where conversations are kept: in this browser (IndexedDB), and nowhere else.

const NAME = "ckdist", CONVERSATIONS = "conversations";

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export class Store {
  // `database` is null if the browser stores nothing: then conversations last as long as the page.
  constructor(database) {
    this.database = database;
  }

  static async open() {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
      return new Store(await promised(request));
    } catch {
      return new Store(null);
    }
  }

  get keeps() {
    return this.database !== null;
  }

  objects(mode) {
    return this.database.transaction(CONVERSATIONS, mode).objectStore(CONVERSATIONS);
  }

  async all() {
    const found = this.keeps ? await promised(this.objects("readonly").getAll()) : [];
    return found.sort((a, b) => b.updated - a.updated);
  }

  async save(conversation) {
    if (this.keeps) await promised(this.objects("readwrite").put(conversation));
  }

  async remove(id) {
    if (this.keeps) await promised(this.objects("readwrite").delete(id));
  }
}
