// The pool as a mosaic, one tile a block; only tiles that changed are drawn anew.
//
// Blocks are handed out from the first on, so a large pool may have a long end that nobody has ever held. Tiles
// are as large as lets all others be seen, and of that end only what fits is shown.

import * as colours from "./colours.js";
import { CACHED, FREE } from "./pool.js";

const MAX_PITCH = 20; // CSS pixels from tile to tile
const MIN_PITCH = 5;
const HEIGHT = 320; // tiles shrink to fit into it; where they cannot, the mosaic scrolls

export class Mosaic {
  #canvas;
  #context;
  #onPoint;
  #onLayOut;
  #pool = null;
  #pitch = MAX_PITCH; // device pixels, whole, so that tiles are sharp
  #columns = 1;
  #shown = 0; // blocks from 1 to here have tiles
  #cursor = null;

  /** Draw into `canvas`; `onPoint` is told of the block pointed at, or null, `onLayOut` of blocks left out. */
  constructor(canvas, onPoint, onLayOut) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d");
    this.#onPoint = onPoint;
    this.#onLayOut = onLayOut;
    new ResizeObserver(() => this.#layOut()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#drawAll());
    canvas.addEventListener("pointermove", (event) => this.#point(this.#blockAt(event)));
    canvas.addEventListener("pointerdown", (event) => this.#point(this.#blockAt(event)));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    canvas.addEventListener("blur", () => this.#point(null));
    canvas.addEventListener("focus", () => this.#cursor ?? this.#point(1));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  show(pool) {
    this.#pool = pool;
    this.#cursor = null;
    this.#layOut();
  }

  draw(blocks) {
    if (this.#pool.highest > this.#shown) this.#layOut();
    else for (const block of blocks) this.#drawTile(block);
  }

  #layOut() {
    const frame = this.#canvas.parentElement;
    if (!this.#pool || !frame.clientWidth) return;
    const { numBlocks, highest } = this.#pool;
    const width = frame.clientWidth - 2 * parseFloat(getComputedStyle(frame).paddingLeft);
    const roomAt = (pitch) => Math.floor(width / pitch) * Math.floor(HEIGHT / pitch);
    let pitch = MAX_PITCH;
    while (pitch > MIN_PITCH && roomAt(pitch) < highest) pitch -= 1;
    this.#shown = roomAt(pitch) < highest ? numBlocks : Math.min(numBlocks, roomAt(pitch));
    this.#pitch = Math.round(pitch * devicePixelRatio);
    this.#columns = Math.min(this.#shown, Math.floor((width * devicePixelRatio) / this.#pitch));
    const rows = Math.ceil(this.#shown / this.#columns);
    this.#canvas.width = this.#columns * this.#pitch;
    this.#canvas.height = rows * this.#pitch;
    this.#canvas.style.width = `${this.#canvas.width / devicePixelRatio}px`;
    this.#canvas.style.height = `${this.#canvas.height / devicePixelRatio}px`;
    this.#drawAll();
    this.#onLayOut(numBlocks - this.#shown);
  }

  #drawAll() {
    for (let block = 1; block <= this.#shown; block += 1) this.#drawTile(block);
  }

  #drawTile(block) {
    const context = this.#context;
    const pitch = this.#pitch;
    const gap = Math.max(1, Math.round(pitch / 10));
    const x = ((block - 1) % this.#columns) * pitch;
    const y = Math.floor((block - 1) / this.#columns) * pitch;
    const size = pitch - gap;
    const owner = this.#pool.owners[block];
    context.clearRect(x, y, pitch, pitch);
    if (owner === FREE) context.fillStyle = colours.free();
    else if (owner === CACHED) context.fillStyle = colours.cached(this.#pool.lastOwners[block]);
    else context.fillStyle = colours.held(owner);
    context.beginPath();
    context.roundRect(x, y, size, size, size / 6);
    context.fill();
    if (this.#pool.refCounts[block] > 1) {
      const dot = Math.max(2, Math.round(size * 0.36));
      const inset = Math.round((size - dot) / 2);
      context.fillStyle = colours.mark();
      context.fillRect(x + inset, y + inset, dot, dot);
    }
    if (block === this.#cursor) {
      const width = Math.max(1, Math.round(pitch / 8));
      context.strokeStyle = colours.cursor();
      context.lineWidth = width;
      context.strokeRect(x + width / 2, y + width / 2, size - width, size - width);
    }
  }

  #blockAt({ offsetX, offsetY }) {
    const column = Math.floor((offsetX * devicePixelRatio) / this.#pitch);
    const row = Math.floor((offsetY * devicePixelRatio) / this.#pitch);
    const block = row * this.#columns + column + 1;
    const isInside = this.#pool && column >= 0 && column < this.#columns && block >= 1;
    return isInside && block <= this.#shown ? block : null;
  }

  #onKey(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.#columns, ArrowDown: this.#columns };
    if (!this.#pool || event.ctrlKey || event.metaKey || event.altKey) return;
    let block = null;
    if (event.key === "Home") block = 1;
    else if (event.key === "End") block = this.#shown;
    else if (event.key in steps) block = (this.#cursor ?? 1) + steps[event.key];
    if (block === null) return;
    event.preventDefault();
    if (block >= 1 && block <= this.#shown) this.#point(block);
    this.#scrollToCursor();
  }

  #scrollToCursor() {
    const frame = this.#canvas.parentElement;
    const row = Math.floor(((this.#cursor ?? 1) - 1) / this.#columns);
    const [top, pitch] = [(row * this.#pitch) / devicePixelRatio, this.#pitch / devicePixelRatio];
    if (top < frame.scrollTop) frame.scrollTop = top;
    else if (top + pitch > frame.scrollTop + frame.clientHeight) frame.scrollTop = top + pitch - frame.clientHeight;
  }

  #point(block) {
    const before = this.#cursor;
    if (block === before) return;
    this.#cursor = block;
    if (before !== null) this.#drawTile(before);
    if (block !== null) this.#drawTile(block);
    this.#onPoint(block);
  }
}
