// The threads of a block as fibers of one OS thread: they run in a fixed order and take turns where they wait for each
// other. So a run is the same every time, a barrier that somebody never reaches is an error instead of a hang, and
// ThreadSanitizer, which is told of each switch and that only barriers order memory, reports a missing barrier as a race.
//
// Not modelled: warps that really run at once, memory weaker than ThreadSanitizer's, bank conflicts, time.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define UNSEEN __attribute__((no_sanitize("thread"), noinline))  // the shim's own work, not the kernel's
#else
#define UNSEEN
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace shim {
using Place = std::source_location;

constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t GUARD_BYTES = 256;  // behind dynamic shared memory, checked after each block
constexpr unsigned char UNSET = 0xff;  // NaN in every float type

#if defined(__x86_64__)
// A stack pointer is a context: the registers that a call preserves lie on the stack. (swapcontext makes a system call.)
extern "C" void shim_switch(void** save, void* resume);
asm(R"(
.text
.weak shim_switch
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
using Context = void*;
UNSEEN inline void switch_context(Context& from, Context& to) { shim_switch(&from, to); }
UNSEEN inline void make_context(Context& context, char* stack, void (*entry)()) {
  auto* top = reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(stack) + STACK_BYTES) & ~uintptr_t{15});
  top[-2] = reinterpret_cast<uintptr_t>(entry);  // popped by ret; the stack is then aligned as after a call
  context = top - 8;                             // below it, six registers whose values do not matter
}
#else
using Context = ucontext_t;
inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
inline void make_context(Context& context, char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = STACK_BYTES;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

// Threads that wait for each other: a block, or one of its warps.
struct Group {
  int size = 0, arrived = 0, left = 0;
  unsigned generation = 0;
  const char* file = "";  // where those wait who have arrived
  int line = 0;
  char order[2] = {};  // addresses that carry ThreadSanitizer's happens-before, by parity of the generation
};

constexpr int LANES = 32, OFFERED = 16;  // 4-byte words that a lane can offer to the others of its warp
struct Warp : Group {
  uint32_t offers[2][LANES][OFFERED];  // by parity of the generation: a slow lane still reads the former ones
};

constexpr int MAX_COPIES = 256;  // in flight; plain memory, as ThreadSanitizer would see a container at work
struct PendingCopy {
  unsigned char* to;
  const unsigned char* from;  // nullptr: zeros
  int bytes;
};

struct Fiber {
  dim3 index;
  int id = 0;
  bool done = false;
  Group* waits_for = nullptr;
  unsigned generation = 0;  // of `waits_for`, while waiting
  PendingCopy copies[MAX_COPIES];
  int num_copies = 0;
  Context context{};
  std::unique_ptr<char[]> stack;
  void* sanitizer = nullptr;
};

struct Block {
  dim3 grid, threads, index;
  Group all;
  std::vector<Warp> warps;
  std::vector<std::unique_ptr<Fiber>> fibers;
  unsigned char* dynamic_shared = nullptr;
  std::function<void()> kernel;
  Context scheduler{};
  void* scheduler_sanitizer = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  std::string error;
};
inline Block block;
inline Fiber* self = nullptr;

inline Warp& my_warp() { return block.warps[self->id / LANES]; }
inline int lane() { return self->id % LANES; }
inline std::string at(const char* file, int line) { return std::string(file) + ":" + std::to_string(line); }
inline std::string at(const Place& place) { return at(place.file_name(), int(place.line())); }
inline std::string at(const Group& group) { return at(group.file, group.line); }

UNSEEN inline void to_scheduler(bool for_good) {
  Fiber* me = self;
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(block.scheduler_sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, block.scheduler_stack, block.scheduler_stack_bytes);
#endif
  (void)for_good;
  switch_context(me->context, block.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

// The first error ends the launch; this fiber never runs again.
[[noreturn]] UNSEEN inline void fail(const std::string& what) {
  if (block.error.empty()) block.error = what;
  for (;;) to_scheduler(false);
}

// Wait for the whole group. Without `orders`, nobody's writes become visible by it, as with shuffles.
UNSEEN inline void meet(Group& group, const Place& place, bool orders) {
  if (group.left) fail("a thread has returned, others of its group wait at " + at(place));
  const char* file = place.file_name();
  const int line = int(place.line());
  if (group.arrived == 0) {
    group.file = file;
    group.line = line;
  } else if (group.line != line || std::strcmp(group.file, file)) {
    fail("threads of one group wait at different places: " + at(group) + " and " + at(place));
  }
  [[maybe_unused]] char* order = &group.order[group.generation % 2];
#if defined(__SANITIZE_THREAD__)
  if (orders) __tsan_release(order);
#endif
  (void)orders;
  if (++group.arrived == group.size) {
    group.arrived = 0;
    ++group.generation;
  } else {
    self->waits_for = &group;
    self->generation = group.generation;
    to_scheduler(false);
  }
#if defined(__SANITIZE_THREAD__)
  if (orders) __tsan_acquire(order);
#endif
}

UNSEEN inline void leave(Group& group) {
  if (group.arrived) fail("a thread returns while others of its group wait at " + at(group));
  ++group.left;
}

UNSEEN inline void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack, &block.scheduler_stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(&block);
#endif
  block.kernel();
  if (self->num_copies) fail("a thread returns before its asynchronous copies have been waited for");
  leave(my_warp());
  leave(block.all);
  self->done = true;
#if defined(__SANITIZE_THREAD__)
  __tsan_release(&block);
#endif
  to_scheduler(true);
}

UNSEEN inline void resume(Fiber& fiber) {
  self = &fiber;
  fiber.waits_for = nullptr;
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber.sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), STACK_BYTES);
#endif
  switch_context(block.scheduler, fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

UNSEEN inline void start_block(int count) {
  block.all = Group{.size = count};
  block.warps.resize((count + LANES - 1) / LANES);
  for (size_t w = 0; w < block.warps.size(); ++w)
    static_cast<Group&>(block.warps[w]) = Group{.size = std::min<int>(LANES, count - int(w) * LANES)};
  while (block.fibers.size() < size_t(count)) {
    auto fiber = std::make_unique<Fiber>();
    fiber->stack.reset(new char[STACK_BYTES]);
    block.fibers.push_back(std::move(fiber));
  }
  for (int id = 0; id < count; ++id) {
    Fiber& fiber = *block.fibers[id];
    fiber.id = id;
    fiber.index = {unsigned(id) % block.threads.x, unsigned(id) / block.threads.x, 0};
    fiber.done = false;
    fiber.waits_for = nullptr;
    fiber.num_copies = 0;
#if defined(__SANITIZE_THREAD__)
    if (!fiber.sanitizer) fiber.sanitizer = __tsan_create_fiber(0);
#endif
    make_context(fiber.context, fiber.stack.get(), fiber_main);
  }
}

// Run the fibers in turn until all are done; `reversed` takes the last thread first.
UNSEEN inline void run_block(int count, bool reversed) {
  start_block(count);
  for (int done = 0; done < count && block.error.empty();) {
    bool progress = false;
    for (int n = 0; n < count && block.error.empty(); ++n) {
      Fiber& fiber = *block.fibers[reversed ? count - 1 - n : n];
      if (fiber.done || (fiber.waits_for && fiber.waits_for->generation == fiber.generation)) continue;
      progress = true;
      resume(fiber);
      done += fiber.done;
    }
    if (progress) continue;
    for (int n = 0; n < count && block.error.empty(); ++n)
      if (const Fiber& fiber = *block.fibers[n]; !fiber.done)
        block.error = "threads wait for ever at " + at(*fiber.waits_for);
  }
}

// Run all blocks of a grid one after another. An empty string, or the first error.
UNSEEN inline std::string launch(dim3 grid, int threads, size_t shared_bytes, bool reversed,
                                 std::function<void()> kernel) {
  block.grid = grid;
  block.threads = {unsigned(threads), 1, 1};
  block.kernel = std::move(kernel);
  block.error.clear();
#if defined(__SANITIZE_THREAD__)
  block.scheduler_sanitizer = __tsan_get_current_fiber();
#endif
#if defined(__SANITIZE_ADDRESS__)
  const size_t guard = 0;  // the sanitizer sees what is beyond
#else
  const size_t guard = GUARD_BYTES;
#endif
  const size_t blocks = size_t{grid.x} * grid.y * grid.z;
  for (size_t n = 0; n < blocks && block.error.empty(); ++n) {
    const size_t number = reversed ? blocks - 1 - n : n;
    block.index = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / grid.x / grid.y)};
    std::vector<unsigned char> shared(shared_bytes + guard, UNSET);
    block.dynamic_shared = shared.data();
#if defined(__SANITIZE_THREAD__)
    __tsan_release(&block);  // what was before the block, acquired by its fibers, and what they did, acquired back
#endif
    run_block(threads, reversed);
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(&block);
#endif
    for (size_t i = shared_bytes; i < shared.size(); ++i)
      if (shared[i] != UNSET && block.error.empty()) block.error = "written beyond dynamic shared memory";
  }
  return block.error;
}
}  // namespace shim
