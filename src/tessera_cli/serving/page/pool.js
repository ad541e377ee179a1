// The KV pool as the server tells it: first every block, then only what changes.

export const FREE = 0;
export const CACHED = -1;

export class Pool {
  /** Blocks from 1 to `numBlocks`; block 0 is never handed out. All are free until told otherwise. */
  constructor(numBlocks) {
    this.numBlocks = numBlocks;
    this.highest = 0; // no block above it has ever been anything but free
    this.owners = new Int32Array(numBlocks + 1);
    this.refCounts = new Uint32Array(numBlocks + 1);
    this.lastOwners = new Int32Array(numBlocks + 1);
  }

  /** Take `runs` of [first block, how many, owner, references]; returns the blocks that changed. */
  update(runs) {
    const changed = [];
    for (const [first, count, owner, refCount] of runs) {
      if (owner !== FREE) this.highest = Math.max(this.highest, first + count - 1);
      for (let block = first; block < first + count; block += 1) {
        this.owners[block] = owner;
        this.refCounts[block] = refCount;
        if (owner > 0) this.lastOwners[block] = owner;
        changed.push(block);
      }
    }
    return changed;
  }

  numShared() {
    return this.refCounts.reduce((sum, count) => sum + (count > 1), 0);
  }

  /** Words for one block; `names` has those of the sequences by owner. */
  describe(block, names) {
    const owner = this.owners[block];
    if (owner === FREE) return `Block ${block}: free`;
    if (owner === CACHED) return `Block ${block}: cached, held by nobody`;
    const others = this.refCounts[block] - 1;
    const shared = others ? `, shared with ${others} more` : "";
    return `Block ${block}: held by ${names.get(owner) ?? "a sequence"}${shared}`;
  }
}
