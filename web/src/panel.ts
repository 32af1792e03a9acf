// The live panel: the queue, the speed, what of the last prompt was held, and the cache's pages by tier.

import { call, post, type Explained, type Health, type Model, type Stats, type Timings, type Usage } from "./api";
import { byId, bytes, count, element } from "./dom";

const SECONDS = 60;
const GRADES: Record<string, string> = {
  g0: "resumed from a snapshot, nothing again",
  g1: "resumed from a snapshot of the encoder's window",
  g2: "resumed, one window run again",
  g3: "resumed, windows rebuilt exactly",
};

let seesCache = true;
let lastBody: unknown = null;
/** Tokens that came in each of the last seconds, newest last. */
const tokens: number[] = new Array<number>(SECONDS).fill(0);

interface Part {
  name: "hit" | "again" | "new" | "free";
  what: string;
  size: number;
}

function drawBar(bar: HTMLElement, parts: Part[], key?: HTMLElement): void {
  const whole = parts.reduce((sum, part) => sum + part.size, 0) || 1;
  bar.replaceChildren(...parts.filter((part) => part.size > 0).map((part) => {
    const piece = element("i", part.name);
    piece.style.width = `${(100 * part.size) / whole}%`;
    piece.title = `${part.what}: ${count(part.size)}`;
    return piece;
  }));
  bar.setAttribute("aria-label", parts.map((part) => `${part.what} ${count(part.size)}`).join(", "));
  key?.replaceChildren(...parts.map((part) => {
    const shown = element("span");
    shown.append(element("i", part.name), `${count(part.size)} ${part.what}`);
    return shown;
  }));
}

export function tokenCame(): void {
  tokens[SECONDS - 1]! += 1;
}

function drawSpeed(): void {
  const most = Math.max(...tokens);
  const points = tokens.map((value, i) => `${i ? "L" : "M"}${((i * 120) / (SECONDS - 1)).toFixed(1)} ${(31 - (29 * value) / Math.max(most, 1)).toFixed(1)}`);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", points.join(""));
  byId("speed").replaceChildren(path);
  byId("rate").textContent = `${count(tokens[SECONDS - 1] ?? 0)} tokens/s now, ${count(most)} at most`;
  tokens.shift();
  tokens.push(0);
}

/** Which part of a prompt was held and which ran, and what the sequence costs. */
export function drawPrompt(usage: Usage, timings: Timings, model: Model | null, body: unknown): void {
  const held = usage.prompt_cache_hit_tokens;
  const again = Math.min(timings.replayed_tokens, held);
  const total = usage.prompt_tokens + usage.completion_tokens;
  byId("prompt").textContent = `${count(usage.prompt_tokens)} tokens, ${count(held)} found in the cache` +
    (held ? ` (${timings.cache_tier}, grade ${timings.resume.toUpperCase()}: ${GRADES[timings.resume] ?? ""})` : "");
  const parts: Part[] = [
    { name: "hit", what: "held", size: held - again },
    { name: "again", what: "held, run again", size: again },
    { name: "new", what: "computed", size: usage.prompt_tokens - held },
  ];
  drawBar(byId("prompt-bar"), parts, byId("prompt-key"));
  const context = model?.max_model_len ?? total;
  byId("cache").textContent =
    `This chat: ${bytes(timings.cache_bytes)} for ${count(total)} tokens, ${((100 * total) / context).toFixed(1)}% of the context` +
    (model ? `; ${count(model.global_kv_bytes_per_token)} bytes for every further token` : "");
  byId("time").textContent =
    `${timings.queue_s.toFixed(2)} s in the queue, ${timings.prefill_s.toFixed(2)} s reading, ${timings.decode_s.toFixed(2)} s writing`;
  byId("parted").textContent = "";
  byId("explain").hidden = !seesCache;
  lastBody = body;
}

/** Where the last prompt and what the cache held of others go different ways. */
export async function explain(): Promise<void> {
  const response = await post("/v1/cache/explain", lastBody);
  if (!response.ok) return;
  const told = (await response.json()) as Explained;
  byId("parted").textContent = told.note ??
    `${count(told.held_tokens)} of ${count(told.prompt_tokens)} tokens are held. The prompt goes on “${told.prompt}”` +
    (told.nearest ? `, the cache “${told.nearest}”.` : "; the cache knows nothing beyond.");
}

function drawPages(stats: Stats): void {
  const used = stats.pages - stats.free_pages;
  byId("pages").textContent = `Memory: ${count(used)} of ${count(stats.pages)} pages in use`;
  const parts: Part[] = [
    { name: "hit", what: "prefixes", size: stats.tree_pages },
    { name: "new", what: "of running answers", size: Math.max(0, used - stats.tree_pages) },
    { name: "free", what: "free", size: stats.free_pages },
  ];
  drawBar(byId("pages-bar"), parts, byId("pages-key"));
  const { disk } = stats;
  const bar = byId("disk-bar");
  bar.hidden = disk.pages === undefined;
  if (disk.pages === undefined) {
    byId("disk").textContent = "Disk: no tier (cedar serve --cache-dir DIR)";
  } else {
    const size = (disk.segment_bytes ?? 0) + (disk.index_bytes ?? 0);
    byId("disk").textContent = `Disk: ${count(disk.pages)} pages, ${bytes(size)} of ${bytes(disk.budget_bytes ?? 0)}`;
    const free = Math.max(0, (disk.budget_bytes ?? 0) - size);
    drawBar(bar, [{ name: "hit", what: "used", size }, { name: "free", what: "free", size: free }]);
  }
  const host = stats.host_pages ? `; ${count(stats.host_pages)} pages in host memory, ${bytes(stats.host_bytes ?? 0)}` : "";
  const pinned = stats.pinned_pages ? `; ${count(stats.pinned_pages)} pages pinned` : "";
  byId("snapshots").textContent =
    `${count(stats.snapshots)} snapshots in memory, ${bytes(stats.snapshot_bytes)}${host}${pinned}`;
}

async function look(): Promise<void> {
  const health = (await (await fetch("/health")).json()) as Health;
  byId("now").textContent = health.running === undefined
    ? health.status
    : `${count(health.running)} answers at work, ${count(health.waiting ?? 0)} waiting`;
  const stats = seesCache ? await call("/v1/cache/stats") : null;
  // no cache, or a key that may not look: not asked again
  seesCache = stats !== null && stats.ok;
  if (stats?.ok) drawPages((await stats.json()) as Stats);
  else byId("pages").textContent = "Memory: this key may not look";
}

/** Once a second while somebody looks. */
export async function watch(): Promise<void> {
  drawSpeed();
  if (!byId("panel").hidden && !document.hidden) {
    try {
      await look();
    } catch {
      byId("now").textContent = "no answer";
    }
  }
  setTimeout(() => void watch(), 1000);
}
