// The chat page. State is `turns`, what the server is sent, and `stopper`, set while an answer streams.
// Rule: text reaches the page through textContent only.

const byId = (id) => document.getElementById(id);
const [log, scroller, message, send, settings, sampling] =
  ["log", "scroller", "message", "send", "settings", "sampling"].map(byId);

let turns = [];
let stopper = null;

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function addTurn(role, name, text) {
  const turn = element("article", `turn ${role}`);
  const body = element("p", "text", text);
  turn.append(element("h2", "", name), body);
  log.append(turn);
  scroller.scrollTop = scroller.scrollHeight;
  return { turn, body };
}

function addError(turn, text) {
  const note = element("p", "error", text);
  note.setAttribute("role", "alert");
  turn.append(note);
}

/** Run `change` and stay at the end of the conversation, if that is where the reader is. */
function followingEnd(change) {
  const atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
  change();
  if (atEnd) scroller.scrollTop = scroller.scrollHeight;
}

/** The data of each server-sent event of a response, parsed. */
async function* events(response) {
  let rest = "";
  for await (const piece of chunks(response.body.pipeThrough(new TextDecoderStream()))) {
    const parts = (rest + piece).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
  throw new Error("The connection broke off before the answer was complete.");
}

async function* chunks(stream) {
  const reader = stream.getReader();
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
  } finally {
    reader.releaseLock();
  }
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server can't be reached.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `The server answered ${response.status}.`);
}

function chosenSettings() {
  const filled = [...new FormData(sampling)].filter(([, value]) => value !== "");
  return Object.fromEntries(filled.map(([name, value]) => [name, Number(value)]));
}

function describeNumbers({ started, first, last, usage, reason, stopped }) {
  const parts = [];
  if (first) parts.push(`first token ${Math.round(first - started)} ms`);
  if (usage) {
    const { completion_tokens: count, prompt_tokens: prompt, prompt_tokens_details: details } = usage;
    if (count > 1 && last > first) parts.push(`${(((count - 1) * 1000) / (last - first)).toFixed(1)} tokens/s`);
    parts.push(`${count} tokens`, `prompt ${prompt}, ${details.cached_tokens} of them cached`);
  }
  if (reason === "length") parts.push("cut off at max tokens");
  if (stopped) parts.push("stopped");
  return parts.join(" · ");
}

/** Stream an answer to `messages` into `body`; what was measured and whether it was stopped. */
async function streamAnswer(messages, body, numbers) {
  const payload = { messages, stream: true, stream_options: { include_usage: true }, ...chosenSettings() };
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(payload),
    signal: stopper.signal,
  });
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    if (choice?.delta.content) {
      numbers.last = performance.now();
      numbers.first ??= numbers.last;
      followingEnd(() => body.append(choice.delta.content));
    }
    numbers.reason = choice?.finish_reason ?? numbers.reason;
    numbers.usage = event.usage ?? numbers.usage;
  }
}

async function ask(text) {
  const asked = turns;
  const question = { role: "user", content: text };
  addTurn("user", "You", text);
  const { turn, body } = addTurn("assistant", "Answer", "");
  turn.setAttribute("aria-busy", "true");
  setStopper(new AbortController());
  const numbers = { started: performance.now() };
  try {
    await streamAnswer([...asked, question], body, numbers);
  } catch (error) {
    numbers.stopped = error.name === "AbortError";
    if (!numbers.stopped) followingEnd(() => addError(turn, error.message));
  }
  turn.removeAttribute("aria-busy");
  followingEnd(() => turn.append(element("p", "numbers", describeNumbers(numbers))));
  setStopper(null);
  if (turns !== asked) return; // cleared meanwhile
  if (body.textContent) turns = [...asked, question, { role: "assistant", content: body.textContent }];
  else if (!message.value) setMessage(text); // nothing came: let it be sent again
}

function setStopper(controller) {
  stopper = controller;
  send.textContent = controller ? "Stop" : "Send";
  send.classList.toggle("stop", controller !== null);
  byId("status").textContent = controller ? "Answering" : "Answer ended";
}

function setMessage(text) {
  message.value = text;
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + 2}px`;
}

function showSettings(shown) {
  settings.hidden = !shown;
  byId("toggle").setAttribute("aria-expanded", String(shown));
}

function submit() {
  const text = message.value.trim();
  if (!text || stopper) return;
  if (!sampling.checkValidity()) {
    showSettings(true);
    sampling.reportValidity();
    return;
  }
  setMessage("");
  ask(text);
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stopper) stopper.abort();
  else submit();
});
sampling.addEventListener("submit", (event) => event.preventDefault());
message.addEventListener("input", () => setMessage(message.value));
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (stopper) stopper.abort();
  else showSettings(false);
});
byId("toggle").addEventListener("click", () => showSettings(settings.hidden));
byId("clear").addEventListener("click", () => {
  stopper?.abort();
  turns = [];
  log.replaceChildren();
  message.focus();
});

try {
  const [model] = (await (await request("v1/models")).json()).data;
  byId("model").textContent = `${model.id}, context ${model.max_model_len.toLocaleString()}`;
  document.title = `${model.id} · Octavo`;
} catch (error) {
  byId("model").textContent = error.message;
}
