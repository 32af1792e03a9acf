// web/src/*.ts, page.css and index.html -> cedar/server/static/index.html: one file, nothing loaded from elsewhere.
// The first line of the result holds a digest of these sources; tests/server/test_page_build.py compares it.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "..", "cedar", "server", "static", "index.html");
const read = (name) => readFileSync(join(here, name), "utf8");

const names = ["build.mjs", "index.html", "page.css", ...readdirSync(join(here, "src")).map((name) => `src/${name}`)];
const digest = createHash("sha256");
for (const name of names.sort()) digest.update(`${name}\n${read(name)}`);

const bundled = await build({
  entryPoints: [join(here, "src", "main.ts")],
  bundle: true,
  write: false,
  format: "iife",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
});
// a script element ends at the first closing tag, even inside a string
const script = bundled.outputFiles[0].text.replaceAll("</script", "<\\/script");
const page = read("index.html")
  .replace("<!-- style -->", () => `<style>\n${read("page.css")}</style>`)
  .replace("<!-- script -->", () => `<script>\n${script}</script>`);
writeFileSync(target, `<!-- made by \`make page\` from web/ ${digest.digest("hex")} -->\n${page}`);
