// The live view: one stream of events from the server, drawn as it comes.

import { held } from "./colours.js";
import { Mosaic } from "./mosaic.js";
import { amount, seconds } from "./numbers.js";
import { Pool } from "./pool.js";
import { request, wordsFor } from "./server.js";
import { Sparkline } from "./sparkline.js";
import { eventData } from "./sse.js";

const byId = (id) => document.getElementById(id);
const RETRY_AFTER = 2000; // milliseconds
const NUM_RATES = 150; // half a minute at five events a second
const NUM_LATENCIES = 60;

export class LiveView {
  #pool = null;
  #names = new Map();
  #pointed = null;
  #mosaic = new Mosaic(byId("mosaic"), (block) => this.#point(block), showRest);
  #rates = new Sparkline(byId("tokens-per-second-line"), NUM_RATES);
  #ttfts = new Sparkline(byId("ttft-line"), NUM_LATENCIES);
  #tpots = new Sparkline(byId("tpot-line"), NUM_LATENCIES);
  #retry = null;
  #key;

  /** Watch with the API key that `key` gives at each attempt; `onConnected` is told of each success. */
  constructor(key, onConnected) {
    this.#key = key;
    this.#run(onConnected);
  }

  /** Try again now, where the view waits to do so. */
  retryNow() {
    this.#retry?.();
  }

  async #run(onConnected) {
    for (;;) {
      try {
        const response = await request("live", { key: this.#key() });
        this.#pool = null; // the first event of a stream tells all
        onConnected();
        for await (const data of eventData(response)) {
          setConnection("live", "live");
          this.#take(JSON.parse(data));
        }
        setConnection("lost", "connection lost");
      } catch (error) {
        setConnection("lost", error.status === 503 ? "loading the model" : wordsFor(error));
      }
      await new Promise((resolve) => {
        this.#retry = resolve;
        setTimeout(resolve, RETRY_AFTER);
      });
    }
  }

  #take(event) {
    this.#names = new Map(event.sequences.map((one) => [one.owner, nameOf(one)]));
    if (this.#pool === null) {
      this.#pool = new Pool(event.num_blocks);
      this.#pool.update(event.tiles);
      this.#mosaic.show(this.#pool);
    } else {
      this.#mosaic.draw(this.#pool.update(event.tiles));
    }
    if (this.#pointed !== null && event.tiles.length) this.#point(this.#pointed);
    showCounts(event, this.#pool.numShared());
    showSequences(event);
    this.#showRates(event);
  }

  #showRates(event) {
    if (event.tokens_per_second !== null) {
      this.#rates.push(event.tokens_per_second);
      setText("tokens-per-second", amount(event.tokens_per_second));
    }
    for (const [name, line] of [["ttft", this.#ttfts], ["tpot", this.#tpots]]) {
      if (event[name] === null) continue; // no such token since the last event
      line.push(event[name]);
      setText(name, seconds(event[name]));
    }
  }

  #point(block) {
    this.#pointed = block;
    setText("block", block === null ? "" : this.#pool.describe(block, this.#names));
  }
}

function showCounts(event, numShared) {
  setText("num-running", amount(event.num_running));
  setText("num-waiting", amount(event.num_waiting));
  setText("num-preempted", amount(event.num_preempted));
  setText("num-preemptions", amount(event.num_preemptions));
  const parts = [
    `${amount(event.num_blocks)} blocks of ${event.block_size} tokens`,
    `${amount(event.num_used_blocks)} held`,
    `${amount(numShared)} shared`,
    `${amount(event.num_cached_blocks)} cached`,
  ];
  setText("pool-sum", parts.join(" · "));
}

function showRest(numLeftOut) {
  setText("pool-rest", numLeftOut ? `and ${amount(numLeftOut)} more blocks, all free` : "");
}

function showSequences(event) {
  const rows = byId("sequences");
  while (rows.children.length > event.sequences.length) rows.lastElementChild.remove();
  while (rows.children.length < event.sequences.length) rows.append(emptyRow());
  event.sequences.forEach((one, index) => fillRow(rows.children[index], one));
  const more = event.num_running + event.num_waiting + event.num_preempted - event.sequences.length;
  setText("sequences-more", more ? `and ${amount(more)} more` : event.sequences.length ? "" : "None.");
}

function emptyRow() {
  const row = document.createElement("tr");
  for (let column = 0; column < 4; column += 1) {
    const cell = document.createElement(column ? "td" : "th");
    if (column > 1) cell.className = "number";
    row.append(cell);
  }
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  row.cells[0].scope = "row";
  row.cells[0].append(swatch, document.createElement("span"));
  return row;
}

function fillRow(row, one) {
  const [swatch, name] = row.cells[0].children;
  swatch.style.backgroundColor = one.status === "running" ? held(one.owner) : "transparent";
  change(name, nameOf(one));
  change(row.cells[1], one.status);
  change(row.cells[2], `${one.num_computed_tokens} of ${one.num_tokens}`);
  change(row.cells[3], String(one.num_blocks));
  row.dataset.status = one.status;
}

function nameOf({ request: id, sample }) {
  return sample ? `${id}/${sample}` : id;
}

function setConnection(state, words) {
  byId("connection").dataset.state = state;
  setText("connection", words);
}

function setText(id, text) {
  change(byId(id), text);
}

/** Set a text only where it differs, so that live regions speak only of news. */
function change(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
