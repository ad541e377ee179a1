// Paged attention on the CPU: decode, prefill, chunked prefill and verification by one operator.
//
// A call stores the step's keys and values, then attends from every query to its sequence's blocks. Work is cut
// into tasks by (sequence, key head, rows, keys) in a way that depends on the sequence alone, so neither the other
// sequences of a batch nor the number of threads change a bit of a result. Threads take tasks in equal shares of
// estimated cost; partial sums of a sequence whose keys were split are merged at the end, in order.
#include <omp.h>

#include <utility>
#include <vector>

#include "attention_task.hpp"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace tessera {
namespace {

constexpr int SPLIT = 256;  // keys of one task where a sequence has few rows

struct Merge {
  int32_t seq;
  int32_t kv_head;
  int32_t num_rows;
  int32_t num_parts;
  int64_t part;  // the first one; the others follow
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<int64_t> cost_before;  // of each task, and the whole cost
  std::vector<Merge> merges;
  int64_t parts_size = 0;  // in floats
};

int64_t part_size(int rows, int head_dim) { return int64_t{rows} * (head_dim + 2); }

void add_task(Plan& plan, const Task& task) {
  // Reading a key and a value costs about as much as eight rows of arithmetic.
  const int64_t cost = int64_t{task.end - task.begin} * std::max(task.num_rows, 8);
  plan.tasks.push_back(task);
  plan.cost_before.push_back(plan.cost_before.back() + cost);
}

// The keys that some of `num_rows` rows from `first_row` on see.
std::pair<int, int> seen_keys(const Layer& layer, int context, int first_row, int num_rows) {
  const int group = layer.num_heads / layer.num_kv_heads;
  const int first_limit = context + first_row / group + 1;
  return {layer.window ? std::max(0, first_limit - layer.window) : 0, context + (first_row + num_rows - 1) / group + 1};
}

// Keys are split. The heads of a block are neighbours in memory, so they come one after the other, split by split.
void plan_few_rows(Plan& plan, const Layer& layer, int seq, int num_rows, int context) {
  const auto [begin, end] = seen_keys(layer, context, 0, num_rows);
  const int first_split = begin / SPLIT, end_split = (end - 1) / SPLIT + 1, num_parts = end_split - first_split;
  const int64_t first_part = plan.parts_size, size = part_size(num_rows, layer.head_dim);
  if (num_parts > 1) {
    for (int head = 0; head < layer.num_kv_heads; ++head)
      plan.merges.push_back({seq, head, num_rows, num_parts, first_part + head * num_parts * size});
    plan.parts_size += layer.num_kv_heads * num_parts * size;
  }
  for (int index = first_split; index < end_split; ++index)
    for (int head = 0; head < layer.num_kv_heads; ++head) {
      const int from = std::max(begin, index * SPLIT), to = std::min(end, (index + 1) * SPLIT);
      const int64_t part = first_part + (head * num_parts + index - first_split) * size;
      add_task(plan, {seq, head, 0, num_rows, from, to, num_parts > 1 ? part : -1});
    }
}

void plan_many_rows(Plan& plan, const Layer& layer, int seq, int num_rows, int context) {
  for (int head = 0; head < layer.num_kv_heads; ++head)
    for (int row = 0; row < num_rows; row += MAX_ROWS) {
      const int count = std::min(MAX_ROWS, num_rows - row);
      const auto [begin, end] = seen_keys(layer, context, row, count);
      add_task(plan, {seq, head, row, count, begin, end, -1});
    }
}

void make_plan(Plan& plan, const Layer& layer, const Step& step) {
  plan.tasks.clear();
  plan.merges.clear();
  plan.cost_before.assign(1, 0);
  plan.parts_size = 0;
  const int group = layer.num_heads / layer.num_kv_heads;
  for (int seq = 0; seq < step.num_seqs; ++seq) {
    const int num_queries = step.query_start_loc[seq + 1] - step.query_start_loc[seq];
    const int num_rows = num_queries * group, context = step.seq_lens[seq] - num_queries;
    if (num_rows > MAX_ROWS) plan_many_rows(plan, layer, seq, num_rows, context);
    else if (num_rows > 0) plan_few_rows(plan, layer, seq, num_rows, context);
  }
}

// Where the output of a row of a sequence and key head goes, in elements.
int64_t output_offset(const Layer& layer, const Step& step, int seq, int kv_head, int row) {
  const int group = layer.num_heads / layer.num_kv_heads;
  const int64_t token = step.query_start_loc[seq] + row / group;
  return (token * layer.num_heads + kv_head * group + row % group) * layer.head_dim;
}

void finish_row(void* out, int64_t offset, float* sums, float total, int head_dim, Kind kind) {
  const float inverse = 1.f / total;
  for (int d = 0; d < head_dim; ++d) sums[d] *= inverse;
  store_row(out, offset, sums, head_dim, kind);
}

// `following` is the task that the thread has next, or null.
void run_task(const Layer& layer, const Step& step, const Task& task, const Task* following, const Rows& q, void* out,
              float* parts) {
  thread_local Scratch scratch;
  const int dim = layer.head_dim;
  const TaskMemory memory(scratch.floats(TaskMemory::size(dim)), dim);
  const int num_queries = step.query_start_loc[task.seq + 1] - step.query_start_loc[task.seq];
  const RowRange rows{layer, task, layer.num_heads / layer.num_kv_heads, step.seq_lens[task.seq] - num_queries};
  load_queries(rows, q, step.query_start_loc[task.seq], memory.queries, memory.values);
  std::fill_n(memory.sums, task.num_rows * dim, 0.f);
  Softmax states[MAX_ROWS];
  std::fill_n(states, task.num_rows, Softmax{-INFINITY, 0.f});

  const auto attend = [&](auto element) {
    using T = decltype(element);
    if (layer.block_size % MOST_LANES == 0) attend_keys<T, MOST_LANES>(rows, step, following, memory, states);
    else attend_keys<T, LANES>(rows, step, following, memory, states);
  };
  switch (layer.kind) {
    case FLOAT32: attend(float{}); break;
    case FLOAT16: attend(Half{}); break;
    case BFLOAT16: attend(BFloat16{}); break;
    case FLOAT8: attend(Float8{}); break;
    default: attend(int8_t{});
  }
  for (int row = 0; row < task.num_rows; ++row) {
    float* sums = memory.sums + row * dim;
    if (task.part < 0) {
      const int64_t offset = output_offset(layer, step, task.seq, task.kv_head, task.first_row + row);
      finish_row(out, offset, sums, states[row].sum, dim, q.kind);
    } else {
      float* part = parts + task.part + int64_t{row} * (dim + 2);
      std::copy_n(sums, dim, part);
      part[dim] = states[row].top;
      part[dim + 1] = states[row].sum;
    }
  }
}

void merge_row(const Layer& layer, const Step& step, const Merge& merge, int row, const Rows& q, void* out,
               const float* parts) {
  thread_local Scratch scratch;
  const int dim = layer.head_dim;
  float* sums = scratch.floats(dim);
  std::fill_n(sums, dim, 0.f);
  const float* first = parts + merge.part + int64_t{row} * (dim + 2);
  const int64_t stride = part_size(merge.num_rows, dim);
  float top = -INFINITY, total = 0;
  for (int i = 0; i < merge.num_parts; ++i) top = std::fmax(top, first[i * stride + dim]);
  for (int i = 0; i < merge.num_parts; ++i) {
    const float* part = first + i * stride;
    const float weight = std::exp2(part[dim] - top);
    total += weight * part[dim + 1];
    for (int d = 0; d < dim; ++d) sums[d] += weight * part[d];
  }
  finish_row(out, output_offset(layer, step, merge.seq, merge.kv_head, row), sums, total, dim, q.kind);
}

void copy_rows(void* data, int64_t bytes, const int64_t* sources, const int64_t* targets, int64_t count) {
  thread_local Scratch scratch;
  char* held = reinterpret_cast<char*>(scratch.floats((bytes * count + 3) / 4));
  char* rows = static_cast<char*>(data);
  for (int64_t i = 0; i < count; ++i) std::memcpy(held + i * bytes, rows + sources[i] * bytes, bytes);
  for (int64_t i = 0; i < count; ++i) std::memcpy(rows + targets[i] * bytes, held + i * bytes, bytes);
}

}  // namespace
}  // namespace tessera

