// The server's routes, and the shapes of what they say.

export interface Model {
  id: string;
  max_model_len: number;
  global_kv_bytes_per_token: number;
}

export interface Timings {
  queue_s: number;
  prefill_s: number;
  decode_s: number;
  cache_bytes: number;
  cache_tier: string;
  resume: string;
  replayed_tokens: number;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_cache_hit_tokens: number;
}

export interface CallDelta {
  index: number;
  id?: string;
  function: { name?: string; arguments?: string };
}

export interface Chunk {
  choices: { delta: { content?: string; reasoning_content?: string; tool_calls?: CallDelta[] }; finish_reason: string | null }[];
  usage?: Usage;
  timings?: Timings;
  warnings?: string[];
  error?: { message: string };
}

export interface Health {
  status: string;
  running?: number;
  waiting?: number;
}

export interface Stats {
  pages: number;
  free_pages: number;
  tree_pages: number;
  pinned_pages?: number;
  host_pages?: number;
  host_bytes?: number;
  snapshots: number;
  snapshot_bytes: number;
  disk: { pages?: number; segment_bytes?: number; index_bytes?: number; budget_bytes?: number };
}

export interface Explained {
  prompt_tokens: number;
  held_tokens: number;
  prompt: string;
  nearest: string;
  note: string | null;
}

const KEY = "cedar.key";
let key = sessionStorage.getItem(KEY) ?? "";

/** fetch with the key, if the server wants one; asks for it once it is refused. */
export async function call(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  if (key) headers.set("authorization", `Bearer ${key}`);
  const response = await fetch(path, { ...options, headers });
  if (response.status !== 401) return response;
  const given = prompt("This server wants an API key:");
  if (!given) return response;
  key = given.trim();
  sessionStorage.setItem(KEY, key);
  return call(path, options);
}

export function post(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  const headers = { "content-type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal: signal ?? null });
}

/** Events of a server-sent stream: the JSON of each data line, or the text of a comment. */
export async function* eventsOf(body: ReadableStream<Uint8Array>): AsyncGenerator<Chunk | string> {
  const reader = body.pipeThrough(new TextDecoderStream() as ReadableWritablePair<string, Uint8Array>).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) {
      if (part.startsWith(":")) yield part.slice(1).trim();
      else if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6)) as Chunk;
    }
  }
}
