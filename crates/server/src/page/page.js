// The page of `march serve`. It uses the same HTTP interface as any other client; docs/serve.md describes it.
// Texts of the server and of the user reach the document as text only, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);

/** An element with properties and children; strings become text. */
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** An element of a drawing. */
function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const count = (number) => number.toLocaleString("en-US");
const counted = (number, thing) => `${count(number)} ${thing}${number === 1 ? "" : "s"}`;

function inBytes(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${unit === 0 || bytes >= 100 ? bytes.toFixed(0) : bytes.toPrecision(3)} ${units[unit]}`;
}

function percent(share) {
  const value = 100 * share;
  if (value === 0) return "0 %";
  if (value < 0.01) return "<0.01 %";
  return `${value.toFixed(value < 10 ? 2 : 1)} %`;
}

// The server

/** A request that the server refused, or that did not reach it. */
class Failure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** What is kept until the tab is closed; a browser may refuse to keep anything. */
const kept = {
  get(name) {
    try { return sessionStorage.getItem(name); } catch { return null; }
  },
  set(name, value) {
    try { sessionStorage.setItem(name, value); } catch { /* then it is asked for again */ }
  },
};

let key = kept.get("march-key");

async function request(method, path, body, signal) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server could not be reached.");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Failure(said?.error?.message ?? `The server answered with status ${response.status}.`, response.status);
}

async function get(path) {
  return (await request("GET", path)).json();
}

const place = (id) => `v1/sessions/${encodeURIComponent(id)}`;

/** The parts of a streamed answer. */
async function* parts(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure("The connection to the server was lost.");
    }
    if (read.done) return;
    const lines = (rest + decoder.decode(read.value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// What is open

let model = null;    // the entry of /v1/models
let session = null;  // the open conversation, once the server has it
let turns = [];      // its turns
let stopper = null;  // stops the answer that is being written
const extras = new Map(); // by conversation, for each turn: what the server says only once

const routes = () => model?.march?.routes === true;
const ownPolicy = () => model?.march?.policy ?? "";
const extraOf = (id) => extras.get(id) ?? extras.set(id, []).get(id);

// Messages to the user

function say(text) {
  $("alert").textContent = "";
  $("status").textContent = text;
}

function report(error) {
  if (error.status === 401) return askKey(error.message);
  $("status").textContent = "";
  $("alert").textContent = error.message;
}

function askKey(message) {
  $("key-message").textContent = key ? message : "";
  $("key").value = "";
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

/** Asks before something is lost. */
function confirmed(text, label) {
  const dialog = $("confirm-dialog");
  $("confirm-text").textContent = text;
  $("confirm-yes").textContent = label;
  dialog.showModal();
  return new Promise((resolve) => {
    $("confirm-yes").onclick = () => { resolve(true); dialog.close(); };
    $("confirm-no").onclick = () => dialog.close();
    dialog.onclose = () => resolve(false);
  });
}

/** While an answer is written or a conversation changes, buttons that would change it rest. */
let busy = false;

function setBusy(now) {
  busy = now;
  for (const button of document.querySelectorAll(".when-idle")) button.disabled = now;
  $("send").disabled = now;
  $("send").hidden = stopper !== null;
  $("stop").hidden = stopper === null;
}

/** Does something that may fail. */
async function act(action) {
  if (busy) return;
  say("");
  setBusy(true);
  try {
    await action();
  } catch (error) {
    report(error);
  } finally {
    setBusy(false);
  }
}

// Conversations

/** The conversation that the address names. */
const named = () => location.hash.slice(1);

function setName(id) {
  if (named() !== id) history.replaceState(null, "", id ? `#${id}` : location.pathname + location.search);
}

/** A new id: the beginning of the text, so that the list can be read, and some random characters. */
function newId(text) {
  const words = text.toLowerCase().match(/[a-z0-9]+/g)?.slice(0, 4).join("-").slice(0, 32).replace(/-$/, "");
  const random = crypto.getRandomValues(new Uint8Array(5));
  return `${words || "chat"}-${Array.from(random, (byte) => (byte % 36).toString(36)).join("")}`;
}

