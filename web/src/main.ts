// The page: one conversation at a time, streamed, kept in this browser.

import { call, eventsOf, post, type Chunk, type Health, type Model } from "./api";
import { freshChat, freshMessage, history, loadChats, saveChats, type Chat, type Message } from "./chats";
import { button, byId, bytes, count, element } from "./dom";
import { boxOf, type Box } from "./messages";
import { drawPrompt, explain, tokenCame, watch } from "./panel";
import { loadSettings, requestFields, systemMessage } from "./settings";

const IDEAS = ["Once upon a time there was a fox", "Tell me about the sea.", "What is your name?"];
const WIDE = matchMedia("(min-width: 62.01rem)");
const input = byId<HTMLTextAreaElement>("input");
const log = byId("log");

let model: Model | null = null;
let running: AbortController | null = null;
let chats = loadChats();
let chat: Chat = chats[0] ?? freshChat();

function atEnd(): boolean {
  const box = byId("scroll");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function show(follow: boolean): void {
  byId("hello").hidden = chat.messages.length > 0 || running !== null;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  const box = byId("scroll");
  if (follow) box.scrollTop = box.scrollHeight;
}

function grow(): void {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

async function connect(): Promise<void> {
  const place = byId("model");
  try {
    const response = await call("/v1/models");
    if (!response.ok) {
      place.textContent = "the server wants an API key";
      return;
    }
    model = ((await response.json()) as { data: Model[] }).data[0] ?? null;
    const health = (await (await call("/health")).json()) as Health;
    const loading = health.status === "loading" ? " · loading the weights…" : "";
    if (model) {
      place.textContent =
        `${model.id} · ${count(model.global_kv_bytes_per_token)} bytes a token · context ${count(model.max_model_len)}${loading}`;
      document.title = `${model.id} – cedar`;
    }
    if (loading) setTimeout(() => void connect(), 500);
  } catch {
    place.textContent = "the server does not answer; trying again…";
    setTimeout(() => void connect(), 1500);
  }
}

function draw(): void {
  log.replaceChildren(...chat.messages.map((message) => boxOf(message, sendResults).box));
  acts();
  list();
  show(true);
}

/** Buttons below the last answer. */
function acts(): void {
  for (const old of document.querySelectorAll(".acts")) old.remove();
  const last = chat.messages.at(-1);
  if (running || last?.role !== "assistant") return;
  const row = element("div", "acts");
  row.append(
    button("Again", "Another answer to the same question (Alt+R)", again),
    button("Copy", "Copy the answer", () => void navigator.clipboard.writeText(last.content)),
  );
  log.lastElementChild?.append(row);
}

function list(): void {
  const rows = chats.filter((one) => one.messages.length || one === chat).map((one) => {
    const row = element("div");
    const name = button(one.title || "New chat", one.title, () => open(one));
    if (one === chat) name.setAttribute("aria-current", "true");
    row.append(name, button("✕", "Delete this chat", () => remove(one)));
    return row;
  });
  byId("chats").replaceChildren(...rows);
}

function remove(one: Chat): void {
  chats = chats.filter((other) => other !== one);
  if (!chats.length) chats = [freshChat()];
  saveChats(chats);
  open(one === chat ? (chats[0] as Chat) : chat, true);
}

function toggle(name: "chats" | "panel", wanted = byId(name).hidden): void {
  byId(name).hidden = !wanted;
  byId(name === "chats" ? "list" : "look").setAttribute("aria-expanded", String(wanted));
}

function open(one: Chat, stay = WIDE.matches): void {
  if (running && one !== chat) {
    running.abort();
    running = null;
  }
  chat = one;
  byId("status").textContent = "";
  draw();
  if (!stay) toggle("chats", false);
  input.focus();
}

function begin(): void {
  const blank = chats.find((one) => !one.messages.length) ?? freshChat();
  chats = [blank, ...chats.filter((one) => one !== blank)];
  open(blank);
}

function send(text: string): void {
  if (running || !text.trim()) return;
  chat.title ||= text.trim().slice(0, 60);
  const message = freshMessage("user", text);
  chat.messages.push(message);
  chats = [chat, ...chats.filter((one) => one !== chat)];
  log.append(boxOf(message, sendResults).box);
  list();
  void answer();
}

function sendResults(message: Message): void {
  if (running || chat.messages.at(-1) !== message) return;
  void answer();
}

function again(): void {
  if (running || chat.messages.at(-1)?.role !== "assistant") return;
  chat.messages.pop();
  log.lastElementChild?.remove();
  void answer();
}

async function answer(): Promise<void> {
  const mine = freshMessage("assistant");
  const owner = chat;
  const abort = (running = new AbortController());
  const box = boxOf(mine, sendResults);
  let failed = "";
  for (const old of log.querySelectorAll(":scope > .error")) old.remove();
  box.text.classList.add("wait");
  log.append(box.box);
  acts();
  show(true);
  byId("status").textContent = "reading your message…";
  try {
    const body = {
      model: model?.id ?? "cedar", messages: history(owner.messages, systemMessage()), stream: true, ...requestFields(),
    };
    const response = await post("/v1/chat/completions", body, abort.signal);
    if (!response.ok || !response.body) {
      throw new Error(((await response.json()) as { error: { message: string } }).error.message);
    }
    await read(response.body, mine, box, abort, body);
  } catch (error) {
    failed = (error as Error).name === "AbortError" ? "stopped" : (error as Error).message;
  }
  box.text.classList.remove("wait");
  finish(owner, mine, box, abort, failed);
}

async function read(
  stream: ReadableStream<Uint8Array>, mine: Message, box: Box, abort: AbortController, body: unknown,
): Promise<void> {
  const began = performance.now();
  let first = 0;
  let pieces = 0;
  for await (const event of eventsOf(stream)) {
    if (abort !== running) return;
    if (typeof event === "string") {
      byId("status").textContent = event;
      continue;
    }
    if (event.error) throw new Error(event.error.message);
    const follow = atEnd();
    if (take(event, mine)) {
      pieces += 1;
      first ||= performance.now();
      tokenCame();
      const rate = pieces > 1 ? (pieces - 1) / ((performance.now() - first) / 1000) : 0;
      byId("status").textContent = rate ? `${count(rate)} pieces/s · Esc stops` : "writing…";
    }
    if (event.timings && event.usage) {
      drawPrompt(event.usage, event.timings, model, body);
      mine.note = measured(event, first ? (first - began) / 1000 : 0);
    }
    box.grow();
    show(follow);
  }
}

/** Put a chunk into the message; whether the model said something in it. */
function take(event: Chunk, mine: Message): boolean {
  const delta = event.choices[0]?.delta ?? {};
  mine.reasoning += delta.reasoning_content ?? "";
  mine.content += delta.content ?? "";
  mine.warnings.push(...(event.warnings ?? []));
  for (const made of delta.tool_calls ?? []) {
    const known = (mine.calls[made.index] ??= { id: made.id ?? "", name: made.function.name ?? "", arguments: "" });
    known.arguments += made.function.arguments ?? "";
  }
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}

function measured(event: Chunk, wait: number): string {
  const { usage, timings } = event;
  if (!usage || !timings) return "";
  const rate = timings.decode_s > 0 ? (usage.completion_tokens - 1) / timings.decode_s : 0;
  byId("status").textContent =
    `context ${count(usage.prompt_tokens + usage.completion_tokens)} tokens · cache ${bytes(timings.cache_bytes)}`;
  return `${count(usage.completion_tokens)} tokens · ${count(rate)} tokens/s · first after ${wait.toFixed(2)} s` +
    (event.choices[0]?.finish_reason === "length" ? " · cut at the length limit" : "");
}

function finish(owner: Chat, mine: Message, box: Box, abort: AbortController, failed: string): void {
  const isHere = abort === running;
  if (isHere) running = null;
  const isEmpty = !mine.content && !mine.calls.length && !mine.reasoning;
  if (failed === "stopped" || (!failed && isEmpty)) mine.note ||= failed || "the model had nothing to say";
  if (!failed || !isEmpty) owner.messages.push(mine);
  saveChats(chats);
  if (!isHere) return;
  if (failed && isEmpty) {
    // the question goes back into the box, to be sent again
    if (owner.messages.at(-1)?.role === "user") input.value ||= owner.messages.pop()?.content ?? "";
    grow();
    draw();
  } else {
    box.grow();
  }
  if (failed && failed !== "stopped") log.append(element("div", "error", failed));
  if (failed) byId("status").textContent = failed === "stopped" ? failed : "";
  acts();
  show(atEnd());
  input.focus();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value;
  if (running || !text.trim()) return;
  input.value = "";
  grow();
  send(text);
});
input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId<HTMLFormElement>("form").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", begin);
byId("list").addEventListener("click", () => toggle("chats"));
byId("look").addEventListener("click", () => toggle("panel"));
byId("explain").addEventListener("click", () => void explain());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (running) running.abort();
    else if (!WIDE.matches) {
      toggle("chats", false);
      toggle("panel", false);
    }
    return;
  }
  const settings = byId<HTMLDetailsElement>("settings");
  const keys: Record<string, () => void> = {
    n: begin,
    c: () => toggle("chats"),
    p: () => toggle("panel"),
    r: again,
    s: () => { settings.open = !settings.open; },
  };
  const act = event.altKey ? keys[event.key.toLowerCase()] : undefined;
  if (act) {
    event.preventDefault();
    act();
  }
});
for (const idea of IDEAS) byId("ideas").append(button(idea, "", () => send(idea)));
loadSettings();
toggle("panel", WIDE.matches);
toggle("chats", WIDE.matches);
void connect();
void watch();
draw();
