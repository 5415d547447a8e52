
#include <sys/mman.h>

#include "runtime/steps/packs.h"

namespace ckdist {
namespace {

constexpr int64_t kScattered = 1 << 20;  // floats that are summed at once if ranks own parts of the gradients

// Gives whole pages in [begin, end) back to the system. They are zeros if they are read again.
void free_pages(void* begin, void* end) {
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
  const uintptr_t last = reinterpret_cast<uintptr_t>(end) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace

Training::Training(const ckdist_program& that, Communicator* data, Communicator* tensor, Communicator* stages,
                   Communicator* sequence, std::shared_ptr<Pool> pool)
    : Executor(that, std::move(pool)),
      kernels(ckdist::kernels()),
      narrow_values(that.bf16),
      packing(narrow_values ? kernels.pack.bf16 : kernels.pack.f32),
      product(narrow_values ? kernels.product.bf16 : kernels.product.f32),
      tile_type(product.tiles),
      scratch_product(tile_type == Type::bf16 ? kernels.product.bf16 : kernels.product.f32),
      losses(that.max_tokens),
      data_(data && data->size > 1 ? data : nullptr),
      tensor_(tensor && tensor->size > 1 ? tensor : nullptr),
      stages_(stages && stages->size > 1 ? stages : nullptr),
      sequence_(sequence && sequence->size > 1 ? sequence : nullptr),
      sent_(size_t(that.in_flight)) {
  active_ = threads();
  for (int v = 0; v < plan->value_count; ++v)
    // Rows are not 4096 bytes apart: with that distance loads would wait for stores.
    row_floats_ = std::max(row_floats_, round16(width(v)) + 80);
  make_packs();
  make_lists();
  if (that.narrow_parameters)
    for (int p = 0; p < plan->parameter_count; ++p) {
      vector_at_.push_back(int64_t(vectors_.size()));
      if (is_narrow(p) && is_small(p)) vectors_.resize(vectors_.size() + size_t(shape(p).rows * shape(p).cols));
    }
  kept_arena_.emplace(std::max<int64_t>(program.kept_bytes, 64), "activations of batches that wait");
}

void Training::make_packs() {
  for (int index = 0; index < plan->pack_count; ++index) {
    const ckdist_pack& p = pack(index);
    int64_t rows = shape(p.parameters[0]).rows, cols = shape(p.parameters[0]).cols;
    if (p.transposed) {
      rows = cols, cols = 0;
      for (int m = 0; m < p.count; ++m) cols += round16(shape(p.parameters[m]).rows);
    }
    packed_.push_back(matrix(rows, cols, nullptr));
    if (std::all_of(p.parameters, p.parameters + p.count,
                    [&](int32_t w) { return !packed_parameter(w) && shape(w).offset >= program.trained_floats; }))
      frozen_.push_back(index), frozen_bytes_ += bytes_of(packed_.back());
  }
  std::stable_sort(frozen_.begin(), frozen_.end(),
                   [&](int32_t a, int32_t b) { return pack(a).parameters[0] < pack(b).parameters[0]; });
  frozen_arena_.emplace(std::max<int64_t>(frozen_bytes_, 64), "packed weights");
  Carver carver{frozen_arena_->data()};
  for (const int32_t index : frozen_) packed_[index].tiles = carver.bytes(bytes_of(packed_[index]));
}

// Reads the trained vectors in the floats [begin, end) of the parameters. Steps read vectors as floats.
void Training::widen_vectors(int64_t begin, int64_t end) {
  for (int p = 0; p < int(vector_at_.size()); ++p)
    if (const ckdist_parameter& v = shape(p); is_narrow(p) && is_small(p) && v.offset >= begin && v.offset < end)
      kernels.pack.bf16.widen(trained_at(v.offset), v.rows * v.cols, vectors_.data() + vector_at_[size_t(p)]);
}

void Training::check(const ckdist_training_batch& b) const {
  const auto text = [](int64_t n) { return static_cast<long long>(n); };
  if (b.tokens < 1 || b.tokens > program.max_tokens)
    fail(Status::config, "a batch of %lld tokens does not fit an executable for %lld; pass 1 to %lld", text(b.tokens),
         text(program.max_tokens), text(program.max_tokens));
  for (int64_t t = 0; t < b.tokens; ++t) {
    if (b.token_ids[t] < 0 || b.token_ids[t] >= program.vocab)
      fail(Status::config, "token %lld has id %d; the vocabulary has ids 0 to %lld", text(t), b.token_ids[t],
           text(program.vocab - 1));
    if (b.targets[t] < -1 || b.targets[t] >= program.vocab)
      fail(Status::config, "token %lld has target %d; the vocabulary has ids 0 to %lld, and -1 is no target", text(t),
           b.targets[t], text(program.vocab - 1));
  }
  const int64_t all = b.tokens * sequence_ranks();
  if (b.sequences < 1 || b.starts[0] != 0 || b.starts[b.sequences] != all || (sequence_ && b.tokens % 2))
    fail(Status::config, "the starts of %lld sequences must go from 0 to %lld, the number of tokens", text(b.sequences),
         text(all));
  for (int64_t s = 0; s < b.sequences; ++s)
    if (b.starts[s + 1] < b.starts[s])
      fail(Status::config, "sequence %lld starts at %d and ends before it, at %d", text(s), b.starts[s],
           b.starts[s + 1]);
  for (int64_t i = 0; i < b.tokens * b.choices; ++i)
    if (b.teacher_ids[i] < 0 || b.teacher_ids[i] >= program.vocab || !(b.teacher_logprobs[i] <= 0) ||
        (i % b.choices && b.teacher_ids[i] <= b.teacher_ids[i - 1] && b.targets[i / b.choices] >= 0))
      fail(Status::config, "a teacher's token %d is out of order or outside the vocabulary of %lld", b.teacher_ids[i],
           text(program.vocab));
}

// Leaves out sequences without a target, which only fill up batches: they do not change the loss. Keeps at least one
// token. A divided batch is taken whole, because other ranks have the rest of its sequences.
void Training::take(const ckdist_training_batch& b) {
  batch = Batch{};
  batch.choices = b.choices;
  const auto append = [&](int64_t begin, int64_t end) {
    batch.token_ids.insert(batch.token_ids.end(), b.token_ids + begin, b.token_ids + end);
    batch.targets.insert(batch.targets.end(), b.targets + begin, b.targets + end);
    for (int64_t t = begin; t < end; ++t)
      batch.positions.push_back(int32_t(t - begin)), batch.given.push_back(int32_t(t));
    if (b.weights) batch.weights.insert(batch.weights.end(), b.weights + begin, b.weights + end);
    if (b.keys) batch.keys.insert(batch.keys.end(), b.keys + begin, b.keys + end);
    const int64_t first = begin * b.choices, last = end * b.choices;
    batch.teacher_ids.insert(batch.teacher_ids.end(), b.teacher_ids + first, b.teacher_ids + last);
    batch.teacher_logprobs.insert(batch.teacher_logprobs.end(), b.teacher_logprobs + first, b.teacher_logprobs + last);
    batch.starts.push_back(int32_t(batch.token_ids.size()));
  };
  batch.starts.assign(1, 0);
  for (int64_t s = 0; s < b.sequences && !sequence_; ++s)
    if (std::any_of(b.targets + b.starts[s], b.targets + b.starts[s + 1], [](int32_t target) { return target >= 0; }))
      append(b.starts[s], b.starts[s + 1]);
  if (sequence_) append(0, b.tokens);
  if (batch.token_ids.empty()) append(0, 1);
  batch.tokens = int64_t(batch.token_ids.size());
  if (sequence_) place_divided(b);
  for (int64_t t = 0; t < batch.tokens; ++t)
    if (batch.targets[t] >= 0) batch.learned.push_back(int32_t(t));
  if (int64_t(batch.learned.size()) > batch.tokens - batch.tokens / kLeastSaved || batch.learned.empty()) {
    batch.learned.resize(batch.tokens);
    std::iota(batch.learned.begin(), batch.learned.end(), 0);
  }
  std::fill_n(losses.begin(), batch.tokens, 0.0);
  batch.best.assign(b.best_tokens ? batch.tokens : 0, -1);
  balance = 0;
}

// The starts of a divided batch, and the positions of this rank's tokens in its sequences.
void Training::place_divided(const ckdist_training_batch& b) {
  batch.starts.assign(b.starts, b.starts + b.sequences + 1);
  for (int64_t t = 0; t < batch.tokens; ++t) {
    const int64_t at = own_chunk(t / chunk_tokens()) * chunk_tokens() + t % chunk_tokens();
    batch.positions[t] = int32_t(at - *(std::upper_bound(batch.starts.begin(), batch.starts.end(), at) - 1));
  }
}

double Training::run(const ckdist_training_batch& those, const ckdist_training_pass& pass) {
  if (pass.list < 0 || pass.list >= plan->list_count || pass.kept < 0 || pass.kept > program.kept_bytes)
    fail(Status::native, "a pass names list %d of %d, and kept values at byte %lld of %lld", pass.list,
         plan->list_count, static_cast<long long>(pass.kept), static_cast<long long>(program.kept_bytes));
  check(those);
  take(those);
  pass_ = pass;
  list_ = &lists_[size_t(pass.list)];
  kept_ = kept_arena_->data() + pass.kept;
  seconds_.fill(0), pack_seconds_ = 0;
  operations_.clear(), gathers_.clear(), gathered_ = 0;
  widen_vectors(0, program.trained_floats);
  // Collectives use memory of the caller: all of them end, also after a failure.
  std::exception_ptr failure;
  const auto attempt = [&](auto&& call) {
    try {
      call();
    } catch (...) { failure = failure ? failure : std::current_exception(); }
  };
  attempt([&] { pool_->run(active_, [this](int thread) { replay(thread); }); });
  const int64_t start = now_ns();
  for (const auto& operation : operations_) attempt([&] { operation->wait(); });
  for (const Gather& gather : gathers_) attempt([&] { gather.operation->wait(); });
  if (failure) std::rethrow_exception(failure);
  frozen_packed_ = true;
  seconds_[ckdist_step_reduce_gradients] += double(now_ns() - start) * 1e-9;
  double loss = 0;
  for (int64_t t = 0; t < batch.tokens; ++t) loss += losses[t] * weight(t);
  if (those.token_losses) std::fill_n(those.token_losses, those.tokens, 0.f);
  if (those.best_tokens) std::fill_n(those.best_tokens, those.tokens, -1);
  for (int64_t t = 0; t < batch.tokens; ++t) {
    if (those.token_losses) those.token_losses[batch.given[t]] = float(losses[t]);
    if (those.best_tokens) those.best_tokens[batch.given[t]] = batch.best[t];
  }
  return loss;
}

std::array<double, ckdist_step_kinds + 1> Training::times() const {
  std::array<double, ckdist_step_kinds + 1> times;
  std::copy(seconds_.begin(), seconds_.end(), times.begin());
  times.back() = pack_seconds_;
  return times;
}

void Training::replay(int thread) {
  if (!frozen_packed_)
    for (const int32_t index : frozen_) ckdist::make_packs(*this, thread, 0, {{index}, {packed_[index]}, 1});
  if (pass_.clear) clear(thread);
  walk(thread, int(list_->steps.size()), true);
}

void Training::clear(int thread) {
  const ckdist_step_list& list = plan->lists[pass_.list];
  parallel_for(thread, 0, list.cleared_count, [&](int64_t item) {
    const ckdist_parameter& of = shape(list.cleared[item]);
    std::fill_n(gradient(list.cleared[item]), of.rows * of.cols, 0.f);
  });
}

void Training::begin_reduce(const ckdist_reduce_gradients_step& step) {
  const bool scatters = data_ && program.share_ends;
  if (!pass_.reduce && !scatters) return;
  float* const g = program.gradient_arena + step.begin;
  const int64_t n = step.end - step.begin;
  if (step.tensor) sum_over_tensor(g, n);
  if (scatters) {
    // At most two sums are under way, so that the gradients of few parameters are in memory.
    if (operations_.size() > 1) operations_[operations_.size() - 2]->wait();
    operations_.push_back(data_->begin([this, &step](Collectives& c) { scatter(c, step); }));
  } else if (data_) {
    operations_.push_back(data_->begin([g, n](Collectives& c) { c.all_reduce(g, g, n, Element::f32, ReduceOp::sum); }));
  }
}

Training::Share Training::share_of(int rank, int64_t begin, int64_t end) const {
  const int64_t first = rank ? program.share_ends[rank - 1] : 0;
  return {std::clamp(first, begin, end), std::clamp(program.share_ends[rank], begin, end)};
}

std::vector<int64_t> Training::sizes_of_shares(int64_t begin, int64_t end, int64_t factor) const {
  std::vector<int64_t> sizes;
  for (int rank = 0; rank < data_->size; ++rank) sizes.push_back(factor * share_of(rank, begin, end).size());
  return sizes;
}

// Adds the sums of this rank's floats of [begin, end) to its share. In pieces, because a collective has a buffer of the
// size of its result.
void Training::scatter(Collectives& c, const ckdist_reduce_gradients_step& step) const {
  const int64_t first = share_of(data_->rank, 0, program.trained_floats).begin;
  for (int64_t at = step.begin; at < step.end; at += kScattered) {
    const int64_t until = std::min(step.end, at + kScattered);
    float* const g = program.gradient_arena + at;
    c.reduce_scatter(g, g, sizes_of_shares(at, until, 1).data(), Element::f32, ReduceOp::sum);
    const Share own = share_of(data_->rank, at, until);
    if (own.size()) kernels.elementwise.add(g, own.size(), program.gradient_share + (own.begin - first));
  }
  if (!step.kept) free_pages(program.gradient_arena + step.begin, program.gradient_arena + step.end);
}

void Training::place_parameters(const ckdist_place_parameters_step& s) {
  for (int32_t i = 0; i < s.freed_count; ++i) {
    const int64_t begin = s.freed[2 * i], end = s.freed[2 * i + 1];
    const Share own = share_of(data_->rank, begin, end);
    free_pages(trained_at(begin), trained_at(own.begin));
    free_pages(trained_at(own.end), trained_at(end));
  }
  for (int32_t i = 0; i < s.gathered_count; ++i) {
    const int64_t begin = s.gathered[2 * i], end = s.gathered[2 * i + 1];
    gathers_.push_back({begin, end, data_->begin([this, begin, end](Collectives& c) {
                          const std::vector<int64_t> bytes = sizes_of_shares(begin, end, trained_at(1) - trained_at(0));
                          c.all_gather(trained_at(share_of(data_->rank, begin, end).begin), trained_at(begin),
                                       bytes.data());
                        })});
  }
  if (s.awaited) gathers_[size_t(s.awaited - 1)].operation->wait();
  for (; gathered_ < size_t(s.awaited); ++gathered_) widen_vectors(gathers_[gathered_].begin, gathers_[gathered_].end);
}

void Training::sum_over_tensor(float* x, int64_t n) const {
  if (tensor_) tensor_->run([x, n](Collectives& c) { c.all_reduce(x, x, n, Element::f32, ReduceOp::sum); });
}

void Training::gather(Communicator& ranks, const void* own, int64_t n, void* all) {
  const std::vector<int64_t> bytes(ranks.size, n);
  ranks.run([&](Collectives& c) { c.all_gather(own, all, bytes.data()); });
}

void Training::scatter_sequence(const float* all, int64_t n, float* own) const {
  const std::vector<int64_t> counts(sequence_->size, n);
  sequence_->run([&](Collectives& c) { c.reduce_scatter(all, own, counts.data(), Element::f32, ReduceOp::sum); });
}

void Training::make_place() {
  if (sent_[turn_]) sent_[turn_]->wait();
  sent_[turn_] = nullptr;
}

void Training::send(int stage, int tag, int64_t floats) {
  if (floats > 0) sent_[turn_] = stages_->isend(stage, tag, program.outgoing[turn_], 4 * floats);
  turn_ = (turn_ + 1) % sent_.size();
}

void Training::receive(int stage, int tag, float* rows, int64_t floats) {
  if (floats > 0) stages_->irecv(stage, tag, rows, 4 * floats)->wait();
}

void Training::push() {
  for (auto& operation : sent_)
    if (operation && operation->test()) operation = nullptr;
}

void Training::flush() {
  for (auto& operation : sent_) {
    if (operation) operation->wait();
    operation = nullptr;
  }
}

const float* Training::parameter_rows(int index, int64_t begin, int64_t n, float* buffer) const {
  const ckdist_parameter& w = shape(index);
  const Weight* const packed = packed_parameter(index);
  if (is_narrow(index)) {
    kernels.pack.bf16.widen(trained_at(w.offset + begin * w.cols), n * w.cols, buffer);
    return buffer;
  }
  if (!packed) return parameter(index) + begin * w.cols;
  const Matrix& m = packed->matrix;
  const int64_t each = w.rows / w.matrices, tiles = tiles_of(each);  // of one matrix
  for (int64_t row = begin; row < begin + n; ++row) {
    const int64_t tile = row / each * tiles + row % each / kTileRows;
    kernels.linear[int(m.type)].unpack_row(m.tiles + tile * m.tile_bytes, int(row % each % kTileRows), w.cols,
                                           buffer + (row - begin) * w.cols);
  }
  return buffer;
}

void Training::pack_columns(const Operand& x, int64_t rows, int64_t columns, uint8_t* tiles, int64_t tile_bytes) const {
  for (int64_t at = 0; at < columns; at += 2 * kTileRows)
    packing.operand_columns(x.at + at * element_bytes(), x.stride, int(std::min<int64_t>(2 * kTileRows, columns - at)),
                            rows, tiles + at / kTileRows * tile_bytes, tile_bytes);
}

void Training::store(int index, int64_t token, int64_t column, const float* x, int64_t n) const {
  const ckdist_value& v = value(index);
  const int64_t end = column + n == v.width ? v.room : column + n;
  uint8_t* const row = operand(index, token).at;
  if (narrow(index)) return packing.convert(x, n, end - column, row + column * element_bytes());
  float* const to = reinterpret_cast<float*>(row) + column;
  if (x != to) std::copy_n(x, n, to);
  if (is_operand(index)) std::fill(to + n, to + (end - column), 0.f);
}

void Training::pad(int index, int64_t token) const {
  const ckdist_value& v = value(index);
  if (is_operand(index))
    std::fill_n(operand(index, token).at + v.width * bytes_of(index), (v.room - v.width) * bytes_of(index), uint8_t{0});
}

}  // namespace ckdist
