// The page of `llamakv serve`: a chat, the conversations that are kept, and where the cells are.
// Whatever a model, a user or a session's name says is set as text, never as HTML.

const at = (id) => document.getElementById(id);
const number = (n) => n.toLocaleString("en-GB");
const KEY = "llamakv-key";

// ---- HTTP

class Refused extends Error {
  constructor({ status, headers }, message) {
    const after = headers.get("Retry-After");
    super(message + (after ? ` (try again in ${after} s)` : ""));
    this.status = status;
  }
}

async function request(method, path, body, signal) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  if (answer.ok) return answer;
  if (answer.status === 401) askForKey(Boolean(key));
  const told = await answer.json().catch(() => null); // something on the way may have answered
  throw new Refused(answer, told?.error?.message ?? `the server says ${answer.status}`);
}

const call = async (method, path, body) => (await request(method, path, body)).json();

const pathOf = (name, act) => `v1/sessions/${encodeURIComponent(name)}${act ? `/${act}` : ""}`;

/** The data of server-sent events, up to [DONE]. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection broke off");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function askForKey(isWrong) {
  at("key").hidden = false;
  at("key-note").textContent = isWrong ? "the server does not know that key" : "kept in this tab only";
}

at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key-text").value.trim());
  at("key-text").value = "";
  at("key").hidden = true;
  tell("");
  poll();
  openNamed();
});

// ---- the conversation

/** A conversation; it has no name before its first message. `answer` is under way, `control` stops it. */
const conversation = (name = null, messages = []) => ({ name, messages, answer: null, control: null });

const N_LOOKS = 10; // at most, for an answer to end that this tab was given before it was loaded again
const known = new Map(); // conversations of this tab, by name
let open = conversation();

function element(tag, className = "", text = "") {
  const box = document.createElement(tag);
  box.className = className;
  box.textContent = text;
  return box;
}

function button(text, act, className) {
  const box = element("button", className, text);
  box.type = "button";
  box.addEventListener("click", () => Promise.resolve(act()).catch(failed));
  return box;
}

function tell(text) {
  at("error").textContent = text;
  at("error").hidden = !text;
}

function failed(error) {
  showSide(false); // on a phone it is told behind that
  if (error.status === 401) tell("the server wants an API key");
  else tell(error instanceof TypeError ? "the server cannot be reached" : error.message);
}

function showMessage(message, turn) {
  const box = element("article", `message ${message.role}`);
  box.ariaLabel = { user: "You", system: "System prompt" }[message.role] ?? "Answer";
  box.append(element("div", "", message.content));
  if (turn) {
    const footer = element("footer");
    footer.append(element("span", "facts", message.facts));
    if (message !== open.answer) footer.append(button("fork here", () => fork(open.name, turn)));
    box.append(footer);
  }
  box.classList.toggle("busy", message === open.answer);
  at("log").append(box);
}

const isAtEnd = () => at("log").scrollHeight - at("log").scrollTop - at("log").clientHeight < 60;
const toEnd = () => { at("log").scrollTop = at("log").scrollHeight; };

/** All of the open conversation. */
function show() {
  for (const box of at("log").querySelectorAll("article")) box.remove();
  const messages = open.answer ? [...open.messages, open.answer] : open.messages;
  let turn = 0;
  for (const message of messages) showMessage(message, message.role === "assistant" ? (turn += 1) : 0);
  at("hello").hidden = messages.length > 0;
  at("send").hidden = Boolean(open.answer);
  at("stop").hidden = !open.answer;
  showName();
  toEnd();
}

function showName() {
  const line = lines.get(open.name);
  at("name").textContent = open.name ?? "New conversation";
  at("facts").textContent = line ? describe(line.session) : "";
  for (const [name, { box, opener }] of lines) {
    box.classList.toggle("open", name === open.name);
    opener.ariaCurrent = name === open.name;
  }
}

/** Turn to a conversation; an answer under way elsewhere goes on. */
function turnTo(one) {
  open = one;
  showAddress("pushState");
  at("system").value = one.messages[0]?.role === "system" ? one.messages[0].content : "";
  tell("");
  show();
  showSide(false);
  at("text").focus();
}

