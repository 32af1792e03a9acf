// What every request of this browser carries, and how the page looks.

import { byId, store, stored } from "./dom";

const FIELDS = ["effort", "temperature", "longest", "system", "tools"] as const;
type Field = (typeof FIELDS)[number];
const THEMES = ["", "light", "dark"];

function field(name: Field): HTMLInputElement {
  return byId<HTMLInputElement>(name);
}

export function loadSettings(): void {
  const isRight = (read: unknown) => typeof read === "object" && read !== null;
  const saved = stored<Partial<Record<Field, string>>>("cedar.settings", {}, isRight);
  for (const name of FIELDS) {
    field(name).value = saved[name] ?? "";
    field(name).addEventListener("input", () =>
      store("cedar.settings", Object.fromEntries(FIELDS.map((one) => [one, field(one).value]))));
  }
  showTheme(stored<string>("cedar.theme", "", (read) => THEMES.includes(read as string)));
  byId("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "") + 1) % THEMES.length] ?? "";
    store("cedar.theme", next);
    showTheme(next);
  });
}

function showTheme(name: string): void {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  byId("theme").textContent = { light: "☀", dark: "☾" }[name] ?? "◐";
}

export function systemMessage(): string {
  return field("system").value;
}

/** Fields of a request. Throws with a line for people if the tools are not JSON. */
export function requestFields(): Record<string, unknown> {
  const told: Record<string, unknown> = {};
  const effort = field("effort").value;
  if (effort) told.reasoning_effort = effort;
  if (field("temperature").value) told.temperature = Number(field("temperature").value);
  if (field("longest").value) told.max_tokens = Number(field("longest").value);
  const tools = field("tools").value.trim();
  if (tools) {
    let read: unknown;
    try {
      read = JSON.parse(tools);
    } catch (error) {
      throw new Error(`the tools in the settings are not JSON: ${(error as Error).message}`);
    }
    // both shapes are known: a function, and OpenAI's wrapper around one
    told.tools = (Array.isArray(read) ? read : [read]).map((one: unknown) =>
      typeof one === "object" && one !== null && "function" in one ? one : { type: "function", function: one });
  }
  return told;
}
