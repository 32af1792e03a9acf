// Small helpers around the document.

export function byId<Kind extends HTMLElement = HTMLElement>(id: string): Kind {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element #${id}`);
  return found as Kind;
}

export function element<Name extends keyof HTMLElementTagNameMap>(
  name: Name, className = "", text = "",
): HTMLElementTagNameMap[Name] {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export function button(text: string, title: string, act: () => void): HTMLButtonElement {
  const made = element("button", "", text);
  made.type = "button";
  made.title = title;
  made.addEventListener("click", act);
  return made;
}

export function count(value: number): string {
  return value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });
}

export function bytes(value: number): string {
  if (value < 1024) return `${count(value)} B`;
  return value < 1048576 ? `${count(value / 1024)} KiB` : `${count(value / 1048576)} MiB`;
}

export function stored<Value>(name: string, fallback: Value, isRight: (value: unknown) => boolean): Value {
  try {
    const read: unknown = JSON.parse(localStorage.getItem(name) ?? "null");
    return isRight(read) ? (read as Value) : fallback;
  } catch {
    // unreadable, or storage is off: begin anew
    return fallback;
  }
}

export function store(name: string, value: unknown): void {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // full or off: the page works without
  }
}
