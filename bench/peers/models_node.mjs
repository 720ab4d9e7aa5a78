// The speed of llama.cpp's build for this processor, from the npm package node-llama-cpp; models_peers.py calls it.
//
//     node models_node.mjs FOLDER alone|together FILE THREADS SECONDS
//
// FOLDER has node_modules. Batches go straight to llama.cpp's decode, as in its own llama-bench: no token is sampled,
// and JavaScript does nothing between two tokens but fill the next batch. The last line is the result as JSON.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const LENGTHS = [512, 2048], BEGINNING = 64, WRITTEN = 32, TEXTS = 8, BATCH = 512;
const [folder, part, path, threads, seconds] = process.argv.slice(2);
const { getLlama } = await import(pathToFileURL(`${folder}/node_modules/node-llama-cpp/dist/index.js`));
const llama = await getLlama({ gpu: false, build: "never", progressLogs: false, logLevel: "error" });
const { AddonModel, AddonContext } = llama._bindings;

const model = new AddonModel(path, { gpuLayers: 0, useMmap: true });
if (!(await model.init())) throw new Error(`llama.cpp cannot load ${path}`);
const texts = part === "alone" ? 1 : TEXTS;
const context = new AddonContext(model, {
  contextSize: part === "alone" ? LENGTHS.at(-1) + 256 : 256 * TEXTS,
  batchSize: BATCH, sequences: texts, flashAttention: "auto", threads: Number(threads),
});
if (!(await context.init())) throw new Error("llama.cpp cannot make a context");

const id = (place) => (place * 7919) % 40000 + 10;
const ids = (start, count, text = 0) => Uint32Array.from({ length: count }, (_, i) => id(text + start + i));
const last = (count) => Uint32Array.of(count - 1);

/** Reads the tokens of a text from `start` to `end`, a batch at a time. */
async function read(text, start, end) {
  for (let at = start; at < end; at += BATCH) {
    const count = Math.min(BATCH, end - at);
    context.initBatch(count);
    context.addToBatch(text, at, ids(at, count, text), last(count));
    await context.decodeBatch();
  }
}

/** Seconds of a function; every text is empty before. */
async function timed(prepare, run) {
  for (let text = 0; text < texts; text++) context.disposeSequence(text);
  await prepare();
  const start = performance.now();
  await run();
  return (performance.now() - start) / 1000;
}

/** The highest rate of `tokens` of as many runs as fit in the seconds. */
async function best(tokens, prepare, run) {
  const start = performance.now();
  let rate = 0;
  do rate = Math.max(rate, tokens / (await timed(prepare, run)));
  while (performance.now() - start < seconds * 1000);
  return rate;
}

/** Writes tokens of all texts together. */
async function write(start, count) {
  for (let at = start; at < start + count; at++) {
    context.initBatch(texts);
    for (let text = 0; text < texts; text++) context.addToBatch(text, at, ids(at, 1, text), last(1));
    await context.decodeBatch();
  }
}

const nothing = async () => {};
const result = {};
await timed(nothing, () => read(0, 0, BEGINNING));
if (part === "alone") {
  result.prefill = [];
  for (const length of LENGTHS) result.prefill.push(await best(length, nothing, () => read(0, 0, length)));
  result.decode = await best(WRITTEN, () => read(0, 0, BEGINNING), () => write(BEGINNING, WRITTEN));
  result.peak = Number(readFileSync("/proc/self/status", "utf8").match(/VmHWM:\s*(\d+)/)[1]) * 1024;
} else {
  const prepare = async () => { for (let text = 0; text < texts; text++) await read(text, 0, 4); };
  result.sum = await best(TEXTS * 2 * WRITTEN, prepare, () => write(4, 2 * WRITTEN));
}
// The library that llama.cpp chose for this processor.
result.features = readFileSync("/proc/self/maps", "utf8").match(/libggml-cpu-(\w+)\.so/)?.[1] ?? "unknown";
console.log(JSON.stringify(result));
process.exit(0);