// The address ends in the open conversation's name, so that it is there again after a reload, and can be linked to.

function nameInAddress() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch { // not one of ours
    return "";
  }
}

function showAddress(how) {
  const name = open.name ?? "";
  if (nameInAddress() !== name) {
    history[how](null, "", location.pathname + location.search + (name && `#${encodeURIComponent(name)}`));
  }
}

async function openNamed() {
  const name = nameInAddress();
  if (name === (open.name ?? "")) return;
  await poll();
  for (let i = 0; i < N_LOOKS && lines.get(name)?.session.is_active && !known.has(name); i += 1) {
    await new Promise((resolve) => { setTimeout(resolve, 500); });
    await poll();
  }
  if (nameInAddress() !== name) return; // somebody turned elsewhere meanwhile
  try {
    await (name ? resume(name) : turnTo(conversation()));
  } catch (error) {
    if (error.status !== 401) { // which is called again with a key
      history.replaceState(null, "", location.pathname + location.search); // Back does not lead here again
      turnTo(conversation());
    }
    failed(error);
  }
}
addEventListener("popstate", openNamed);

async function resume(name) {
  if (!lines.get(name)?.session.n_cells_live) await call("POST", pathOf(name, "resume"));
  if (!known.has(name)) {
    const { messages = [] } = await call("GET", pathOf(name));
    known.set(name, conversation(name, messages.map((one) => ({ ...one, facts: endOf(one.finish) }))));
  }
  turnTo(known.get(name));
  poll();
}

const newName = () => `chat-${new Date().toLocaleString("sv").replace(/[-:]/g, "").replace(" ", "-")}`;

async function send() {
  const text = at("text").value.trim();
  if (!text || open.answer) return;
  const one = open, before = one.messages, wasNew = !one.name;
  const system = at("system").value.trim();
  one.messages = before.filter((message, i) => i > 0 || message.role !== "system");
  if (system) one.messages.unshift({ role: "system", content: system });
  one.messages.push({ role: "user", content: text });
  one.name ??= newName();
  known.set(one.name, one);
  showAddress("replaceState");
  const answer = one.answer = { role: "assistant", content: "", facts: "" };
  const control = one.control = new AbortController();
  at("text").value = "";
  tell("");
  show();
  try {
    await receive(one, answer, control.signal);
  } catch (error) {
    answer.facts = control.signal.aborted ? "stopped" : "broken off";
    if (!control.signal.aborted) failed(error);
  }
  one.answer = null;
  if (answer.content) {
    one.messages.push(answer);
  } else { // nothing was said: the message can be sent again
    one.messages = before;
    if (open === one) at("text").value ||= text;
    if (wasNew) {
      known.delete(one.name);
      one.name = null;
    }
  }
  if (open === one) {
    showAddress("replaceState");
    show();
  }
  poll();
}

async function receive(one, answer, signal) {
  const body = {
    model: live?.model.name, session: one.name, stream: true, stream_options: { include_usage: true },
    messages: one.messages.map(({ role, content }) => ({ role, content })),
  };
  if (at("temperature").value) body.temperature = Number(at("temperature").value);
  if (at("max-tokens").value) body.max_tokens = Number(at("max-tokens").value);
  const sent = performance.now();
  let first = 0, last = 0, usage = null, finish = null;
  for await (const event of events(await request("POST", "v1/chat/completions", body, signal))) {
    const choice = event.choices?.[0];
    usage = event.usage ?? usage;
    finish = choice?.finish_detail ?? choice?.finish_reason ?? finish;
    const piece = choice?.delta?.content;
    if (!piece) continue;
    last = performance.now();
    first ||= last;
    answer.content += piece;
    if (open !== one) continue;
    const follow = isAtEnd();
    at("log").lastElementChild.firstChild.append(piece); // a string: it becomes a text node
    if (follow) toEnd();
  }
  answer.facts = factsOf(usage, finish, first && (first - sent) / 1000, (last - first) / 1000);
}

const ENDS = {
  length: "the limit of tokens", context: "the end of the context", timeout: "the limit of time",
  interrupted: "its reader, or with the server",
};