using namespace tessera;

extern "C" {

// The instruction level that this CPU can run: 5 for x86-64-v4 with VNNI, 4 and 3 for x86-64-v4 and -v3, else 0.
int32_t tessera_cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                  __builtin_cpu_supports("f16c");
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return v3 && v4 ? (__builtin_cpu_supports("avx512vnni") ? 5 : 4) : v3 ? 3 : 0;
#else
  return 0;
#endif
}

// `kind` is that of q, k, v and out. Strides are those of a token, in elements; out is contiguous.
void tessera_attend(const Layer* layer, const Step* step, const void* q, int64_t q_stride, const void* k,
                    int64_t k_stride, const void* v, int64_t v_stride, void* out, int32_t kind, int32_t threads) {
  thread_local Plan plan;
  thread_local Scratch part_scratch;
  make_plan(plan, *layer, *step);
  float* parts = part_scratch.floats(plan.parts_size);
  const Kind type = static_cast<Kind>(kind);
  const Rows queries{q, q_stride, type}, keys{k, k_stride, type}, values{v, v_stride, type};
  const std::vector<Task>& tasks = plan.tasks;
  const std::vector<int64_t>& cost_before = plan.cost_before;
  const std::vector<Merge>& merges = plan.merges;
  const int64_t num_merges = static_cast<int64_t>(merges.size());

#pragma omp parallel num_threads(threads)
  {
    thread_local Scratch scratch;
    float* row = scratch.floats(2 * layer->head_dim);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < step->num_tokens; ++token) write_token(*layer, *step, token, keys, values, row);

    const int64_t total = cost_before.back(), thread = omp_get_thread_num(), count = omp_get_num_threads();
    const auto at = [&](int64_t cost) {
      return std::lower_bound(cost_before.begin(), cost_before.end() - 1, cost) - cost_before.begin();
    };
    const int64_t end = at(total * (thread + 1) / count);
    for (int64_t i = at(total * thread / count); i < end; ++i)
      run_task(*layer, *step, tasks[i], i + 1 < end ? &tasks[i + 1] : nullptr, queries, out, parts);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_merges; ++i)
      for (int r = 0; r < merges[i].num_rows; ++r) merge_row(*layer, *step, merges[i], r, queries, out, parts);
  }
}

// Copies blocks within each layer, targets [num_pairs] from sources [num_pairs]; all are read before one is written.
void tessera_copy_blocks(const Layer* layers, int32_t num_layers, const int64_t* sources, const int64_t* targets,
                         int64_t num_pairs, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int32_t i = 0; i < num_layers; ++i) {
    const Layer& layer = layers[i];
    const int64_t width = layer.kind == FLOAT32 ? 4 : layer.kind == INT8 || layer.kind == FLOAT8 ? 1 : 2;
    copy_rows(layer.keys, layer.block(1, 0) * width, sources, targets, num_pairs);
    copy_rows(layer.values, layer.block(1, 0) * width, sources, targets, num_pairs);
    if (layer.kind != INT8) continue;
    copy_rows(layer.key_scales, layer.scales(1, 0) * 4, sources, targets, num_pairs);
    copy_rows(layer.value_scales, layer.scales(1, 0) * 4, sources, targets, num_pairs);
  }
}

// Asks for transparent huge pages; a system that has none goes on without.
void tessera_advise_huge_pages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t HUGE = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + HUGE - 1) / HUGE * HUGE;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / HUGE * HUGE;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // extern "C"
