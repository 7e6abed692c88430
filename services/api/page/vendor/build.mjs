// Bundles entry.js and copies style sheets, the API reference and the licences into ../static/vendor/.
import { build } from "esbuild";
import { cp, mkdir, readFile, rm, writeFile } from "node:fs/promises";

const out = new URL("../static/vendor/", import.meta.url).pathname;
const packages = JSON.parse(await readFile("package.json", "utf8")).dependencies;
await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });
await build({ entryPoints: ["entry.js"], bundle: true, format: "esm", minify: true, target: "es2022", outfile: `${out}vendor.js`, legalComments: "none" });
await cp("node_modules/uplot/dist/uPlot.min.css", `${out}uplot.css`);
for (const file of ["swagger-ui-bundle.js", "swagger-ui.css"]) await cp(`node_modules/swagger-ui-dist/${file}`, `${out}${file}`);
const notices = [];
for (const name of Object.keys({ ...packages, "@preact/signals-core": "" }).sort()) {
  const about = JSON.parse(await readFile(`node_modules/${name}/package.json`, "utf8"));
  let text = "";
  for (const file of ["LICENSE", "LICENSE.md", "LICENSE.txt"]) text ||= await readFile(`node_modules/${name}/${file}`, "utf8").catch(() => "");
  notices.push(`${name} ${about.version} (${about.license})\n\n${text.trim()}\n`);
}
await writeFile(`${out}LICENSES.txt`, notices.join(`\n${"-".repeat(80)}\n\n`));