async function refreshList() {
  const { data } = await get("v1/sessions");
  $("unsaved").hidden = !data.some((one) => one.saved === false);
  $("list").replaceChildren(...data.map((one) => {
    const facts = [counted(one.turns, "turn"), counted(one.tokens, "token")];
    if (one.model !== model?.id) facts.push(`of the model ${one.model}`);
    const pick = make("button", { type: "button", className: "pick when-idle", title: one.id },
      make("span", {}, one.id), make("span", { className: "hint" }, facts.join(" · ")));
    pick.onclick = () => go(one.id);
    const cross = draw("path", { d: "M3 3l10 10M13 3L3 13" });
    const remove = make("button", { type: "button", className: "delete quiet when-idle" },
      draw("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, cross));
    remove.setAttribute("aria-label", `Delete ${one.id}`);
    remove.onclick = () => removeConversation(one.id);
    const item = make("li", {}, pick, remove);
    item.dataset.id = one.id;
    return item;
  }));
  markOpen();
  setBusy(busy);
}

function markOpen() {
  for (const item of $("list").children) {
    const open = item.dataset.id === session?.id;
    item.classList.toggle("open", open);
    item.querySelector(".pick").ariaCurrent = open ? "true" : null;
  }
}

/** Shows a conversation, or an empty one that the first message begins. */
function show(next) {
  CSS.highlights?.clear();
  session = next;
  turns = next?.history ?? [];
  setName(next?.id ?? "");
  $("title").textContent = next?.id ?? "New conversation";
  document.title = `${next?.id ?? "New conversation"} – ${model?.id ?? "march"}`;
  showPolicy(next?.policy ?? ownPolicy());
  $("turns").replaceChildren(...turns.map(turnItem));
  $("empty").hidden = turns.length > 0;
  drawMemory();
  markOpen();
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

/** Opens the conversation that the address names. */
async function openNamed() {
  const id = named();
  if (!id) return show(null);
  try {
    const found = await get(place(id));
    if (named() === id) show(found);
  } catch (error) {
    if (error.status !== 401) show(null);
    throw error;
  }
}

function go(id) {
  closeDrawer();
  if (named() === id) return act(openNamed);
  location.hash = id;
}

/** Shows what the server has, if it has other turns than the page. */
async function resume() {
  if (!session) return;
  try {
    const found = await get(place(session.id));
    if (found.turns !== turns.length) show(found);
  } catch (error) {
    if (error.status === 404) show(null);
  }
}

async function removeConversation(id) {
  if (!await confirmed(`Delete the conversation ${id}? This cannot be undone.`, "Delete")) return;
  await act(async () => {
    await request("DELETE", place(id));
    extras.delete(id);
    if (session?.id === id) show(null);
    await refreshList();
    say(`The conversation ${id} was deleted.`);
  });
  $("new").focus();
}

/** A new conversation with the first turns of this one. */
function fork(number) {
  return act(async () => {
    const { id } = session;
    const copy = newId(turns[0].messages.findLast((message) => message.role === "user")?.content ?? "");
    await request("PUT", place(copy), { from: id, turns: number });
    extras.set(copy, extraOf(id).slice(0, number));
    show(await get(place(copy)));
    await refreshList();
    say(`This is a new conversation with the first ${counted(number, "turn")} of ${id}.`);
    $("input").focus();
  });
}

/** Goes back to the first turns. */
async function undo(number) {
  const lost = turns.length - number;
  if (lost > 1 && !await confirmed(`Remove the last ${lost} turns? This cannot be undone.`, "Remove")) return;
  await act(async () => {
    const text = turns[number].messages.findLast((message) => message.role === "user")?.content;
    await request("PUT", place(session.id), { turns: number });
    extraOf(session.id).length = Math.min(number, extraOf(session.id).length);
    show(await get(place(session.id)));
    await refreshList();
    if (text && !$("input").value) $("input").value = text;
    say(`${lost === 1 ? "The last turn was" : `The last ${lost} turns were`} removed.`);
    $("input").focus();
  });
}

// Turns

const ROLES = { user: "You", assistant: "Assistant", system: "System", developer: "Developer", tool: "Tool" };

/** Reasoning, folded away; hidden while there is none. */
function thoughts(text) {
  const body = make("div", { className: "thought", dir: "auto" }, text);
  const view = make("details", { className: "thoughts" }, make("summary", {}, "Reasoning"), body);
  view.hidden = text === "";
  return view;
}

function message(role, text, reasoning = "") {
  const body = make("div", { className: "text", dir: "auto" }, role === "assistant" ? text.trimStart() : text);
  return make("div", { className: `message ${role === "user" ? "user" : "answer"}` },
    make("h3", { className: "role" }, ROLES[role] ?? role), ...(role === "assistant" ? [thoughts(reasoning)] : []), body);
}

/** An answer: of one with parts, its content and its calls. */
function answered({ answer, said }) {
  if (!said) return message("assistant", answer);
  const calls = (said.tool_calls ?? []).map(({ function: { name, arguments: given } }) => `${name}(${given})`);
  return message("assistant", [said.content, ...calls].join("\n"), said.reasoning_content);
}

function turnItem(turn, index) {
  const number = index + 1;
  const button = (label, name, className, action) => {
    const element = make("button", { type: "button", className: `${className} quiet when-idle` }, label);
    element.setAttribute("aria-label", name);
    element.onclick = action;
    return element;
  };
  return make("li", { className: "turn" },
    ...turn.messages.map((one) => message(one.role, one.content)),
    answered(turn),
    make("div", { className: "below" },
      make("p", { className: "source" }),
      make("p", { className: "numbers" }, ...numbers(turn, extras.get(session?.id)?.[index])),
      recallView(index),
      make("div", { className: "actions" },
        button("Fork from here", `Fork after turn ${number}`, "fork", () => fork(number)),
        button("Undo to here", `Undo all turns after turn ${number}`, "undo-to", () => undo(number)),
        button("Undo", `Undo turn ${number}`, "undo", () => undo(number - 1)))));
}

/** The line of numbers under an answer. */
function numbers(turn, extra) {
  const facts = [];
  if (extra) facts.push(counted(extra.tokens, "token"));
  if (extra?.rate) facts.push(`${extra.rate} tokens/s`);
  if (extra?.cached > 0) facts.push(`${counted(extra.prompt - extra.cached, "token")} of the prompt read, ${count(extra.cached)} known`);
  if (extra?.reason === "length") facts.push("ended at max tokens");
  if (turn.tokens !== undefined) {
    facts.push(`conversation ${counted(turn.tokens, "token")}`, `memory ${inBytes(turn.bytes)}`);
    if (routes()) facts.push(counted(turn.anchors, "anchor"));
    if (routes() && extra) facts.push(make("code", { className: "policy" }, extra.policy));
  }
  return facts.flatMap((fact, index) => [index > 0 ? " · " : "", make("span", {}, fact)]);
}

const rateOf = (tokens, milliseconds) =>
  tokens > 0 && milliseconds > 0 ? (1000 * tokens / milliseconds).toFixed(1) : null;

/** Sends the text in the input and shows the answer as it arrives. */
async function send() {
  const text = $("input").value;
  if (busy || !text.trim()) return;
  say("");
  const stop = new AbortController();
  stopper = stop;
  setBusy(true);
  const turn = { messages: [{ role: "user", content: text }], answer: "" };
  const first = session === null;
  const item = turnItem(turn, turns.length);
  item.classList.add("running");
  const answer = item.querySelector(".answer > .text");
  const thinking = item.querySelector(".answer > .thoughts");
  const line = item.querySelector(".numbers");
  line.textContent = "Waiting for the first token …";
  // Screen readers read the answer once it is whole.
  answer.setAttribute("aria-live", "polite");
  answer.setAttribute("aria-busy", "true");
  $("turns").append(item);
  $("empty").hidden = true;
  $("input").value = "";
  $("input").focus();
  const scroll = $("scroll");
  scroll.scrollTop = scroll.scrollHeight;
  try {
    const extra = await ask(turn, stop.signal, (added, tokens, rate) => {
      const follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
      turn.answer += added;
      answer.firstChild.data = turn.answer.trimStart();
      thinking.hidden = !turn.reasoning;
      thinking.lastChild.firstChild.data = turn.reasoning ?? "";
      line.textContent = counted(tokens, "token") + (rate ? ` · ${rate} tokens/s` : "");
      if (follows) scroll.scrollTop = scroll.scrollHeight;
    });
    const index = turns.push(turn) - 1;
    extraOf(session.id)[extra.turn - 1] = extra;
    session.policy = extra.policy;
    answer.setAttribute("aria-busy", "false");
    item.classList.remove("running");
    line.replaceChildren(...numbers(turn, extra));
    item.querySelector(".recall").replaceWith(recallView(index));
    showSource(item, extra.recall);
    showPolicy(extra.policy);
    drawMemory();
    scroll.scrollTop = scroll.scrollHeight;
    // Another client may have added turns.
    if (extra.turn !== turns.length) await resume();
  } catch (error) {
    item.remove();
    $("empty").hidden = turns.length > 0;
    const typed = $("input").value;
    $("input").value = typed ? `${text}\n${typed}` : text;
    await resume();
    if (first && session && turns.length === 0) await discard();
    if (error.name === "AbortError") say("Stopped. The turn was not kept; your text is back in the input.");
    else report(error);
  } finally {
    stopper = null;
    setBusy(false);
    if (document.activeElement === document.body) $("input").focus();
  }
  await refreshList().catch(report);
}

/** Deletes a conversation whose first turn failed, and shows the new conversation that it was before. */
async function discard() {
  const policy = wantedPolicy();
  for (let tries = 0; ; tries++) {
    try {
      await request("DELETE", place(session.id));
      break;
    } catch (error) {
      // The server may still be ending the turn.
      if (error.status !== 409 || tries === 20) return;
      await new Promise((resolve) => { setTimeout(resolve, 100); });
    }
  }
  show(null);
  showPolicy(policy);
}

/** Asks for a turn; calls `wrote` with every part of the answer. Returns what is only known of a new turn. */
async function ask(turn, signal, wrote) {
  const text = turn.messages[0].content;
  if (!session) {
    const id = newId(text);
    session = await (await request("PUT", place(id), {}, signal)).json();
    setName(id);
    $("title").textContent = id;
    document.title = `${id} – ${model?.id ?? "march"}`;
  }
  const chat = session.kind !== "text";
  const body = { session: session.id, recall: true, stream: true };
  if (chat) body.messages = turn.messages;
  else body.prompt = text;
  for (const [name, id] of [["max_tokens", "max-tokens"], ["temperature", "temperature"], ["seed", "seed"]]) {
    if ($(id).value !== "") body[name] = Number($(id).value);
  }
  if (policyChanged()) body.memory = wantedPolicy();
  const response = await request("POST", chat ? "v1/chat/completions" : "v1/completions", body, signal);
  let [tokens, began, last, reason] = [0, 0, null, null];
  const rate = () => rateOf(tokens - 1, performance.now() - began);
  try {
    for await (const part of parts(response)) {
      if (part.error) throw new Failure(part.error.message);
      if (part.march) last = { ...part, rate: rate() };
      const choice = part.choices?.[0];
      if (!choice || choice.delta?.role) continue;
      if (tokens++ === 0) began = performance.now();
      reason = choice.finish_reason ?? reason;
      if (choice.delta?.reasoning_content) turn.reasoning = (turn.reasoning ?? "") + choice.delta.reasoning_content;
      wrote(choice.delta?.content ?? choice.text ?? "", tokens, rate());
    }
  } catch (error) {
    // The turn is kept once its last part was sent.
    if (!last) throw error;
  }
  if (!last) throw new Failure("The connection ended before the answer was complete.");
  const { march } = last;
  if (turn.reasoning) turn.said = { content: turn.answer, reasoning_content: turn.reasoning };
  Object.assign(turn, { tokens: march.tokens, bytes: march.memory.bytes, anchors: march.memory.anchors });
  session.kind ??= "chat";
  return {
    turn: march.turn, policy: march.memory.policy, recall: march.recall, reason, rate: last.rate,
    tokens: last.usage?.completion_tokens ?? tokens,
    prompt: last.usage?.prompt_tokens, cached: last.usage?.prompt_tokens_details?.cached_tokens,
  };
}

// What was read

function recallView(index) {
  const view = make("details", { className: "recall" }, make("summary", {}, "What was read"));
  const filled = () => {
    const extra = extras.get(session?.id)?.[index];
    if (extra?.recall?.anchors.length > 0) return readView(extra.recall);
    let why = "This is shown for answers that were written since the page was loaded. The server does not store it.";
    if (extra) {
      why = "There was no anchor to read yet: all text is in the current state. A smaller interval places anchors earlier.";
    }
    if (!routes()) why = "This model does not route: it has no anchors, and it answers from its current state only.";
    return make("p", { className: "read hint" }, why);
  };
  view.addEventListener("toggle", () => view.append(filled()), { once: true });
  return view;
}

const mean = (list) => list.reduce((sum, value) => sum + (value ?? 0), 0) / Math.max(list.length, 1);

/** Where in the messages on the page the parts of the text before an answer are: a range each, or null. A tokenizer may
    leave words out, so each word of a part is looked for after the one before it. */
function rangesOf(anchors) {
  const nodes = [...document.querySelectorAll("#turns .message > .text")].map((body) => body.firstChild).filter(Boolean);
  const near = 400; // a word that does not come soon is not on the page, such as the name of a role
  let [node, at] = [0, 0];
  const next = (word) => {
    for (let [n, from] = [node, at]; n < nodes.length && n <= node + 1; [n, from] = [n + 1, 0]) {
      const found = nodes[n].data.indexOf(word, from);
      if (found >= 0 && found - from < near) return [n, found];
    }
    return null;
  };
  return anchors.map(({ text }) => {
    const range = new Range();
    let empty = true;
    for (const word of text.split(/\s+/).filter(Boolean)) {
      const found = next(word);
      if (!found) continue;
      [node, at] = [found[0], found[1] + word.length];
      if (empty) range.setStart(nodes[node], found[1]);
      range.setEnd(nodes[node], at);
      empty = false;
    }
    return empty ? null : range;
  });
}

/** Lights up the parts of the conversation that an answer read most, if they stand out, and quotes the first of them under
    the answer: anchors next to each other often hold parts of one sentence. */
function showSource(item, recall) {
  CSS.highlights?.clear();
  const anchors = recall?.anchors ?? [];
  // The layers differ: the first cannot choose, because its anchors all have the same key.
  const strongest = anchors.map(({ weights }) => weights.reduce((most, weight) => Math.max(most, weight ?? 0), 0));
  const best = strongest.indexOf(strongest.reduce((most, weight) => Math.max(most, weight), 0));
  if (best < 0 || strongest[best] < Math.max(0.1, 4 / anchors.length)) return;
  const much = (index) => strongest[index] >= 0.3 * strongest[best];
  const ranges = rangesOf(anchors);
  if (!ranges[best]) return;
  const quoted = ranges[best].cloneRange();
  let share = strongest[best];
  for (const step of [-1, 1]) {
    for (let index = best + step; much(index) && ranges[index]; index += step) {
      if (ranges[index].startContainer !== quoted.startContainer) break;
      if (step < 0) quoted.setStart(ranges[index].startContainer, ranges[index].startOffset);
      else quoted.setEnd(ranges[index].endContainer, ranges[index].endOffset);
      share += strongest[index];
    }
  }
  const quote = make("button", { type: "button" }, quoted.toString());
  quote.onclick = () => toRange(quoted);
  item.querySelector(".source").replaceChildren(`Read most (${percent(share)}): `, quote);
  const lit = ranges.filter((range, index) => range && much(index));
  CSS.highlights?.set("source", new Highlight(quoted, ...lit));
}

/** Scrolls to a range of the conversation. */
function toRange(range) {
  const scroll = $("scroll");
  const above = range.getBoundingClientRect().top - scroll.getBoundingClientRect().top;
  scroll.scrollBy({ top: above - scroll.clientHeight / 2 });
}

/** The text before an answer, by anchor, shaded by how much the answer read of it. */
function readView(recall) {
  const { anchors } = recall;
  const layers = make("select", {}, make("option", { value: "mean" }, "mean"),
    ...Array.from({ length: recall.layers }, (_, layer) => make("option", { value: layer }, `${layer + 1}`)));
  const weightOf = (list) => (layers.value === "mean" ? mean(list) : list[layers.value] ?? 0);
  const most = make("span");
  const none = make("span", { className: "none" });
  const list = make("div", { className: "segments", role: "listbox" });
  list.setAttribute("aria-label", "Text before the answer, by anchor");
  const detail = make("div", { className: "detail" });

  const segments = anchors.map((anchor) =>
    make("span", { className: "segment", role: "option", tabIndex: -1 }, anchor.text.replaceAll("\n", "↵\n")));
  list.append(...segments);

  let [chosen, looked] = [0, 0];
  // The pointer looks at a segment; the keyboard also stays there.
  const look = (index) => {
    segments[looked].classList.remove("looked");
    looked = index;
    segments[looked].classList.add("looked");
    detail.replaceChildren(weightTable(anchors[looked], recall, layers.value));
  };
  const choose = (index) => {
    segments[chosen].tabIndex = -1;
    segments[chosen].setAttribute("aria-selected", "false");
    chosen = index;
    segments[chosen].tabIndex = 0;
    segments[chosen].setAttribute("aria-selected", "true");
    look(index);
  };
  const shade = () => {
    const weights = anchors.map((anchor) => weightOf(anchor.weights));
    const greatest = Math.max(weights.reduce((a, b) => Math.max(a, b), 0), Number.MIN_VALUE);
    weights.forEach((weight, index) => {
      const { ordinal, from, to, text } = anchors[index];
      segments[index].style.setProperty("--weight", (weight / greatest).toFixed(4));
      segments[index].setAttribute("aria-label",
        `Anchor ${ordinal}, ${range(from, to)}, weight ${percent(weight)}: ${text}`);
    });
    most.textContent = percent(greatest);
    none.textContent = `None of the anchors: ${percent(weightOf(recall.null))}`;
    return weights.indexOf(greatest);
  };

  const indexOf = (event) => segments.indexOf(event.target.closest(".segment"));
  list.addEventListener("focusin", (event) => { if (indexOf(event) >= 0) choose(indexOf(event)); });
  list.addEventListener("pointermove", (event) => {
    const index = indexOf(event);
    if (index >= 0 && index !== looked) look(index);
  });
  list.addEventListener("keydown", (event) => {
    const [before, after] = [chosen - 1, chosen + 1];
    const goals = {
      ArrowLeft: before, ArrowUp: before, ArrowRight: after, ArrowDown: after, Home: 0, End: segments.length - 1,
    };
    if (!(event.key in goals)) return;
    event.preventDefault();
    segments[goals[event.key]]?.focus();
  });
  layers.addEventListener("change", () => { shade(); look(looked); });
  choose(Math.max(shade(), 0));

  return make("div", { className: "read" },
    make("div", { className: "read-head" },
      make("label", {}, "Layer", layers),
      make("span", { className: "scale" }, "0 %", make("i"), most),
      none),
    list, detail,
    make("p", { className: "hint" },
      "The stronger the shade, the more was read: weights are means over heads and "
        + `${counted(recall.tokens, "token")}: the last before the answer, and those of the answer. `,
      `After token ${count(anchors.at(-1).to)} there was no anchor to read; later text is in the current state.`));
}

/** Tokens as people count them, from 1. */
const range = (from, to) => (to - from === 1 ? `token ${count(to)}` : `tokens ${count(from + 1)} to ${count(to)}`);

/** The weights of an anchor and of reading none, by layer. */
function weightTable(anchor, recall, layer) {
  const cell = (tag, text, number) =>
    make(tag, { className: String(number) === layer ? "chosen" : "", scope: tag === "th" ? "col" : "" }, text);
  const row = (name, list) => make("tr", {}, make("th", { scope: "row" }, name),
    cell("td", percent(mean(list)), "mean"), ...list.map((weight, number) => cell("td", percent(weight ?? 0), number)));
  return make("table", {},
    make("caption", {}, make("b", {}, `Anchor ${count(anchor.ordinal)}`), ` · ${range(anchor.from, anchor.to)}`),
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Layer"), cell("th", "mean", "mean"),
      ...anchor.weights.map((_, number) => cell("th", `${number + 1}`, number)))),
    make("tbody", {}, row("Anchor", anchor.weights), row("None", recall.null)));
}

// The memory policy

const POLICY = { interval: "", "top-k": "dense", retention: "all", placement: "periodic", storage: "f32" };

/** The settings of a policy, with defaults for those that it does not name. */
function settingsOf(policy) {
  const settings = { ...POLICY };
  for (const setting of policy.split(/\s+/).filter((one) => one.includes("="))) {
    settings[setting.slice(0, setting.indexOf("="))] = setting.slice(setting.indexOf("=") + 1);
  }
  return settings;
}

function showPolicy(policy) {
  const settings = settingsOf(policy);
  if (settings["top-k"] === "dense") settings["top-k"] = "";
  for (const name of Object.keys(POLICY)) $(name).value = settings[name];
  hintPolicy();
}

function wantedPolicy() {
  const value = (name) => $(name).value.trim() || settingsOf(ownPolicy())[name];
  const settings = Object.keys(POLICY).map((name) => [name, name === "top-k" ? $(name).value || "dense" : value(name)]);
  return settings.map(([name, setting]) => `${name}=${setting}`).join(" ");
}

function policyChanged() {
  const now = settingsOf(session?.policy ?? ownPolicy());
  const wanted = settingsOf(wantedPolicy());
  return routes() && Object.keys({ ...now, ...wanted }).some((name) => now[name] !== wanted[name]);
}

function hintPolicy() {
  const changed = policyChanged();
  $("policy-hint").classList.toggle("changed", changed);
  $("policy-hint").textContent = !changed ? "A change applies from the next message on. Empty top-k: dense."
    : turns.length > 0 ? "Changed: the next message has the conversation read again with this policy."
      : "Changed: the conversation will use this policy.";
}

// The memory's size

function drawMemory() {
  const last = turns.at(-1);
  const facts = last ? [inBytes(last.bytes), counted(last.tokens, "token")] : ["Nothing has been read yet."];
  if (last && routes()) facts.push(counted(last.anchors, "anchor"));
  $("memory-now").textContent = facts.join(" · ");
  if (!last) return $("chart").replaceChildren();
  const [left, right, top, bottom] = [6, 250, 20, 104];
  const greatest = (name) => turns.reduce((most, turn) => Math.max(most, turn[name]), 1);
  const [tokens, bytes] = [greatest("tokens"), greatest("bytes")];
  const points = turns.map((turn) => ({
    x: (left + (right - left) * turn.tokens / tokens).toFixed(1),
    y: (bottom - (bottom - top) * turn.bytes / bytes).toFixed(1),
    says: `${inBytes(turn.bytes)} after ${counted(turn.tokens, "token")}`,
  }));
  const path = points.map(({ x, y }) => `${x},${y}`).join(" ");
  const axes = `M${left} ${bottom}H${right}M${left} ${top}H${right}`;
  const svg = draw("svg", { viewBox: "0 0 256 124", role: "img" },
    draw("path", { class: "axis", d: axes, "stroke-dasharray": "2 3" }),
    draw("polygon", { class: "area", points: `${points[0].x},${bottom} ${path} ${points.at(-1).x},${bottom}` }),
    draw("polyline", { class: "line", points: path }),
    ...points.map(({ x, y, says }, index) =>
      draw("circle", { cx: x, cy: y, r: 3.5 }, draw("title", {}, `Turn ${index + 1}: ${says}`))),
    draw("text", { x: left, y: top - 7 }, inBytes(bytes)),
    draw("text", { x: left, y: bottom + 15 }, "0"),
    draw("text", { x: right, y: bottom + 15, "text-anchor": "end" }, counted(tokens, "token")));
  const ends = turns.length > 1 ? `${points[0].says}, ${points.at(-1).says}` : points[0].says;
  svg.setAttribute("aria-label", `Bytes of memory over tokens: ${ends}, in ${counted(turns.length, "turn")}.`);
  const row = (tag, ...cells) => make("tr", {}, ...cells.map((cell) => make(tag, {}, String(cell))));
  const rows = turns.map((turn, index) => row("td", index + 1, count(turn.tokens), inBytes(turn.bytes)));
  const table = make("table", {}, make("thead", {}, row("th", "Turn", "Tokens", "Memory")), make("tbody", {}, ...rows));
  const open = $("chart").querySelector("details")?.open === true;
  $("chart").replaceChildren(svg, make("details", { open }, make("summary", {}, "As a table"), table));
}

// Drawers on narrow windows

function openDrawer(name) {
  document.body.dataset.drawer = name;
  $("main").inert = true;
  document.querySelector(`[data-open="${name}"]`).ariaExpanded = "true";
  $(name).querySelector("[data-close]").focus();
}

function closeDrawer() {
  const name = document.body.dataset.drawer;
  if (!name) return;
  delete document.body.dataset.drawer;
  $("main").inert = false;
  const opener = document.querySelector(`[data-open="${name}"]`);
  opener.ariaExpanded = "false";
  opener.focus();
}

// Beginning

async function start() {
  model = (await get("v1/models")).data[0];
  const { march } = model;
  const millions = march?.parameters && (march.parameters / 1e6).toPrecision(3);
  const facts = [model.id, march?.model_type, millions && `${millions} M parameters`,
    model.max_model_len && `context ${count(model.max_model_len)}`];
  $("model").textContent = facts.filter(Boolean).join(" · ");
  $("empty-model").textContent = routes()
    ? "Under each answer, “What was read” shows the parts of the conversation that it used."
    : "This model does not route: it answers from its current state only.";
  $("try").hidden = !march?.example;
  $("policy").hidden = !routes();
  $("no-routes").hidden = routes();
  await refreshList();
  await openNamed();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (document.body.dataset.drawer) closeDrawer();
  else stopper?.abort();
});
$("stop").onclick = () => stopper?.abort();
$("dismiss").onclick = () => { say(""); $("input").focus(); };
$("try").onclick = () => act(async () => {
  const diary = (await (await request("GET", "example.txt")).text()).trim();
  // A thing and the date of a day in the middle of the diary.
  const lines = diary.split("\n");
  const [, date, thing] = lines[Math.floor(lines.length / 3)].match(/^(.*?): the (\S+)/);
  $("input").value = `${diary}\n\nWhere was the ${thing} on ${date}?`;
  $("input").scrollTop = $("input").scrollHeight;
  $("input").focus();
  say("Send this, then ask about another day.");
});
$("new").classList.add("when-idle");
$("new").onclick = () => {
  say("");
  go("");
  $("input").focus();
};
window.addEventListener("hashchange", () => {
  if (busy) return setName(session?.id ?? "");
  act(openNamed);
});

for (const button of document.querySelectorAll("[data-open]")) button.onclick = () => openDrawer(button.dataset.open);
for (const element of document.querySelectorAll("[data-close]")) element.onclick = closeDrawer;
for (const width of ["(max-width: 68.74rem)", "(max-width: 45.99rem)"]) {
  matchMedia(width).addEventListener("change", closeDrawer);
}

$("policy").addEventListener("input", hintPolicy);
$("own-policy").onclick = () => showPolicy(ownPolicy());
for (const input of $("sampling").querySelectorAll("input")) {
  input.value = kept.get(`march-${input.id}`) ?? input.value;
  input.addEventListener("change", () => kept.set(`march-${input.id}`, input.value));
}

// Without a key there is nothing to do, so the dialog stays open.
$("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  kept.set("march-key", key);
  $("key-dialog").close();
  act(start);
});

act(start);
