// Small settings that the browser stores. It is no error if it stores nothing.

function safely(act) {
  try {
    return act();
  } catch {
    return null;
  }
}

// `area` is "localStorage" or, for what ends with the tab, "sessionStorage".
export function recall(name, area = "localStorage") {
  return safely(() => globalThis[area].getItem(name));
}

// Stores `value`, or removes it if it is null.
export function keep(name, value, area = "localStorage") {
  safely(() => value === null ? globalThis[area].removeItem(name) : globalThis[area].setItem(name, value));
}