const endOf = (finish) => (finish && finish !== "stop" ? `ended by ${ENDS[finish] ?? finish}` : "");

/** What an answer took, in words. */
function factsOf(usage, finish, first_s, rest_s) {
  const parts = [];
  if (usage) {
    const { cached_tokens: n = 0, source = "none" } = usage.prompt_tokens_details ?? {};
    const where = n && source !== "none" ? ` (${source})` : "";
    parts.push(`${number(n)} of ${number(usage.prompt_tokens)} tokens were cached${where}`);
  }
  if (usage?.queued_s >= 0.1) parts.push(`waited ${usage.queued_s.toFixed(1)} s for its turn`);
  if (first_s) parts.push(`${first_s.toFixed(first_s < 0.095 ? 2 : 1)} s to first token`);
  if (usage?.completion_tokens > 1 && rest_s > 0) {
    parts.push(`${number(Math.round((usage.completion_tokens - 1) / rest_s))} tokens/s`);
  }
  if (endOf(finish)) parts.push(endOf(finish));
  return parts.join(" · ");
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
at("stop").addEventListener("click", () => open.control.abort());
at("new").addEventListener("click", () => turnTo(conversation()));

function showSide(is) {
  document.body.classList.toggle("side", is);
  at("menu").ariaExpanded = is;
}
at("menu").addEventListener("click", () => showSide(!document.body.classList.contains("side")));

// ---- what is kept

const lines = new Map(); // by name: its place in the list, the same as long as it is there

const describe = ({ n_tokens, n_cells_live, is_saved, is_pinned }) => [
  `${number(n_tokens)} tokens`,
  [n_cells_live && "memory", is_saved && "disk"].filter(Boolean).join(" + "),
  is_pinned && "pinned",
].filter(Boolean).join(" · ");

function makeLine(name) {
  const box = element("li");
  const opener = button("", () => resume(name), "open-it");
  const [title, first, where] = [element("b"), element("span", "first"), element("span", "where")];
  opener.append(title, first, where);
  opener.title = name;
  const more = element("details");
  const summary = element("summary", "", "⋯");
  summary.ariaLabel = `Actions for ${name}`;
  const acts = element("div", "acts");
  const act = (text, what, className) => button(text, () => {
    more.open = false;
    return what(name);
  }, className);
  const pin = act("pin", pinOrNot);
  acts.append(act("resume", resume), act("fork", fork), act("save as", saveAs), pin, act("delete", forget, "danger"));
  more.append(summary, acts);
  box.append(opener, more);
  return { box, opener, title, first, where, pin };
}

function fill(line, session) {
  line.session = session;
  const dot = element("i", "dot");
  dot.role = "img";
  dot.ariaLabel = "answering";
  line.title.replaceChildren(...(session.is_active ? [dot] : []), session.name);
  line.first.textContent = session.first_text;
  line.where.textContent = describe(session);
  line.pin.textContent = session.is_pinned ? "unpin" : "pin";
}

function showSessions(sessions, n_sessions) {
  const names = new Set(sessions.map((session) => session.name));
  for (const [name, line] of lines) {
    if (names.has(name)) continue;
    line.box.remove();
    lines.delete(name);
  }
  sessions.forEach((session, i) => {
    if (!lines.has(session.name)) lines.set(session.name, makeLine(session.name));
    const line = lines.get(session.name);
    fill(line, session);
    const there = at("sessions").children[i];
    if (there !== line.box) at("sessions").insertBefore(line.box, there ?? null);
  });
  at("none").hidden = sessions.length > 0;
  at("more").hidden = n_sessions === sessions.length;
  at("more").textContent = `and ${number(n_sessions - sessions.length)} more, used longer ago`;
  showName();
}

/** The name that is typed, or null; where no name is wanted, true or null. */
function dialog(title, text, name) {
  const box = at("dialog"), field = at("dialog-name");
  at("dialog-title").textContent = at("dialog-ok").textContent = title;
  at("dialog-text").textContent = text;
  field.hidden = name === undefined;
  field.required = !field.hidden;
  field.value = name ?? "";
  box.classList.toggle("danger", field.hidden);
  box.returnValue = "";
  box.showModal();
  if (!field.hidden) field.select();
  return new Promise((resolve) => {
    box.addEventListener("close", () => resolve(box.returnValue ? field.value.trim() || true : null), { once: true });
  });
}

async function fork(name, turn) {
  let i = 2;
  while (lines.has(`${name}-${i}`)) i += 1;
  const where = turn ? `after answer ${turn}` : "at its end";
  const newName = await dialog("Fork", `A conversation that begins as ${name} did, ${where}.`, `${name}-${i}`);
  if (newName === null) return;
  await call("POST", pathOf(name, "fork"), { new_name: newName, ...(turn && { at: `turn${turn}` }) });
  const messages = known.get(name)?.messages;
  if (messages) known.set(newName, conversation(newName, upTo(messages, turn)));
  await poll();
  await resume(newName);
}

function upTo(messages, turn) {
  let n = 0;
  const end = messages.findIndex((message) => message.role === "assistant" && (n += 1) === turn);
  return end < 0 ? [...messages] : messages.slice(0, end + 1);
}

async function saveAs(name) {
  const newName = await dialog("Save as", `A copy of ${name} in the store; under its own name, itself.`, name);
  if (newName === null) return;
  await call("POST", pathOf(name, "save"), newName === name ? {} : { new_name: newName });
  await poll();
}

async function forget(name) {
  if (!(await dialog("Delete", `${name} is forgotten, in memory and in the store.`))) return;
  await call("DELETE", pathOf(name));
  known.delete(name);
  if (open.name === name) turnTo(conversation());
  await poll();
}

async function pinOrNot(name) {
  await call("POST", pathOf(name, lines.get(name).session.is_pinned ? "unpin" : "pin"));
  await poll();
}

// ---- the live strip

const PATIENCE_S = 30; // the longest pause between two looks while the server is away
let live = null;
let seen = null; // when the counts came, and the tokens there were by then
let n_failed = 0;
let timer = 0;
let looking = null;

function showLive(counts, model) {
  const { n_cells, n_cells_pinned, n_cells_max } = counts;
  const share = (n) => `${(100 * n) / n_cells_max}%`;
  at("pinned").style.width = share(n_cells_pinned);
  at("used").style.width = share(n_cells - n_cells_pinned);
  const pinned = n_cells_pinned ? ` · ${number(n_cells_pinned)} pinned` : "";
  at("cells").textContent = `${number(n_cells)} of ${number(n_cells_max)} cells${pinned}`;
  at("sequences").textContent = `${counts.n_live} of ${counts.n_sequences_max}`;
  at("active").textContent = counts.n_active;
  at("waiting").textContent = counts.n_waiting;
  const hits = (counts.n_reused_memory + counts.n_reused_store) / counts.n_prompt_tokens;
  at("hits").textContent = hits >= 0 ? `${Math.floor(100 * hits)} %` : "–";
  const now = performance.now() / 1000;
  const speed = seen ? (counts.n_generated - seen.n) / (now - seen.at) : 0;
  at("speed").textContent = number(Math.max(0, Math.round(speed)));
  seen = { at: now, n: counts.n_generated };
  at("model").textContent = model.name;
  document.title = `${model.name} · llamakv`;
}

/** Look once, now; the next time comes by itself. */
function poll() {
  clearTimeout(timer);
  return looking ??= look().finally(() => { looking = null; });
}

async function look() {
  try {
    live = await call("GET", "v1/live");
    n_failed = 0;
    showLive(live.counts, live.model);
    showSessions(live.sessions, live.n_sessions);
  } catch (error) {
    seen = null;
    if (error.status === 401) return; // goes on when there is a key
    n_failed += 1;
  }
  const pause_s = Math.min(2 ** n_failed, PATIENCE_S);
  at("away").hidden = n_failed === 0;
  at("away").textContent = `The server is away. The next look is in ${pause_s} s.`;
  at("live").classList.toggle("stale", n_failed > 0);
  if (!document.hidden) timer = setTimeout(poll, 1000 * pause_s);
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  seen = null;
  if (!document.hidden) poll();
});

show();
at("text").focus();
poll();
openNamed();
