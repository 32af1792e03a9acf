// Chats live in this browser alone, newest first.

import { store, stored } from "./dom";

export interface Call {
  id: string;
  name: string;
  arguments: string;
  /** What the tool said; the person at the page is the tool. */
  result?: string;
}

export interface Message {
  role: "user" | "assistant";
  content: string;
  reasoning: string;
  calls: Call[];
  note: string;
  warnings: string[];
}

export interface Chat {
  id: string;
  title: string;
  messages: Message[];
}

const NAME = "cedar.chats";
const KEPT = 50;

export function freshChat(): Chat {
  return { id: Date.now().toString(36) + Math.random().toString(36).slice(2, 6), title: "", messages: [] };
}

export function freshMessage(role: Message["role"], content = ""): Message {
  return { role, content, reasoning: "", calls: [], note: "", warnings: [] };
}

export function loadChats(): Chat[] {
  const isRight = (read: unknown) =>
    Array.isArray(read) && read.length > 0 && read.every((one) => Array.isArray((one as Chat).messages));
  const read = stored<Chat[]>(NAME, [freshChat()], isRight);
  // chats of an older page may lack a field
  for (const chat of read) chat.messages = chat.messages.map((one) => ({ ...freshMessage(one.role), ...one }));
  return read;
}

export function saveChats(chats: Chat[]): void {
  store(NAME, chats.filter((one) => one.messages.length).slice(0, KEPT));
}

/** What the model is told: thoughts and answered calls go back with it, unanswered calls do not. */
export function history(messages: Message[], system: string): Record<string, unknown>[] {
  const told: Record<string, unknown>[] = system.trim() ? [{ role: "system", content: system }] : [];
  for (const message of messages) {
    if (message.role === "user") {
      told.push({ role: "user", content: message.content });
      continue;
    }
    const answered = message.calls.length > 0 && message.calls.every((call) => call.result !== undefined);
    told.push({
      role: "assistant",
      content: message.content,
      ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
      ...(answered
        ? { tool_calls: message.calls.map(({ id, name, arguments: given }) =>
            ({ id, type: "function", function: { name, arguments: given } })) }
        : {}),
    });
    if (answered) {
      for (const call of message.calls) told.push({ role: "tool", tool_call_id: call.id, content: call.result });
    }
  }
  return told;
}
