#include "runtime/executable.h"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

#include "core/error.h"
#include "movers/stream_mover.h"

namespace ckdist {

namespace {
int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
}  // namespace

Executable::Executable(const ckdist_program& program, Communicator& communicator, Reorganizer* reorganizer, int threads,
                       std::vector<int> cpus, int spins)
    : program_(program),
      phases_(program.phases, program.phases + program.phase_count),
      communicator_(communicator),
      kernels_(kernels()),
      reorganizer_(reorganizer && !reorganizer->finished() ? reorganizer : nullptr),
      workers_(threads),
      pool_(threads, std::move(cpus), spins) {
  if (phases_.empty() || phases_.size() > kMaxPhases)
    fail(Status::native, "%d phases; one to %d are possible", program.phase_count, kMaxPhases);
  for (size_t p = 0; p < phases_.size(); p++) {
    const ckdist_phase& phase = phases_[p];
    most_steps_ = std::max(most_steps_, phase.step_count);
    next_linear_[p].resize(phase.step_count);
    for (int i = phase.step_count - 1, next = -1; i >= 0; i--) {
      next_linear_[p][i] = next;
      if (phase.steps[i].op == ckdist_step_linear) next = i;
    }
    token_steps_[p] = 0;
    while (token_steps_[p] < phase.step_count && !phase.steps[token_steps_[p]].outputs_only) token_steps_[p]++;
  }
  counters_.reset(new std::atomic<int64_t>[threads * most_steps_]);
  arena_.emplace(program.arena_bytes, "activations");
  int max_kv_heads = 0;
  for (int i = 0; i < program.layers; i++) {
    const ckdist_layer_attention& a = program.attention[i];
    Layer layer{{KvType(a.cache.key_type), KvType(a.cache.value_type), a.cache.key_width, a.cache.value_width},
                a.kv_heads,
                a.heads_per_kv,
                {},
                0,
                0,
                nullptr};
    for (int h = 0, head = 0; h < a.kv_heads; head += a.heads_per_kv[h++]) layer.first_head.push_back(head);
    layer.head_bytes = kernels_.attention.block_bytes(layer.cache);
    layer.block_bytes = layer.head_bytes * a.kv_heads;
    kv_bytes_ += layer.block_bytes * program.blocks;
    max_kv_heads = std::max(max_kv_heads, int(a.kv_heads));
    layers_.push_back(layer);
  }
  kv_arena_.emplace(kv_bytes_, "the KV cache");
  int64_t attention_scratch = 64;
  part_bytes_ = 64;
  uint8_t* blocks = kv_arena_->data();
  for (Layer& layer : layers_) {
    layer.blocks = blocks;
    blocks += layer.block_bytes * program.blocks;
    int group = 1;
    for (int h = 0; h < layer.kv_heads; h++) group = std::max(group, int(layer.heads_per_kv[h]));
    attention_scratch = std::max(attention_scratch, kernels_.attention.scratch_bytes(layer.cache, kQueryTile, group));
    part_bytes_ = std::max(part_bytes_, round_up(kernels_.attention.part_bytes(layer.cache, 1, group), 64));
  }

  int64_t row_floats = 1, activation_bytes[3] = {64, 64, 64};
  bool adds = false;
  for (const ckdist_phase& phase : phases_) {
    for (const ckdist_value* v = phase.values; v != phase.values + phase.value_count; v++)
      if (v->kind == ckdist_in_activations)
        activation_bytes[v->format] = std::max(activation_bytes[v->format], activation_stride(*v));
      else row_floats = std::max(row_floats, v->width);
    adds |= phase.tokens_cut;
  }
  const int64_t scratch = round_up(attention_scratch, 64);
  const int64_t row = round_up(row_floats * 4, 64);
  const int64_t product = adds ? kAddedTokens * kAddedTiles * kTileRows * 4 : 0;
  int64_t slice = 0;
  for (size_t p = 0; p < phases_.size(); p++) {
    const void* const* const matrices = phases_[p].matrices;
    phase_bytes_[p] = 0;
    for (int m = 0; m < phases_[p].matrix_count; m++) {
      const Weight& weight = *static_cast<const Weight*>(matrices[m]);
      phase_bytes_[p] += weight.matrix.tile_count() * weight.matrix.tile_bytes;
      if (reorganizer_ && weight.sliced) slice = std::max(slice, round_up(weight.sliced->largest_bytes(), 4096));
    }
  }
  constexpr int64_t sums = kLowTokens * kLowTiles * kTileRows * 4;
  int64_t each = slice + scratch + row + product + sums;
  for (int64_t bytes : activation_bytes) each += kReplicatedRows * bytes;
  each = round_up(each, 4096);
  scratch_arena_.emplace(each * threads, "the threads' buffers");
  uint8_t* at = scratch_arena_->data();
  for (int t = 0; t < threads; t++, at += each) {
    Worker& w = workers_[t];
    uint8_t* p = at;
    w.tiles = p, p += slice;
    if (slice) w.mover = std::make_unique<StreamMover>();
    w.scratch = p, p += scratch;
    w.row = reinterpret_cast<float*>(p), p += row;
    w.product = reinterpret_cast<float*>(p), p += product;
    w.sums = reinterpret_cast<float*>(p), p += sums;
    for (int f = 0; f < 3; f++) w.activations[f] = p, p += kReplicatedRows * activation_bytes[f];
  }
  // Parts of contexts that threads share: enough for the whole cache, which is less than a hundredth of it.
  part_count_ = threads > 1 ? max_kv_heads * (program.blocks * kBlockTokens / kSpan + 2 * program.max_sequences) : 0;
  part_arena_.emplace(std::max<int64_t>(part_count_ * part_bytes_, 64), "parts of attention");
  merged_.reset(new std::atomic<int64_t>[std::max<int64_t>(program.max_sequences * max_kv_heads, 1)]());
  StepSizes sizes{};
  sizes.partial_floats = program.exchange_floats;
  sizes.logit_rows = program.max_outputs, sizes.vocab = program.vocab;
  for (const ckdist_value* v = phases_[0].values; v != phases_[0].values + phases_[0].value_count;
       v++)  // the same in every phase
    if (v->kind == ckdist_in_logits) sizes.first_column = v->place, sizes.columns = v->width;
  sizes.batch_ints = BatchView::kHeader + program.max_tokens + 3 * program.max_sequences +
                     program.max_sequences * (program.context_length / kBlockTokens + 1) + program.max_outputs;
  ranks_ = communicator_.steps(sizes);
  for (int slot = 0; slot < kSlots; slot++) {
    peers_[slot].resize(kMaxRanks);
    ranks_->peers(slot, peers_[slot].data());
  }
}

float* Executable::floats(int value, int64_t* stride) {
  const ckdist_value& v = this->value(value);
  *stride = v.width;
  if (v.kind == ckdist_in_slot) return ranks_->partial(int(v.place)) + v.lead;
  if (v.kind == ckdist_in_sums)
    return ranks_->host_partial(int(v.place), (v.taken ? batch_.outputs : batch_.tokens) * v.width) +
           (v.taken ? own_output_ : own_) * v.width;
  if (v.kind == ckdist_in_logits) return ranks_->logits(stride);
  return reinterpret_cast<float*>(arena_->data() + v.place);
}

void Executable::meet(int thread, int index) {
  meet(thread, index, false, [](Idle) {});
}

// The end of every batch: nobody sees what was computed from a file that had changed by then.
void Executable::gather(int64_t rows, int step) {
  if (reorganizing_) reorganizer_->check();
  ranks_->gather_logits(rows, step);
}

// Where a file has changed, that is why, whichever rank noticed first: then this throws.
void Executable::give_up(const char* reason) {
  communicator_.abandon(reason);
  if (reorganizer_ && !reorganizer_->finished()) reorganizer_->check();
}

// What other ranks are to read is met for over all of them, anything else among this rank's threads.
void Executable::finish(int thread, int index, int64_t rows) {
  const ckdist_step& step = phase_->steps[index];
  const ckdist_value& out = value(step.out[step.op == ckdist_step_attend ? 3 : 0]);
  if (out.kind == ckdist_in_logits) meet(thread, index, true, [&](Idle) { gather(rows, index); });
  else if (out.kind == ckdist_in_sums)
    meet(thread, index, true, [&](Idle idle) {
      ranks_->all_reduce_hosts(int(out.place), (out.taken ? batch_.outputs : batch_.tokens) * out.width, index, idle);
    });
  else if (out.kind != ckdist_in_slot) meet(thread, index);
  else if (phase_->tokens_cut) meet(thread, index, true, [&](Idle idle) { ranks_->all_gather(index, idle); });
  else meet(thread, index, true, [&](Idle idle) { ranks_->all_reduce(int(out.place), rows * out.width, index, idle); });
}

void Executable::run(const int32_t* message, int64_t ints) {
  const BatchView batch =
      BatchView::parse(message, ints, program_.max_tokens, program_.max_sequences, program_.max_outputs,
                       program_.context_length, program_.blocks, program_.vocab);
  if (batch.phase < 0 || batch.phase >= int(phases_.size()) || batch.steps < 0 ||
      batch.steps > phases_[batch.phase].step_count)
    fail(Status::native, "a batch asks for %d steps of phase %d of %zu", batch.steps, batch.phase, phases_.size());
  if (ranks_->size > 1 && ranks_->rank == 0) {
    TraceLane* const lane = workers_[0].lane;
    const int64_t begin = lane ? now_ns() : 0;
    ranks_->publish(message, ints);
    if (lane) lane->add(ckdist_trace_publish, begin, now_ns(), int32_t(batch.tokens), int32_t(batch.runs), batch.phase);
  }
  batch_ = batch;
  phase_ = &phases_[batch.phase];
  own_ = phase_->tokens_cut ? share(ranks_->local_rank) : 0;
  own_tokens_ = phase_->tokens_cut ? share(ranks_->local_rank + 1) - own_ : batch_.tokens;
  const int32_t* const outputs = batch.output_tokens;
  own_output_ = std::lower_bound(outputs, outputs + batch.outputs, own_) - outputs;
  own_outputs_ = std::lower_bound(outputs, outputs + batch.outputs, own_ + own_tokens_) - outputs - own_output_;
  active_ = std::min(std::max(batch.threads, 1), pool_.size());
  for (Worker& worker : workers_) worker.ahead.step = -1;
  const int owners = batch.tokens > batch.runs || batch.tokens >= kOwnRows ? active_ : 1;
  for (int o = 0; o < owners; o++)
    for (int i = 0; i < phase_->step_count; i++) counters_[o * most_steps_ + i].store(0, std::memory_order_relaxed);
  const int64_t start = now_ns();
  reorganizing_ = reorganizer_ && !reorganizer_->finished();
  if (reorganizing_) {
    const bool prompts =
        batch.tokens > batch.runs || std::any_of(batch.run, batch.run + batch.runs,
                                                 [](const BatchView::Run& run) { return run.first_position == 0; });
    reorganizer_->begin_step(phase_bytes_[batch.phase] / (prompts ? 1 : kKeptShare));
  }
  try {
    pool_.run(active_, [this](int thread) { replay(thread); });
    if (reorganizing_) reorganizer_->end_step();
  } catch (const std::exception& e) {
    give_up(e.what());
    throw;
  }
  times_.total += double(now_ns() - start) * 1e-9;
  times_.runs++;
  for (Worker& w : workers_) times_.moved += std::exchange(w.moved, 0);
}

void Executable::work() {
  try {
    for (;;) {
      int64_t ints = 0;
      const int32_t* message = ranks_->receive(&ints);
      if (ints == 0) return;
      run(message, ints);
    }
  } catch (const std::exception& e) {
    give_up(e.what());
    throw;
  }
}

void Executable::stop() {
  if (ranks_->size > 1) ranks_->publish(nullptr, 0);
}

void Executable::trace(Trace& trace) {
  for (size_t t = 0; t < workers_.size(); t++) workers_[t].lane = trace.lane("thread " + std::to_string(t));
}

ckdist_times Executable::times(bool reset) {
  const ckdist_times t = times_;
  if (reset) times_ = {};
  return t;
}

void Executable::replay(int thread) {
  const int steps = batch_.steps > 0     ? batch_.steps
                    : batch_.outputs > 0 ? phase_->step_count
                                         : token_steps_[batch_.phase];
  TraceLane* const lane = workers_[thread].lane;
  const int64_t begin = lane ? now_ns() : 0;
  int64_t at = begin;
  for (int i = 0; i < steps; i++) {
    execute(thread, i);
    if (lane) {
      const int64_t end = now_ns();
      lane->add(ckdist_trace_step, at, end, i, batch_.phase);
      at = end;
    }
  }
  if (steps < phase_->step_count)
    meet(thread, steps - 1, true, [&](Idle) { gather(0, steps); });  // as every batch ends
  if (lane) trace_batch(thread, begin);
}

void Executable::trace_batch(int thread, int64_t begin) {
  TraceLane& lane = *workers_[thread].lane;
  const int64_t end = now_ns();
  const int32_t tokens = int32_t(batch_.tokens), sequences = int32_t(batch_.runs);
  const bool decode = tokens == sequences;
  lane.add(decode ? ckdist_trace_decode : ckdist_trace_prefill, begin, end, tokens, sequences, batch_.phase);
  if (thread != 0) return;
  if (decode && prefilled_ != 0) lane.add(ckdist_trace_transition, prefilled_, begin, tokens, sequences);
  prefilled_ = phase_->tokens_cut ? end : 0;
}

void Executable::execute(int thread, int i) {
  switch (phase_->steps[i].op) {
    case ckdist_step_embed: return embed(thread, i);
    case ckdist_step_prepare: return prepare(thread, i);
    case ckdist_step_linear: return linear(thread, i);
    case ckdist_step_attend: return attend(thread, i);
    case ckdist_step_share: return share_outputs(thread, i);
    case ckdist_step_squares: return squares(thread, i);
    case ckdist_step_low_rank: return low_rank(thread, i);
    default: fail(Status::native, "step %d has unknown op %d", i, phase_->steps[i].op);
  }
}

}  // namespace ckdist
