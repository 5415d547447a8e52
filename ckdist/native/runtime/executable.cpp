#include "runtime/executable.h"

#include <algorithm>
#include <cstddef>

#include "core/error.h"
#include "runtime/shares.h"

namespace ckdist {

namespace {
int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
}  // namespace

Executable::Executable(const ckdist_program& program, Group& group, int threads, std::vector<int> cpus, int spins)
    : program_(program),
      steps_(program.steps, program.steps + program.step_count),
      values_(program.values, program.values + program.value_count),
      group_(group),
      kernels_(kernels()),
      workers_(threads),
      counters_(new std::atomic<int64_t>[program.step_count]),
      pool_(threads, std::move(cpus), spins) {
  next_linear_.resize(steps_.size());
  for (int i = int(steps_.size()) - 1, next = -1; i >= 0; i--) {
    next_linear_[i] = next;
    if (steps_[i].op == ckdist_step_linear) next = i;
  }
  arena_.emplace(program.arena_bytes, "activations");
  for (int h = 0, head = 0; h < program.kv_heads; h++) {
    first_head_.push_back(head);
    head += program.heads_per_kv[h];
    max_group_ = std::max(max_group_, int(program.heads_per_kv[h]));
  }
  kv_head_bytes_ = kernels_.attention.block_bytes(KvType(program.kv_type), program.head_dim);
  kv_block_bytes_ = kv_head_bytes_ * program.kv_heads;
  kv_bytes_ = kv_block_bytes_ * program.layers * program.blocks;
  kv_arena_.emplace(kv_bytes_, "the KV cache");

  int64_t row_floats = 1, activation_bytes[3] = {64, 64, 64};
  for (const ckdist_value& v : values_)
    if (v.kind == ckdist_in_activations) activation_bytes[v.format] = std::max(activation_bytes[v.format], activation_stride(v));
    else row_floats = std::max(row_floats, v.width);
  const int64_t scratch = round_up(kernels_.attention.scratch_bytes(kQueryTile, max_group_, program.head_dim), 64);
  const int64_t row = round_up(row_floats * 4, 64);
  constexpr int64_t sums = kLowTokens * kLowTiles * kTileRows * 4;
  int64_t each = scratch + row + sums;
  for (int64_t bytes : activation_bytes) each += kReplicatedRows * bytes;
  each = round_up(each, 4096);
  scratch_arena_.emplace(each * threads, "the threads' buffers");
  uint8_t* at = scratch_arena_->data();
  for (int t = 0; t < threads; t++, at += each) {
    Worker& w = workers_[t];
    uint8_t* p = at;
    w.scratch = p, p += scratch;
    w.row = reinterpret_cast<float*>(p), p += row;
    w.sums = reinterpret_cast<float*>(p), p += sums;
    for (int f = 0; f < 3; f++) w.activations[f] = p, p += kReplicatedRows * activation_bytes[f];
  }
  // Parts of contexts that threads share: enough for the whole cache, which is less than a hundredth of it.
  part_bytes_ = round_up(kernels_.attention.part_bytes(KvType(program.kv_type), 1, max_group_, program.head_dim), 64);
  part_count_ = threads > 1 ? program.kv_heads * (program.blocks * kBlockTokens / kSpan + 2 * program.max_sequences) : 0;
  part_arena_.emplace(std::max<int64_t>(part_count_ * part_bytes_, 64), "parts of attention");
  merged_.reset(new std::atomic<int64_t>[std::max<int64_t>(program.max_sequences * program.kv_heads, 1)]());
  GroupSizes sizes{};
  sizes.partial_floats = program.partial_floats;
  sizes.logit_rows = program.max_outputs, sizes.vocab = program.vocab;
  for (const ckdist_value& v : values_)
    if (v.kind == ckdist_in_logits) sizes.first_column = v.place, sizes.columns = v.width;
  sizes.message_ints = BatchView::kHeader + program.max_tokens + 3 * program.max_sequences +
                       program.max_sequences * (program.context_length / kBlockTokens + 1) + program.max_outputs;
  group_.reserve(sizes);
}

uint8_t* Executable::kv(int layer, int kv_head) const {
  return kv_arena_->data() + layer * program_.blocks * kv_block_bytes_ + kv_head * kv_head_bytes_;
}

float* Executable::floats(int value, int64_t* stride) {
  const ckdist_value& v = values_[value];
  *stride = v.width;
  if (v.kind == ckdist_in_slot) return group_.partial(int(v.place));
  if (v.kind == ckdist_in_logits) return group_.logits(stride);
  return reinterpret_cast<float*>(arena_->data() + v.place);
}

template <class Last>
void Executable::meet(int thread, int index, bool exchange, Last&& last) {
  const int64_t start = thread == 0 ? now_ns() : 0;
  find_ahead(thread, index);
  const Idle idle = {fetch_ahead, &workers_[thread].ahead};
  pool_.barrier([&] { last(idle); }, idle);
  if (thread == 0) (exchange ? times_.exchange : times_.barrier) += double(now_ns() - start) * 1e-9;
}

void Executable::meet(int thread, int index) {
  meet(thread, index, false, [](Idle) {});
}

void Executable::finish(int thread, int index) {
  const ckdist_value& out = values_[steps_[index].out[0]];
  if (out.kind == ckdist_in_slot)
    meet(thread, index, true, [&](Idle idle) { group_.reduce(int(out.place), rows(steps_[index]) * out.width, index, idle); });
  else
    meet(thread, index);
}

void Executable::run(const int32_t* message, int64_t ints) {
  const BatchView batch = BatchView::parse(message, ints, program_.max_tokens, program_.max_sequences, program_.max_outputs,
                                           program_.context_length, program_.blocks, program_.vocab);
  if (group_.size > 1 && group_.rank == 0) group_.publish(message, ints);
  batch_ = batch;
  active_ = std::min(std::max(batch.threads, 1), pool_.size());
  for (Worker& worker : workers_) worker.ahead.step = -1;
  for (size_t i = 0; i < steps_.size(); i++) counters_[i].store(0, std::memory_order_relaxed);
  const int64_t start = now_ns();
  try {
    pool_.run(active_, [this](int thread) { replay(thread); });
  } catch (const std::exception& e) {
    group_.abandon(e.what());
    throw;
  }
  times_.total += double(now_ns() - start) * 1e-9;
  times_.runs++;
}

void Executable::work() {
  try {
    for (;;) {
      int64_t ints = 0;
      const int32_t* message = group_.receive(&ints);
      if (ints == 0) return;
      run(message, ints);
    }
  } catch (const std::exception& e) {
    group_.abandon(e.what());
    throw;
  }
}

void Executable::stop() {
  if (group_.size > 1) group_.publish(nullptr, 0);
}

ckdist_times Executable::times(bool reset) {
  const ckdist_times t = times_;
  if (reset) times_ = {};
  return t;
}

void Executable::replay(int thread) {
  for (int i = 0; i < int(steps_.size()); i++) execute(thread, i);
}

void Executable::execute(int thread, int i) {
  switch (steps_[i].op) {
    case ckdist_step_embed: return embed(thread, i);
    case ckdist_step_prepare: return prepare(thread, i);
    case ckdist_step_linear: return linear(thread, i);
    case ckdist_step_attend: return attend(thread, i);
    case ckdist_step_low_rank: return low_rank(thread, i);
    default: fail(Status::native, "step %d has unknown op %d", i, steps_[i].op);
  }
}

// out[0]: (tokens, hidden), zeros for ids of another rank's part of the vocabulary
void Executable::embed(int thread, int index) {
  const ckdist_step& step = steps_[index];
  const Matrix& table = matrix(step.matrix[0]);
  int64_t stride;
  float* out = floats(step.out[0], &stride);
  for (int64_t t = thread; t < batch_.tokens; t += active_) {
    float* row = out + t * stride;
    const int64_t id = batch_.token_ids[t] - step.i[0];
    if (id < 0 || id >= table.rows) {
      std::fill(row, row + stride, 0.f);
      continue;
    }
    kernels_.linear[int(table.type)].unpack_row(table.tiles + id / kTileRows * table.tile_bytes, int(id % kTileRows), table.cols, row);
    if (step.f[0] != 1.f)
      for (int64_t c = 0; c < stride; c++) row[c] *= step.f[0];
  }
  finish(thread, index);
}

void Executable::prepare(int thread, int index) {
  const ckdist_step& step = steps_[index];
  const int64_t n = rows(step);
  if (replicated(step)) {
    // Every thread prepares every row for itself; one of them also keeps the residual for later steps.
    for (int64_t r = 0; r < n; r++) prepare_row(thread, step, r, step.outputs_only ? batch_.output_tokens[r] : r, r % active_ == thread);
    return;
  }
  for (int64_t r = thread; r < n; r += active_) prepare_row(thread, step, r, step.outputs_only ? batch_.output_tokens[r] : r, true);
  meet(thread, index);
}

void Executable::prepare_row(int thread, const ckdist_step& step, int64_t out_row, int64_t in_row, bool store) {
  const ElementwiseKernel& k = kernels_.elementwise;
  Worker& worker = workers_[thread];
  const ckdist_value& y = values_[step.y];
  const int64_t n = y.width;
  const float* parts[kMaxRanks];
  int count = 1;
  int64_t stride;
  if (y.kind == ckdist_in_slot) count = group_.parts(int(y.place), parts);
  else parts[0] = floats(step.y, &stride);
  for (int p = 0; p < count; p++) parts[p] += in_row * n;

  const float* s = parts[0];
  if (count > 1) k.sum_parts(nullptr, parts, count, n, worker.row), s = worker.row;
  if (step.vector[0] >= 0) k.rms_norm(s, program_.vectors[step.vector[0]], step.f[0], n, worker.row), s = worker.row;
  if (step.x >= 0) {
    const float* x = floats(step.x, &stride) + in_row * n;
    const float* two[] = {x, s};
    k.sum_parts(nullptr, two, 2, n, worker.row), s = worker.row;
  }
  if (step.out[0] >= 0 && store) std::copy(s, s + n, floats(step.out[0], &stride) + in_row * n);
  if (step.vector[1] >= 0) k.rms_norm(s, program_.vectors[step.vector[1]], step.f[0], n, worker.row), s = worker.row;
  for (int f = 0; f < 3; f++) {
    if (step.out[1 + f] < 0) continue;
    const ckdist_value& a = values_[step.out[1 + f]];
    uint8_t* base = replicated(step) ? worker.activations[f] : arena_->data() + a.place;
    k.prepare(ActivationFormat(f), s, n, a.lead, a.width, base + out_row * activation_stride(a));
  }
}

int64_t Executable::weight_bytes(const ckdist_step& step) const {
  int64_t bytes = 0;
  for (int m = 0; m < 4 && step.matrix[m] >= 0; m++) bytes += matrix(step.matrix[m]).tile_count() * matrix(step.matrix[m]).tile_bytes;
  return bytes;
}

// Calls visit(m, first tile, end) for the tiles whose middle lies in bytes [from, to) of a step's matrices laid end to end; those of
// a gated step lie tile beside tile.
template <class Visit>
void Executable::each_range(const ckdist_step& step, int64_t from, int64_t to, Visit&& visit) {
  const bool gated = step.i[0];
  int64_t offset = 0;
  for (int m = 0; m < (gated ? 1 : 4) && step.matrix[m] >= 0; m++) {
    const Matrix& w = matrix(step.matrix[m]);
    const int64_t tile_bytes = gated ? w.tile_bytes + matrix(step.matrix[1]).tile_bytes : w.tile_bytes;
    if (tile_bytes == 0) continue;  // this rank has no rows of it
    auto boundary = [&](int64_t at) { return std::clamp<int64_t>((at - offset + tile_bytes / 2) / tile_bytes, 0, w.tile_count()); };
    if (boundary(from) < boundary(to)) visit(m, boundary(from), boundary(to));
    offset += tile_bytes * w.tile_count();
  }
}

// While a thread waits in a step of few tokens, memory would idle: it brings the start of its first piece of the next product
// to the L2 cache, as far as it gets.
void Executable::find_ahead(int thread, int index) {
  Ahead& ahead = workers_[thread].ahead;
  const int next = next_linear_[index];
  if (ahead.step == next) return;
  ahead = {next, nullptr, nullptr};
  if (next < 0 || rows(steps_[next]) > kFewRows) return;
  const ckdist_step& step = steps_[next];
  const int64_t bytes = weight_bytes(step);
  if (bytes == 0) return;  // nothing of these matrices is this rank's
  const Shares shares(bytes, active_, true);
  each_range(step, shares.begin(thread), shares.begin(thread + 1), [&](int m, int64_t begin, int64_t end) {
    if (ahead.at != nullptr) return;
    const Matrix& w = matrix(step.matrix[m]);
    ahead.at = w.tiles + begin * w.tile_bytes;
    ahead.end = ahead.at + std::min((end - begin) * w.tile_bytes, kAheadBytes);
  });
}

void Executable::fetch_ahead(void* with) {
  Ahead& ahead = *static_cast<Ahead*>(with);
  for (int line = 0; line < 4 && ahead.at < ahead.end; line++, ahead.at += 64) __builtin_prefetch(ahead.at, 0, 2);
  cpu_pause();
}

void Executable::linear(int thread, int index) {
  const ckdist_step& step = steps_[index];
  const int64_t n = rows(step);
  const bool gated = step.i[0];
  const int64_t bytes = weight_bytes(step);

  // Tiles [begin, end) of matrix m; of both matrices when their product is gated, so that one thread has both halves.
  auto multiply = [&](int m, int64_t begin, int64_t end) {
    const Matrix& w = matrix(step.matrix[m]);
    const LinearKernel& kernel = kernels_.linear[int(w.type)];
    const ckdist_value& a = values_[step.in[m]];
    const uint8_t* x = replicated(step) ? workers_[thread].activations[a.format] : arena_->data() + a.place;
    int64_t stride;
    float* y = floats(step.out[m], &stride);
    kernel.multiply(w, begin, end, x, activation_stride(a), n, y, stride);
    const int64_t from = begin * kTileRows, to = std::min(end * kTileRows, w.rows);
    if (step.vector[m] >= 0)
      for (int64_t t = 0; t < n; t++) kernels_.elementwise.add(program_.vectors[step.vector[m]] + from, to - from, y + t * stride + from);
    if (step.f[1] != 0.f)
      for (int64_t t = 0; t < n; t++) kernels_.elementwise.soft_cap(y + t * stride + from, step.f[1], to - from);
  };
  auto share = [&](int m, int64_t begin, int64_t end) {
    multiply(m, begin, end);
    if (!gated) return;
    multiply(1, begin, end);
    int64_t gate_stride, up_stride;
    float* gate = floats(step.out[0], &gate_stride);
    const float* up = floats(step.out[1], &up_stride);
    const int64_t from = begin * kTileRows, to = std::min(end * kTileRows, matrix(step.matrix[0]).rows);
    for (int64_t t = 0; t < n; t++)
      kernels_.elementwise.gated(GateFunction(step.i[1]), gate + t * gate_stride + from, up + t * up_stride + from, to - from, gate + t * gate_stride + from);
  };

  if (n > 0 && bytes > 0) {
    const Shares shares(bytes, active_, n <= kFewRows);
    for (int64_t piece = thread; piece < shares.pieces(); piece = active_ + counters_[index].fetch_add(1))
      each_range(step, shares.begin(piece), shares.begin(piece + 1), share);
  }
  const ckdist_value& out = values_[step.out[0]];
  if (bytes == 0 && (out.kind == ckdist_in_slot || step.i[2]))  // this rank has no columns of the matrices: its part of the sum is zero
    for (int m = 0; m < 4 && step.out[m] >= 0; m++) {
      int64_t stride;
      float* y = floats(step.out[m], &stride);
      for (int64_t t = thread; t < n; t += active_) std::fill(y + t * stride, y + (t + 1) * stride, 0.f);
    }
  if (step.i[2]) meet(thread, index);
  else if (out.kind == ckdist_in_logits) meet(thread, index, true, [&](Idle) { group_.gather(n, index); });
  else finish(thread, index);
}

// Rotates one token's queries and key of one kv-head (norms first, where the model has them) and stores key and value.
void Executable::rotate_and_store(const ckdist_step& step, int run, int64_t token, int kv_head) {
  const ElementwiseKernel& k = kernels_.elementwise;
  const int head_dim = program_.head_dim;
  int64_t q_stride, k_stride, v_stride, blocks = 0, first = 0;
  float* q = floats(step.out[0], &q_stride) + token * q_stride + first_head_[kv_head] * head_dim;
  float* key = floats(step.out[1], &k_stride) + token * k_stride + kv_head * head_dim;
  const float* value = floats(step.out[2], &v_stride) + token * v_stride + kv_head * head_dim;
  for (int r = 0; r < run; r++) first += batch_.run[r].tokens, blocks += batch_.run[r].blocks;
  const int64_t position = batch_.run[run].first_position + token - first;
  const float* cos = program_.rope_cos[step.i[1]] + position * (head_dim / 2);
  const float* sin = program_.rope_sin[step.i[1]] + position * (head_dim / 2);
  for (int h = 0; h < program_.heads_per_kv[kv_head]; h++, q += head_dim) {
    if (step.vector[0] >= 0) k.rms_norm(q, program_.vectors[step.vector[0]], step.f[0], head_dim, q);
    k.rope(q, cos, sin, head_dim, q);
  }
  if (step.vector[1] >= 0) k.rms_norm(key, program_.vectors[step.vector[1]], step.f[0], head_dim, key);
  k.rope(key, cos, sin, head_dim, key);
  const int64_t block = batch_.block_tables[blocks + position / kBlockTokens];
  kernels_.attention.store(KvType(program_.kv_type), kv(step.i[0], kv_head) + block * kv_block_bytes_, int(position % kBlockTokens), head_dim, key, value);
}

AttentionTask Executable::task_of(const ckdist_step& step, const Item& item) {
  int64_t first = 0, blocks = 0, q_stride, out_stride;
  for (int r = 0; r < item.run; r++) first += batch_.run[r].tokens, blocks += batch_.run[r].blocks;
  const int64_t head = int64_t(first_head_[item.kv_head]) * program_.head_dim;
  const float* q = floats(step.out[0], &q_stride);
  float* out = floats(step.out[3], &out_stride);
  AttentionTask task{};
  task.kv_type = KvType(program_.kv_type);
  task.head_dim = program_.head_dim;
  task.kv = kv(step.i[0], item.kv_head);
  task.block_stride = kv_block_bytes_;
  task.block_table = batch_.block_tables + blocks;
  task.first_position = batch_.run[item.run].first_position + item.first;
  task.tokens = item.tokens;
  task.heads = program_.heads_per_kv[item.kv_head];
  task.q = q + (first + item.first) * q_stride + head;
  task.q_token_stride = q_stride;
  task.q_head_stride = program_.head_dim;
  task.out = out + (first + item.first) * out_stride + head;
  task.out_token_stride = out_stride;
  task.out_head_stride = program_.head_dim;
  task.scale = step.f[1];
  task.soft_cap = step.f[2];
  task.window = step.i[2];
  return task;
}

// Cutting costs a barrier. It pays where whole (run, kv-head) items cannot be handed out evenly: where the longest is a large share of
// what each thread should do.
Executable::Split Executable::split_of(const ckdist_step& step) {
  Split split;
  int64_t longest = 0;
  for (int r = 0; r < batch_.runs; r++) {
    AttentionTask task{};
    task.first_position = batch_.run[r].first_position, task.tokens = 1, task.window = step.i[2];
    const int64_t spans = task.last_span() - task.first_span();
    split.spans += spans, longest = std::max(longest, spans);
  }
  const int64_t total = split.spans * program_.kv_heads;
  const bool even = batch_.runs == 1 && program_.kv_heads % active_ == 0;
  if (even || longest < 4 || longest * active_ * 4 <= total || total > part_count_) return split;
  split.spans_each = std::max<int64_t>(total / (active_ * 8), 1);
  return split;
}

void Executable::attend(int thread, int index) {
  const ckdist_step& step = steps_[index];
  const int kv_heads = program_.kv_heads;
  if (batch_.tokens != batch_.runs) return attend_prompt(thread, index);
  if (active_ > 1 && kv_heads > 0) {
    const Split split = split_of(step);
    if (split.spans_each > 0) return attend_split(thread, index, split);
  }
  // One token per sequence: whoever stores a kv-head's key also attends to it, so no barrier stands between.
  for (int64_t i; (i = counters_[index].fetch_add(1)) < batch_.runs * kv_heads;) {
    const int run = int(i / kv_heads), kv_head = int(i % kv_heads);
    rotate_and_store(step, run, run, kv_head);
    kernels_.attention.attend(task_of(step, {run, 0, 1, kv_head}), workers_[thread].scratch);
  }
  meet(thread, index);
}

void Executable::attend_split(int thread, int index, const Split& split) {
  const ckdist_step& step = steps_[index];
  const int kv_heads = program_.kv_heads;
  for (int64_t i = thread; i < batch_.runs * kv_heads; i += active_) rotate_and_store(step, int(i / kv_heads), i / kv_heads, int(i % kv_heads));
  meet(thread, index);
  int64_t i = counters_[index].fetch_add(1), before = 0, parts = 0;  // before: tasks of earlier items; parts: theirs
  for (int64_t item = 0; item < batch_.runs * kv_heads; item++) {
    const int run = int(item / kv_heads), kv_head = int(item % kv_heads);
    const AttentionTask task = task_of(step, {run, 0, 1, kv_head});
    const int64_t spans = task.last_span() - task.first_span(), tasks = (spans + split.spans_each - 1) / split.spans_each;
    uint8_t* at = part_arena_->data() + parts * part_bytes_;
    for (; i < before + tasks; i = counters_[index].fetch_add(1)) {
      const int64_t from = (i - before) * split.spans_each, to = std::min(from + split.spans_each, spans);
      const int64_t bytes = kernels_.attention.part_bytes(task.kv_type, 1, task.heads, task.head_dim);
      kernels_.attention.attend_spans(task, task.first_span() + from, task.first_span() + to, at + from * bytes, workers_[thread].scratch);
      std::atomic<int64_t>& merged = merged_[item];
      if (merged.fetch_add(to - from, std::memory_order_acq_rel) + to - from < spans) continue;
      merged.store(0, std::memory_order_relaxed);
      kernels_.attention.merge(task, at, workers_[thread].scratch);
    }
    before += tasks, parts += spans;
  }
  meet(thread, index);
}

void Executable::attend_prompt(int thread, int index) {
  const ckdist_step& step = steps_[index];
  const int kv_heads = program_.kv_heads;
  // A block's positions are stored by one thread: they share its cache lines.
  for (int64_t token = 0, run = 0, end = batch_.run[0].tokens; token < batch_.tokens; token++) {
    if (token == end) end += batch_.run[++run].tokens;
    const int64_t position = batch_.run[run].first_position + token - (end - batch_.run[run].tokens);
    for (int h = 0; h < kv_heads; h++)
      if ((position / kBlockTokens * kv_heads + h + run) % active_ == thread) rotate_and_store(step, int(run), token, h);
  }
  meet(thread, index);
  // Tiles of query tokens from the last, longest context to the first, to whoever is free.
  int64_t tiles = 0;
  for (int64_t r = 0; r < batch_.runs; r++) tiles += (batch_.run[r].tokens + kQueryTile - 1) / kQueryTile;
  for (int64_t i; (i = counters_[index].fetch_add(1)) < tiles * kv_heads;) {
    int64_t tile = tiles - 1 - i / kv_heads;
    int run = 0;
    for (int64_t n; tile >= (n = (batch_.run[run].tokens + kQueryTile - 1) / kQueryTile); run++) tile -= n;
    const int first = int(tile) * kQueryTile;
    const Item item = {run, first, std::min(kQueryTile, batch_.run[run].tokens - first), int(i % kv_heads)};
    kernels_.attention.attend(task_of(step, item), workers_[thread].scratch);
  }
  meet(thread, index);
}

}  // namespace ckdist
