// What one message looks like, while it is being written and after.

import type { Call, Message } from "./chats";
import { button, element } from "./dom";

export interface Box {
  box: HTMLElement;
  text: HTMLElement;
  /** Draws what came since the last time. */
  grow: () => void;
}

/** Text with its fenced code in boxes of their own; everything else stays as it was written. */
function fill(place: HTMLElement, said: string): void {
  if (!said.includes("```")) {
    // only what is new is added: long answers would flicker and cost too much otherwise
    const more = said.slice(place.textContent.length);
    if (more) place.append(more);
    return;
  }
  place.replaceChildren();
  said.split(/^```[^\n]*\n?/m).forEach((part, i) => {
    if (i % 2) place.append(element("pre", "", part.replace(/\n$/, "")));
    else if (part) place.append(part);
  });
}

function callBox(made: Call, onResult: () => void): HTMLElement {
  const shown = element("details", "call");
  shown.append(element("summary", "", `Call of ${made.name}`), element("pre"));
  const result = element("textarea");
  result.rows = 1;
  result.placeholder = "What the tool says";
  result.setAttribute("aria-label", `Result of ${made.name}`);
  result.value = made.result ?? "";
  result.addEventListener("input", () => {
    if (result.value) made.result = result.value;
    else delete made.result;
    onResult();
  });
  shown.append(result);
  return shown;
}

export function boxOf(message: Message, onResults: (message: Message) => void): Box {
  const box = element("article", message.role);
  const text = element("div", "text");
  if (message.role === "user") {
    fill(text, message.content);
    box.append(text);
    return { box, text, grow: () => undefined };
  }
  const thought = element("details", "thought");
  const thoughtText = element("div", "text");
  const calls = element("div");
  const answer = button("Send the results", "Go on with what the tools said", () => onResults(message));
  const warnings = element("div");
  const note = element("div", "note");
  answer.hidden = true;
  thought.append(element("summary", "", "Thoughts"), thoughtText);
  box.append(thought, text, calls, answer, warnings, note);
  const look = () => {
    answer.hidden = !message.calls.length || message.calls.some((made) => made.result === undefined);
  };
  const grow = () => {
    thought.hidden = !message.reasoning;
    fill(thoughtText, message.reasoning);
    fill(text, message.content);
    message.calls.forEach((made, i) => {
      if (!calls.children[i]) calls.append(callBox(made, look));
      calls.children[i]?.querySelector("pre")?.replaceChildren(made.arguments);
    });
    if (warnings.childElementCount < message.warnings.length) {
      warnings.replaceChildren(...message.warnings.map((one) => element("div", "warning", one)));
    }
    note.textContent = message.note;
    look();
  };
  grow();
  return { box, text, grow };
}
