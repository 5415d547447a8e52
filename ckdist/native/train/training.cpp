#include "train/training.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/futex.h"

namespace ckdist {

Training::Training(const ckdist_training_program& program, Communicator* communicator, int threads,
                   std::vector<int> cpus, int spins)
    : program_(program),
      steps_(program.steps, program.steps + program.step_count),
      loss_steps_(program.loss_steps, program.loss_steps + program.loss_step_count),
      values_(program.values, program.values + program.value_count),
      parameters_(program.parameters, program.parameters + program.parameter_count),
      packs_(program.packs, program.packs + program.pack_count),
      communicator_(communicator),
      kernels_(kernels()),
      narrow_(program.bf16),
      packing_(narrow_ ? kernels_.pack.bf16 : kernels_.pack.f32),
      product_(narrow_ ? kernels_.product.bf16 : kernels_.product.f32),
      type_(product_.tiles),
      scratch_product_(type_ == Type::bf16 ? kernels_.product.bf16 : kernels_.product.f32),
      losses_(program.max_tokens),
      pool_(threads, std::move(cpus), spins) {
  for (const ckdist_training_pack& p : packs_) {
    int64_t rows = parameters_[p.parameter[0]].rows, cols = parameters_[p.parameter[0]].cols;
    if (p.turned) {
      rows = cols, cols = 0;
      for (int m = 0; m < p.count; ++m) cols += (parameters_[p.parameter[m]].rows + 15) / 16 * 16;
    }
    if (std::all_of(p.parameter, p.parameter + p.count,
                    [&](int32_t w) { return parameters_[w].offset >= program.trained_floats; }))
      frozen_.push_back(int32_t(packed_.size())), frozen_bytes_ += bytes_of(matrix(rows, cols, nullptr));
    packed_.push_back(matrix(rows, cols, nullptr));
  }
  std::stable_sort(frozen_.begin(), frozen_.end(),
                   [&](int32_t a, int32_t b) { return packs_[a].parameter[0] < packs_[b].parameter[0]; });
  for (const std::vector<Step>* list : {&steps_, &loss_steps_})
    for (const Step& step : *list) workspace_bytes_ = std::max(workspace_bytes_, workspace(step));
  Carver attend{nullptr}, attend_grad{nullptr};
  attend_space(attend, program.max_tokens), attend_grad_space(attend_grad, program.max_tokens);
  for (const ckdist_training_value& v : values_)
    row_floats_ =
        std::max(row_floats_, (v.width + 15) / 16 * 16 + 80);  // not 4096 bytes apart: loads would wait for stores
  const int64_t rows = kRowBuffers * row_floats_ * 4, sums = kTokens * (kMaxTiles + 1) * kTileRows * 4;
  const int64_t outer = kOuterRows / kTileRows * tile_bytes(kOuterColumns);
  own_bytes_ = (std::max({attend.used, attend_grad.used, rows, sums, outer}) + 4095) / 4096 * 4096 + 64;
  std::vector<bool> added(parameters_.size(), false);
  for (const Step& step : steps_)
    for (int m = 0; m < 4; ++m) {
      const int p = step.gradient[m];
      if (p < 0 || added[p]) continue;
      added[p] = true;
      const bool product = step.op == ckdist_train_linear_weight_grad || step.op == ckdist_train_cross_entropy;
      if (!product) cleared_.push_back(p);
    }
  arena_.emplace(program.arena_bytes, "activations");
  frozen_arena_.emplace(std::max<int64_t>(frozen_bytes_, 64), "packed weights");
  workspace_.emplace(std::max<int64_t>(workspace_bytes_, 64), "the steps' workspace");
  own_arena_.emplace(own_bytes_ * threads, "the threads' buffers");
  Carver packed{frozen_arena_->data()};
  for (const int32_t index : frozen_) packed_[index].tiles = packed.bytes(bytes_of(packed_[index]));
}

void Training::check(const ckdist_training_batch& b) const {
  const auto text = [](int64_t n) { return static_cast<long long>(n); };
  if (b.tokens < 1 || b.tokens > program_.max_tokens)
    fail(Status::config, "a batch of %lld tokens does not fit an executable for %lld; pass 1 to %lld", text(b.tokens),
         text(program_.max_tokens), text(program_.max_tokens));
  for (int64_t t = 0; t < b.tokens; ++t) {
    if (b.token_ids[t] < 0 || b.token_ids[t] >= program_.vocab)
      fail(Status::config, "token %lld has id %d; the vocabulary has ids 0 to %lld", text(t), b.token_ids[t],
           text(program_.vocab - 1));
    if (b.targets[t] < -1 || b.targets[t] >= program_.vocab)
      fail(Status::config, "token %lld has target %d; the vocabulary has ids 0 to %lld, and -1 is no target", text(t),
           b.targets[t], text(program_.vocab - 1));
  }
  if (b.sequences < 1 || b.starts[0] != 0 || b.starts[b.sequences] != b.tokens)
    fail(Status::config, "the starts of %lld sequences must go from 0 to %lld, the number of tokens", text(b.sequences),
         text(b.tokens));
  for (int64_t s = 0; s < b.sequences; ++s)
    if (b.starts[s + 1] < b.starts[s])
      fail(Status::config, "sequence %lld starts at %d and ends before it, at %d", text(s), b.starts[s],
           b.starts[s + 1]);
}

// Sequences without a target, as they fill up batches, are left out: they add nothing to the loss. One token stays at
// least.
void Training::take(const ckdist_training_batch& b) {
  batch_.token_ids.clear(), batch_.targets.clear(), batch_.positions.clear(), batch_.learned.clear();
  batch_.starts.assign(1, 0);
  const auto append = [&](int64_t begin, int64_t end) {
    batch_.token_ids.insert(batch_.token_ids.end(), b.token_ids + begin, b.token_ids + end);
    batch_.targets.insert(batch_.targets.end(), b.targets + begin, b.targets + end);
    for (int64_t t = begin; t < end; ++t) batch_.positions.push_back(int32_t(t - begin));
    batch_.starts.push_back(int32_t(batch_.token_ids.size()));
  };
  for (int64_t s = 0; s < b.sequences; ++s)
    if (std::any_of(b.targets + b.starts[s], b.targets + b.starts[s + 1], [](int32_t target) { return target >= 0; }))
      append(b.starts[s], b.starts[s + 1]);
  if (batch_.token_ids.empty()) append(0, 1);
  batch_.tokens = int64_t(batch_.token_ids.size());
  for (int64_t t = 0; t < batch_.tokens; ++t)
    if (batch_.targets[t] >= 0) batch_.learned.push_back(int32_t(t));
  if (int64_t(batch_.learned.size()) > batch_.tokens - batch_.tokens / kLeastSaved || batch_.learned.empty()) {
    batch_.learned.resize(batch_.tokens);
    std::iota(batch_.learned.begin(), batch_.learned.end(), 0);
  }
  std::fill_n(losses_.begin(), batch_.tokens, 0.0);
}

double Training::run(const ckdist_training_batch& batch, bool backward, bool clear, bool reduce) {
  check(batch);
  take(batch);
  backward_ = backward, clear_ = backward && clear, reduce_ = reduce && communicator_ && communicator_->size > 1;
  times_.fill(0);
  operations_.clear();
  pool_.run(pool_.size(), [this](int thread) { replay(thread); });
  const int64_t start = now_ns();
  for (const auto& operation : operations_) operation->wait();
  frozen_packed_ = true;
  times_[ckdist_train_reduce] += double(now_ns() - start) * 1e-9;
  double loss = 0;
  for (int64_t t = 0; t < batch_.tokens; ++t) loss += losses_[t];
  return loss;
}

void Training::replay(int thread) {
  int64_t start = now_ns();
  const auto lap = [&](int op) {
    if (thread != 0) return;
    const int64_t now = now_ns();
    times_[op] += double(now - start) * 1e-9, start = now;
  };
  if (!frozen_packed_) pack_frozen(thread);
  lap(18);
  if (clear_) clear();
  for (const Step& step : backward_ ? steps_ : loss_steps_) {
    execute(thread, step);
    lap(step.op);
  }
}

void Training::execute(int thread, const Step& step) {
  switch (step.op) {
    case ckdist_train_rms_norm_grad: return rms_norm_grad(thread, step);
    case ckdist_train_linear: return linear(thread, step);
    case ckdist_train_linear_grad: return linear_grad(thread, step);
    case ckdist_train_linear_weight_grad: return linear_weight_grad(thread, step);
    case ckdist_train_bias_grad: return bias_grad(thread, step);
    case ckdist_train_attend: return attend(thread, step, false);
    case ckdist_train_attend_grad: return attend(thread, step, true);
    case ckdist_train_cross_entropy: return cross_entropy(thread, step);
    case ckdist_train_embed_grad: return embed_grad(step);
    case ckdist_train_reduce:
      if (thread == 0)
        begin_reduce(step);  // what it reads was finished at the last barrier, and no step that follows writes it
      return;
    default: share_tokens([&](int64_t t) { rows_of(thread, step, t); });
  }
}

void Training::clear() {
  share(int64_t(cleared_.size()), [&](int64_t item) {
    const ckdist_training_parameter& p = parameters_[cleared_[item]];
    std::fill_n(gradient(cleared_[item]), p.rows * p.cols, 0.f);
  });
}

void Training::begin_reduce(const Step& step) {
  if (!reduce_) return;
  float* const g = program_.gradient_arena + step.i[0];
  const int64_t n = step.i[1] - step.i[0];
  operations_.push_back(
      communicator_->begin([g, n](Collectives& c) { c.all_reduce(g, g, n, Element::f32, ReduceOp::sum); }));
}

void Training::store(int index, int64_t token, int64_t column, const float* x, int64_t n) const {
  const ckdist_training_value& v = values_[index];
  const int64_t end = column + n == v.width ? v.room : column + n;
  uint8_t* const row = operand(index, token).at;
  if (narrow(index)) return packing_.convert(x, n, end - column, row + column * element_bytes());
  float* const to = reinterpret_cast<float*>(row) + column;
  if (x != to) std::copy_n(x, n, to);
  if (v.operand) std::fill(to + n, to + (end - column), 0.f);
}

// Zeros behind the width of an operand.
void Training::pad(int index, int64_t token) const {
  const ckdist_training_value& v = values_[index];
  if (v.operand)
    std::fill_n(operand(index, token).at + v.width * bytes_of(index), (v.room - v.width) * bytes_of(index), uint8_t{0});
}

// Steps whose rows are computed one by one.
void Training::rows_of(int thread, const Step& step, int64_t t) {
  const ElementwiseKernel& k = kernels_.elementwise;
  const int64_t n = width(step.out[0]);
  const auto in = [&](int i) { return read(step.in[i], t, row_buffer(thread, i)); };  // three at most
  float* const out = write(step.out[0], t, row_buffer(thread, 3));
  switch (step.op) {
    case ckdist_train_embed: std::copy_n(parameter(step.parameter[0]) + batch_.token_ids[t] * n, n, out); break;
    case ckdist_train_scale:
      kernels_.row.scale(row(step.in[0], t), step.f[0], n, row(step.out[0], t));
      return pad(step.out[0], t);
    case ckdist_train_operand: return store(step.out[0], t, 0, in(0), n);
    case ckdist_train_add: {
      const float* const second = in(1);
      k.sum_parts(in(0), &second, 1, n, out);
      break;
    }
    case ckdist_train_rms_norm: {
      const float* const x = in(0);
      for (int64_t at = 0; at < n; at += step.i[0])
        k.rms_norm(x + at, parameter(step.parameter[0]), step.f[0], step.i[0], out + at);
      break;
    }
    case ckdist_train_rope: {
      const ckdist_rope& rope = program_.ropes[step.i[0]];
      const int64_t at = batch_.positions[t] * (rope.dims / 2);
      kernels_.row.rope(row(step.in[0], t), {rope.cos + at, rope.sin + at, rope.dims, rope.interleaved != 0}, step.i[1],
                        program_.head_dim, n, row(step.out[0], t));
      return pad(step.out[0], t);
    }
    case ckdist_train_gated:
      kernels_.row.gated(GateFunction(step.i[0]), row(step.in[0], t), row(step.in[1], t), n, row(step.out[0], t));
      return pad(step.out[0], t);
    case ckdist_train_gated_grad:
      kernels_.row.gated_grad(GateFunction(step.i[0]), row(step.in[0], t), row(step.in[1], t), row(step.in[2], t), n,
                              row(step.out[0], t), row(step.out[1], t));
      return pad(step.out[0], t), pad(step.out[1], t);
    default: fail(Status::native, "a training step has unknown op %d", step.op);
  }
  written(step.out[0], t, out);
}

void Training::rms_norm_grad(int thread, const Step& step) {
  const int64_t n = step.i[0], row = width(step.in[0]);
  float* const partial = reinterpret_cast<float*>(workspace_->data());  // (chunks, n)
  share((batch_.tokens + kSumRows - 1) / kSumRows, [&](int64_t chunk) {
    float* const dw = step.gradient[0] < 0 ? nullptr : partial + chunk * n;
    if (dw) std::fill(dw, dw + n, 0.f);
    const int64_t end = std::min<int64_t>((chunk + 1) * kSumRows, batch_.tokens);
    for (int64_t t = chunk * kSumRows; t < end; ++t) {
      const float *const x = read(step.in[0], t, row_buffer(thread, 0)), *const dy =
                                                                             read(step.in[1], t, row_buffer(thread, 1));
      float* const dx = write(step.out[0], t, row_buffer(thread, 2));
      for (int64_t at = 0; at < row; at += n)
        kernels_.gradient.rms_norm(x + at, dy + at, parameter(step.parameter[0]), step.f[0], n, dx + at, dw);
      if (step.in[2] >= 0) kernels_.elementwise.add(read(step.in[2], t, row_buffer(thread, 3)), row, dx);
      written(step.out[0], t, dx);
    }
  });
  if (step.gradient[0] >= 0) column_sums(n, partial, gradient(step.gradient[0]));
}

// Adds the chunks' partial sums, (chunks, n), to a gradient, in order.
void Training::column_sums(int64_t n, float* partial, float* gradient) {
  share((n + kColumns - 1) / kColumns, [&](int64_t item) {
    const int64_t at = item * kColumns, columns = std::min<int64_t>(kColumns, n - at),
                  chunks = (batch_.tokens + kSumRows - 1) / kSumRows;
    for (int64_t chunk = 1; chunk < chunks; ++chunk)
      kernels_.elementwise.add(partial + chunk * n + at, columns, partial + at);
    kernels_.elementwise.add(partial + at, columns, gradient + at);
  });
}

void Training::bias_grad(int thread, const Step& step) {
  float* const partial = reinterpret_cast<float*>(workspace_->data());
  for (int m = 0; m < 4 && step.in[m] >= 0; ++m) {
    const int64_t n = width(step.in[m]);
    share((batch_.tokens + kSumRows - 1) / kSumRows, [&](int64_t chunk) {
      std::fill(partial + chunk * n, partial + (chunk + 1) * n, 0.f);
      const int64_t end = std::min<int64_t>((chunk + 1) * kSumRows, batch_.tokens);
      for (int64_t t = chunk * kSumRows; t < end; ++t)
        kernels_.elementwise.add(read(step.in[m], t, row_buffer(thread, 0)), n, partial + chunk * n);
    });
    column_sums(n, partial, gradient(step.gradient[m]));
  }
}

// Tokens in order, for a few columns each: rows of one id meet in one item.
void Training::embed_grad(const Step& step) {
  const int64_t n = width(step.in[0]);
  float* const table = gradient(step.gradient[0]);
  share((n + kColumns - 1) / kColumns, [&](int64_t item) {
    const int64_t at = item * kColumns, columns = std::min<int64_t>(kColumns, n - at);
    for (int64_t t = 0; t < batch_.tokens; ++t)
      kernels_.elementwise.add(floats(step.in[0], t) + at, columns, table + batch_.token_ids[t] * n + at);
  });
}

}  // namespace ckdist
