// Small settings that the browser keeps. One that keeps nothing is no error.

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

// Keeps `value`, or forgets it where it is null.
export function keep(name, value, area = "localStorage") {
  safely(() => value === null ? globalThis[area].removeItem(name) : globalThis[area].setItem(name, value));
}
