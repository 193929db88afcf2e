// Shows the snapshots of the port. Every text comes into the page as text, never as markup: names and keys are hostile.
"use strict";

const ROWS = 100;
const LONG = 120;
const byId = (id) => document.getElementById(id);
let before = null;

function cell(row, name, text, bad) {
  const made = row.insertCell();
  made.textContent = text;
  made.dataset.name = name;
  if (text.length > LONG) {
    made.textContent = text.slice(0, LONG) + "…";
    made.title = text;
  }
  made.classList.toggle("long", text.length > 20);
  if (bad) made.classList.add("bad");
  return made;
}

function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 120) return value.toFixed(1) + " s";
  if (value < 7200) return (value / 60).toFixed(0) + " min";
  return (value / 3600).toFixed(1) + " h";
}

function keyOf(one) {
  return one.key === undefined ? one.key_hash ?? "no key" : one.key ?? "no key";
}

function line(parent, text) {
  const made = document.createElement("li");
  made.textContent = text;
  parent.append(made);
}

function rows(table, found, fill) {
  const body = table.tBodies[0];
  const made = document.createElement("tbody");
  for (const one of found) fill(made.insertRow(), one);
  body.replaceWith(made);
  table.hidden = found.length === 0;
}

function showState(now) {
  const words = [];
  if (!now.live) words.push("not live");
  if (!now.healthy) words.push("unhealthy");
  words.push(now.draining ? "draining" : now.ready ? "ready" : "not ready");
  if (now.loop_silent > 2) words.push("the event loop has been silent for " + seconds(now.loop_silent));
  words.push("snapshot " + seconds(now.age) + " old");
  byId("name").textContent = now.name;
  byId("state").textContent = words.join(" · ");
  byId("state").className = now.live && now.healthy ? "good" : "bad";
}

// The stopped lanes, and behind them the oldest message of each partition that waits for long.
function holders(now) {
  const found = now.stopped.map((one) => ({ ...one, operable: ["blocked", "retry", "outputs"].includes(one.waits) }));
  const known = new Set(found.map((one) => one.partition + " " + one.position));
  for (const [partition, each] of Object.entries(now.status?.partitions ?? {})) {
    const oldest = each.oldest;
    if (oldest && oldest.age > 5 && !known.has(partition + " " + oldest.position)) {
      found.push({ ...oldest, waits: "handler", left: 0, error: "", operable: false });
    }
  }
  const rank = { blocked: 0, parking: 1, retry: 2, outputs: 2, handler: 2 };
  return found.sort((a, b) => rank[a.waits] - rank[b.waits] || b.age - a.age);
}

function showHolders(now) {
  const found = holders(now);
  const verdict = byId("verdict");
  const bad = !now.healthy || found.some((one) => one.waits === "blocked");
  verdict.className = bad ? "bad" : "good";
  verdict.textContent = found.length
    ? found.length + " message(s) wait" + (found.length > ROWS ? ", the first " + ROWS + ":" : ":")
    : now.healthy ? "Nobody." : "";
  const reasons = byId("reasons");
  reasons.replaceChildren();
  for (const reason of [...now.reasons, ...now.findings]) line(reasons, reason);
  rows(byId("holders"), found.slice(0, ROWS), (row, one) => {
    cell(row, "key", keyOf(one));
    const waits = { blocked: "for an operator", parking: "for its dead letter", retry: "retry in " + seconds(one.left), outputs: "outputs again in " + seconds(one.left), handler: "its handler runs or waits" };
    cell(row, "", waits[one.waits], one.waits === "blocked");
    cell(row, "age", seconds(one.age));
    cell(row, "", one.partition + " position " + one.position);
    cell(row, "attempt", String(one.attempt));
    cell(row, "", one.error);
    const actions = row.insertCell();
    actions.className = "operate";
    if (one.operable && one.key_hash) {
      if (one.waits === "blocked") actions.append(button("unblock", one.key_hash));
      actions.append(button("dead-letter", one.key_hash));
    }
  });
}

function showCounts(now) {
  const status = now.status;
  const counts = byId("counts");
  counts.replaceChildren();
  if (!status) return;
  const passed = before && before.status ? now.at - before.at : 0;
  const rate = passed > 0 ? ((status.settled - before.status.settled) / passed).toFixed(0) + " /s" : "…";
  const found = {
    "settled": status.settled + " (" + rate + ")",
    "in flight": status.in_flight + " of " + status.max_in_flight,
    "running": status.running + " of " + status.concurrency,
    "lag": now.lag ?? "unknown",
    "wait for a worker": status.ready,
    "wait for a retry": status.held,
    "blocked": status.blocked,
    "retries": status.retries,
    "dead letters": status.dead_lettered,
    "partitions": now.partition_count,
    "intake": status.paused ? "paused" : status.taking ? "on" : "full",
    "broker": status.outage ? "no answer for " + seconds(status.outage) : "answers",
  };
  for (const [name, value] of Object.entries(found)) {
    const term = document.createElement("dt");
    term.textContent = name;
    const text = document.createElement("dd");
    text.textContent = String(value);
    const pair = document.createElement("div");
    pair.append(term, text);
    counts.append(pair);
  }
}

function showPartitions(now) {
  const found = Object.entries(now.status?.partitions ?? {});
  found.sort(([, a], [, b]) => (b.oldest?.age ?? -1) - (a.oldest?.age ?? -1) || (b.lag ?? 0) - (a.lag ?? 0));
  rows(byId("partitions"), found, (row, [name, one]) => {
    cell(row, "", name + (one.draining ? " (drains)" : ""), one.draining);
    cell(row, "lag", one.lag === null ? "unknown" : String(one.lag));
    cell(row, "in flight", String(one.in_flight), one.full || one.ahead_reached);
    cell(row, "finished below", String(one.floor));
    const oldest = one.oldest;
    cell(row, "oldest", oldest ? keyOf(oldest) + ", " + seconds(oldest.age) + ", attempt " + oldest.attempt : "");
  });
  const more = now.partition_count - found.length;
  byId("more").textContent = more > 0 ? more + " more partitions, whose oldest messages are younger" : "";
}

function show(now) {
  document.body.classList.toggle("operates", now.operate);
  byId("operate").hidden = !now.operate;
  showState(now);
  showHolders(now);
  showCounts(now);
  showPartitions(now);
  const events = byId("events");
  events.replaceChildren();
  for (const event of now.events) line(events, event);
  before = now;
}

function button(call, key) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = call;
  made.dataset.call = call;
  made.dataset.key = key;
  return made;
}

async function operate(call, key) {
  const said = byId("said");
  try {
    const answer = await fetch("operate/" + call, {
      method: "POST",
      headers: { "content-type": "application/json", authorization: "Bearer " + byId("token").value },
      body: JSON.stringify(key === undefined ? {} : { key_hash: key }),
    });
    said.textContent = call + ": " + (await answer.text());
  } catch (error) {
    said.textContent = call + ": no answer (" + error.message + ")";
  }
}

document.addEventListener("click", (event) => {
  const { call, key } = event.target.dataset;
  if (call) operate(call, key);
});
byId("token-form").addEventListener("submit", (event) => event.preventDefault());

const stream = new EventSource("events");
stream.onmessage = (event) => show(JSON.parse(event.data));
stream.onerror = () => {
  byId("state").textContent = "the process does not answer";
  byId("state").className = "bad";
};
