#include "runtime/inference.h"

#include "runtime/steps/routing.h"

namespace ckdist {

namespace {
int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Counters that a step needs: for a product, one for each group of rows, and one for each tile whose columns may be
// divided; for experts, one for each.
int64_t step_counters(const Inference& r, const ckdist_step& step) {
  int64_t count = 0;
  if (const auto* linear = fields_of<ckdist_linear_step>(&step, ckdist_step_linear)) {
    for (int m = 0; m < linear->count && r.most_threads() > kSixteen; m++)
      count += r.matrix(linear->products[m].weight.first).tile_count();
    return StepCommunicator::kMaxChunks + count;
  }
  if (const auto* experts = fields_of<ckdist_experts_step>(&step, ckdist_step_experts))
    for (int set = 0; set < experts->count; set++) count += experts->sets[set].count;
  return count;
}
}  // namespace

Inference::Inference(const ckdist_program& that, Communicator& job, Communicator& stage, Repacker* repacker,
                     std::shared_ptr<Pool> pool)
    : Executor(that, std::move(pool)),
      communicator(job),
      kernels(ckdist::kernels()),
      states(that),
      stage_(stage),
      outgoing_(size_t(std::max(that.in_flight, 1))),
      repacker_(repacker && !repacker->finished() ? repacker : nullptr),
      buffers_(threads()) {
  make_cache();
  reserve_exchange();
  divide_columns();
  make_lists();
  read_lists();
  make_buffers();
  starts.resize(size_t(program.max_sequences));
  hidden_.resize(size_t(program.max_outputs * program.hidden));
  adapters_.resize(size_t(program.max_tokens * most_adapters()));
  for (size_t i = 0; i < std::size(axes_); i++)
    if (program.ropes[i].axes != nullptr) axes_[i].resize(size_t(program.max_tokens * program.ropes[i].dims));
}

void Inference::make_cache() {
  for (const ckdist_layer* own = program.layers; own != program.layers + program.layer_count; own++) {
    const CacheArrays arrays(*own);
    Layer& layer = layers.emplace_back();
    const std::optional<CacheShape> head = arrays.shape();
    if (!head) continue;
    layer.cache = *head, layer.kv_heads = own->kv_heads, layer.heads_per_kv = own->heads_per_kv;
    for (int h = 0, first = 0; h < own->kv_heads; first += own->heads_per_kv[h++]) {
      layer.first_head.push_back(first);
      layer.max_heads_per_kv = std::max(layer.max_heads_per_kv, int(own->heads_per_kv[h]));
    }
    layer.head_bytes = kernels.attention.block_bytes(layer.cache);
    layer.block_bytes = arrays.block_bytes(), layer.index_offset = arrays.index_offset();
    layer.index = arrays.index().value_or(CacheShape{});
    stored_bytes_ += layer.block_bytes;
  }
  // Blocks come one after the other, each with all layers: a block that is used for the first time touches few new
  // pages. If each layer had its blocks together, all layers would need a new huge page in one step.
  const int64_t stride = block_stride(stored_bytes_), blocks_bytes = round_up(stride * program.blocks, 64);
  kv_bytes_ = blocks_bytes + states.bytes();
  kv_arena_.emplace(kv_bytes_, "the KV cache");
  kv_arena_->promise();
  states.place(kv_arena_->data() + blocks_bytes);
  states.read_kernels(program.plans[0]);
  uint8_t* blocks = kv_arena_->data();
  for (Layer& layer : layers) {
    layer.blocks = blocks, layer.block_stride = stride;
    blocks += layer.block_bytes;
  }
}

void Inference::read_lists() {
  int64_t counters = 0;
  for (int p = 0; p < program.plan_count; p++) {
    plan = &program.plans[p];
    const std::vector<const ckdist_step*>& steps = lists_[p].steps;
    most_steps_ = std::max(most_steps_, int(steps.size()));
    if (p == 0) traffic_.read_plan(*this);
    read_biases(program, *plan, biases);
    PlanFacts& facts = facts_.emplace_back();
    facts.strips = values_in_strips();
    const auto of_tokens = [](const ckdist_step* step) {
      return step->rows == ckdist_rows_tokens || step->rows == ckdist_rows_host;
    };
    facts.token_steps = int(std::find_if_not(steps.begin(), steps.end(), of_tokens) - steps.begin());
    for (const ckdist_step* step : steps) {
      facts.needs_firsts |= step->kind == ckdist_step_attend_cross;
      const auto* const embed = fields_of<ckdist_embed_step>(step, ckdist_step_embed);
      facts.needs_rows |= embed != nullptr && embed->by == ckdist_embed_by_place;
      counters = std::max(counters, step_counters(*this, *step));
    }
  }
  step_counters_.reset(new Counter[counters]);
  most_steps_ = int(round_up(most_steps_, 8));
  counters_.reset(new std::atomic<int64_t>[2 * threads() * most_steps_]);
}

// Activations may be in strips if nothing but products with kernels for strips reads them.
std::vector<bool> Inference::values_in_strips() const {
  std::vector<bool> read(size_t(plan->value_count)), other = read;
  const auto mark = [](std::vector<bool>& marks, const ckdist_span& span, bool value = true) {
    for (int i = 0; value && i < span.count; i++) marks[size_t(span.first + i)] = true;
  };
  for (const ckdist_step* step : lists_[plan - program.plans].steps) {
    const bool host = step->rows == ckdist_rows_host;
    if (const auto* linear = fields_of<ckdist_linear_step>(step, ckdist_step_linear)) {
      for (int m = 0; m < linear->count; m++) {
        const ckdist_product& p = linear->products[m];
        const bool can = !host && kernels.linear[int(matrix(p.weight.first).type)].multiply_prompt;
        mark(can && value(p.x.first).format == ckdist_activation_bf16 ? read : other, p.x);
      }
    } else if (const auto* made = fields_of<ckdist_norm_quantize_step>(step, ckdist_step_norm_quantize)) {
      for (const ckdist_span& activations : made->activations) mark(other, activations, host || made->gather);
    } else if (const auto* adapt = fields_of<ckdist_adapt_step>(step, ckdist_step_adapt)) {
      for (int m = 0; m < adapt->count; m++) mark(other, adapt->products[m].x);
    } else if (const auto* experts = fields_of<ckdist_experts_step>(step, ckdist_step_experts)) {
      for (int i = 0; i < kExpertInputs * experts->count; i++)
        mark(other, {expert_input(*experts, i), 1}, expert_input(*experts, i) >= 0);
    }
  }
  for (size_t i = 0; i < read.size(); i++) read[i] = read[i] && !other[i];
  return read;
}

void Inference::make_buffers() {
  int64_t activation_bytes[3] = {64, 64, 64}, slice = 0, room = 0, widest = 0;
  for (int p = 0; p < program.plan_count; p++) {
    plan = &program.plans[p];
    for (const ckdist_value* v = plan->values; v != plan->values + plan->value_count; v++) {
      if (v->place == ckdist_place_activations)
        activation_bytes[v->format] = std::max(activation_bytes[v->format], v->stride);
      if (v->place == ckdist_place_slot || v->place == ckdist_place_sums) widest = std::max<int64_t>(widest, v->width);
    }
    for (int m = 0; m < plan->matrix_count; m++) {
      if (weight(m).sliced && weight(m).sliced->mapped()) continue;
      facts_[size_t(p)].bytes += matrix(m).tile_count() * matrix(m).tile_bytes;
      if (kernels.linear[int(matrix(m).type)].multiply_prompt) room = kPromptBytes;
      if (repacker_ && weight(m).sliced) slice = std::max(slice, round_up(weight(m).sliced->largest_bytes(), 4096));
    }
  }
  int64_t each = slice + room;
  for (const int64_t bytes : activation_bytes) each += kReplicatedRows * bytes;
  each = round_up(each, 4096);
  const int64_t shared = round_up(kReplicatedRows * widest * 4, 4096);
  buffer_arena_.emplace(each * threads() + 2 * shared, "the threads' activations");
  uint8_t* at = buffer_arena_->data();
  for (float*& rows : shared_rows_) rows = reinterpret_cast<float*>(at), at += shared;
  for (ThreadBuffers& w : buffers_) {
    uint8_t* p = at;
    w.slice = p, p += slice;
    w.room = room ? p : nullptr, p += room;
    for (int f = 0; f < 3; f++) w.activations[f] = p, p += kReplicatedRows * activation_bytes[f];
    at += each;
  }
}

void Inference::reserve_exchange() {
  StepSizes sizes{};
  sizes.partial_floats = program.exchange_floats;
  sizes.vocab = program.vocab;
  // The logits are the same in every plan.
  for (const ckdist_value* v = plan->values; v != plan->values + plan->value_count; v++)
    if (v->place == ckdist_place_logits)
      sizes.first_column = v->offset, sizes.columns = v->width, sizes.logit_rows = program.max_outputs;
  sizes.counters = int64_t{program.layer_count} * program.experts;
  for (int p = 0; p < program.plan_count; p++) {
    const ckdist_execution_plan& those = program.plans[p];
    if (!those.host_rows) continue;
    for (const ckdist_value* v = those.values; v != those.values + those.value_count; v++)
      if (v->place == ckdist_place_activations || v->place == ckdist_place_arena)
        sizes.row_bytes = std::max(sizes.row_bytes, round_up(v->stride, 64));
    if (those.host_rows == ckdist_host_rows_alike) sizes.rows = program.max_tokens;
  }
  ranks = stage_.steps(sizes);
  if (&stage_ != &communicator) job_ = communicator.steps(StepSizes{});
  for (int slot = 0; slot < kSlots; slot++) {
    peers_[slot].resize(kMaxRanks);
    ranks->peers(slot, peers_[slot].data());
  }
  if (sizes.row_bytes > 0)
    host_rows = std::make_unique<RowExchange>(*ranks, program.max_tokens, sizes.row_bytes, sizes.rows > 0, threads());
}

// All ranks of the stage have the same parts of a matrix.
void Inference::divide_columns() {
  int32_t most = threads();
  stage_.run([&](Collectives& c) { c.all_reduce(&most, &most, 1, Element::i32, ReduceOp::max); });
  most_threads_ = most;
  for (int p = 0; p < program.plan_count; p++) {
    plan = &program.plans[p];
    std::vector<int>& parts = parts_.emplace_back();
    for (int m = 0; m < plan->matrix_count; m++)
      parts.push_back(plan->prompts ? 1 : column_parts(matrix(m).tile_count(), matrix(m).cols, most_threads_));
  }
}

int64_t Inference::message_ints() const {
  const int64_t batch = BatchView::kHeader + program.max_tokens + 9 * program.max_sequences +
                        program.max_sequences * (program.context_length / kBlockTokens + 1) + program.max_outputs +
                        3 * program.max_tokens + program.embedding_rows * program.embedding_width;
  const int64_t copy = sizeof(ckdist_copy_blocks) + ckdist_copies_most * sizeof(ckdist_block_copy);
  return std::max(batch, copy / int64_t{sizeof(int32_t)});
}

FloatRows Inference::floats(int index) {
  const ckdist_value& v = value(index);
  FloatRows rows{reinterpret_cast<float*>(arena_->data() + v.offset), v.width};
  if (v.place == ckdist_place_arena) rows.stride = v.stride / int64_t{sizeof(float)};
  if (v.place == ckdist_place_slot) rows.at = ranks->partial(int(v.offset)) + v.lead;
  if (v.place == ckdist_place_sums)
    rows.at = ranks->host_partial(int(v.offset), (v.selected ? batch.selected : batch.tokens) * v.width) +
              (v.selected ? first_selected : first_token) * v.width;
  if (v.place == ckdist_place_logits) rows.at = ranks->logits(&rows.stride);
  if (v.place == ckdist_place_hidden) rows.at = hidden_.data();
  return rows;
}

// Checks the files first: results of a file that has changed must not be published.
void Inference::end_batch(int64_t rows, int step) {
  if (packing) repacker_->check();
  ranks->gather_logits(rows, step);
}

void Inference::give_up(const char* reason) {
  stage_.abandon(reason);
  communicator.abandon(reason);
  if (repacker_ && !repacker_->finished()) repacker_->check();
}

// Publishes the progress of this rank, and continues the sending of rows.
void Inference::count_step(int thread) {
  if (thread != 0) return;
  everyone().count_step();
  test_outgoing();
}

bool Inference::test_outgoing() {
  bool under_way = false;
  for (Channel::Pending& sent : outgoing_)
    if (sent.request) under_way |= !everyone().test(sent);
  return under_way;
}

void Inference::finish_outgoing() {
  for (Channel::Pending& sent : outgoing_)
    if (sent.request) everyone().wait(sent, 0), sent = {0, 0};
}

void Inference::set_slab(int kind, int headers_file, int data_file, int64_t slots) {
  if (kind < 0 || kind >= ckdist_slab_kinds || slabs_[kind])
    fail(Status::native, "slab %d is unknown, or the model has it already", kind);
  slabs_[kind] = std::make_unique<Slab>(headers_file, data_file, slab_bytes(kind), slots);
}

void Inference::check_copy(const ckdist_block_copy& copy) const {
  const int kind = copy.entry.kind;
  if (kind < 0 || kind >= ckdist_slab_kinds || !slabs_[kind])
    fail(Status::native, "a copy of blocks names slab %d, which the model does not have", kind);
  const int64_t places = kind == ckdist_slab_blocks ? program.blocks : program.state_slots;
  if (copy.place < 0 || copy.place >= places || copy.slot < 0 || copy.slot >= slabs_[kind]->slots() ||
      copy.entry.depth < 0 || copy.entry.depth >= program.context_length / kBlockTokens)
    fail(Status::native, "place %d of %lld of a cache and slot %d of %lld of a slab cannot be copied at depth %d",
         copy.place, (long long)places, copy.slot, (long long)slabs_[kind]->slots(), copy.entry.depth);
}

int Inference::copy_block(const ckdist_block_copy& copy, bool into_cache) {
  Slab& slab = *slabs_[copy.entry.kind];
  if (into_cache)
    if (const int error = slab.read(copy.slot, copy.entry)) return error;
  uint8_t* stored = slab.data();
  const auto move = [&](void* cached, int64_t bytes) {
    if (bytes > 0) std::memcpy(into_cache ? cached : stored, into_cache ? stored : cached, size_t(bytes));
    stored += bytes;
  };
  if (copy.entry.kind == ckdist_slab_states)
    for (const StateSlots::Layer& layer : states.layers) move(layer.slot(copy.place), layer.slot_bytes());
  else move(kv_arena_->data() + copy.place * block_stride(stored_bytes_), stored_bytes_);
  return into_cache ? 0 : slab.write(copy.slot, copy.entry);
}

void Inference::finish(int thread, int index, int out, int64_t rows) {
  count_step(thread);
  const ckdist_value& v = value(out);
  if (plan->host_rows && v.sum >= 0) {
    StepTeam team(*this, thread, index);
    host_rows->reduce_scatter(team, {floats(out).at, int(v.offset)}, floats(v.sum).at, v.width, index);
  } else if (v.place == ckdist_place_logits) meet(thread, index, true, [&](Idle) { end_batch(rows, index); });
  else if (v.place == ckdist_place_hidden && index + 1 == int(list_->steps.size()))
    meet(thread, index, true, [&](Idle) { end_batch(0, index); });
  else if (v.place != ckdist_place_slot && v.place != ckdist_place_sums) meet(thread, index);
  else if (v.place == ckdist_place_slot && plan->tokens_sharded)
    meet(thread, index, true, [&](Idle idle) { ranks->all_gather(index, idle); });
  else if (ranks->host_count() == 1)
    meet(thread, index, true, [&](Idle idle) { ranks->all_reduce(int(v.offset), rows * v.width, index, idle); });
  else
    meet(thread, index, true, [&](Idle idle) {
      begin_sum(index, out, sum_chunks(out).count, idle);
      ranks->wait_chunks(index, idle);
      trace_sum(index, begun_);
      begun_ = arrived_ = 0;
    });
}

Inference::SumChunks Inference::sum_chunks(int out) const {
  const ckdist_value& v = value(out);
  const bool by_rank = v.place == ckdist_place_sums;
  SumChunks chunks{1, v.selected ? by_rank ? local_selected : batch.selected : local_tokens};
  if (by_rank || (v.place == ckdist_place_slot && !plan->tokens_sharded && !plan->host_rows && ranks->host_count() > 1))
    chunks.count =
        int(std::clamp<int64_t>(chunks.rows * v.width * 4 / ranks->chunk_bytes(), 1, StepCommunicator::kMaxChunks));
  return chunks;
}

void Inference::begin_sum(int index, int out, int until, Idle idle) {
  const ckdist_value& v = value(out);
  const SumChunks chunks = sum_chunks(out);
  const bool by_rank = v.place == ckdist_place_sums;
  const int64_t first = !by_rank ? 0 : v.selected ? first_selected : first_token;
  const int64_t rows = !by_rank ? chunks.rows : v.selected ? batch.selected : batch.tokens;
  for (; begun_ < until; begun_++) {
    if (sums_lane_) chunk_begin_[begun_] = now_ns();
    const Range own = {(first + chunks.begin(begun_)) * v.width, (first + chunks.begin(begun_ + 1)) * v.width};
    ranks->begin_chunk({int(v.offset), rows * v.width, by_rank}, own, index, idle);
  }
  trace_sum(index, ranks->test_chunks());
}

void Inference::trace_sum(int index, int arrived) {
  for (; arrived_ < arrived; arrived_++) {
    if (!sums_lane_) continue;
    const int64_t begin = std::max(chunk_begin_[arrived_], chunk_end_);
    chunk_end_ = now_ns();
    sums_lane_->add(ckdist_trace_sum, begin, chunk_end_, index, list_->number, arrived_);
  }
}

void Inference::trace(Trace& trace) {
  Executor::trace(trace);
  if (ranks->host_count() > 1) sums_lane_ = trace.lane("sums between hosts");
}

void Inference::send_rows(int64_t floats) {
  if (floats > 0) outgoing_[turn()] = everyone().isend(program.next, outgoing(), floats * 4);
}

void Inference::receive_rows(float* rows, int64_t floats, int step) {
  if (floats > 0) everyone().recv(program.previous, rows, floats * 4, step);
}

BatchView Inference::accept(const int32_t* message, int64_t ints) {
  const BatchView those = BatchView::parse(message, ints, program);
  if (those.plan < 0 || those.plan >= program.plan_count || those.steps < 0 ||
      those.steps > int(lists_[those.plan].steps.size()))
    fail(Status::native, "a batch asks for %d steps of plan %d of %d", those.steps, those.plan, program.plan_count);
  const PlanFacts& facts = facts_[size_t(those.plan)];
  if (facts.needs_firsts &&
      (those.firsts == nullptr || *std::min_element(those.firsts, those.firsts + those.sequences) < 1))
    fail(Status::native, "a batch of %lld sequences decodes without the output of an encoder",
         (long long)those.sequences);
  if (facts.needs_rows && those.embedding_rows < those.tokens)
    fail(Status::native, "a batch of %lld tokens has %lld rows of hidden states", (long long)those.tokens,
         (long long)those.embedding_rows);
  states.accept(those);
  return those;
}

void Inference::trace_publish(const BatchView& those, int64_t begin) {
  if (TraceLane* const lane = this->lane(0))
    lane->add(ckdist_trace_publish, begin, now_ns(), int32_t(those.tokens), int32_t(those.sequences), those.plan);
}

void Inference::run(const BatchView& those) {
  begin(those);
  const int64_t start = now_ns();
  const Repacker::Step step;
  packing = repacker_ && !repacker_->finished();
  if (packing) {
    const bool prompts =
        batch.tokens > batch.sequences || std::any_of(batch.chunks, batch.chunks + batch.sequences,
                                                      [](const BatchView::Chunk& c) { return c.first_position == 0; });
    repacker_->allow(facts_[size_t(batch.plan)].bytes / (prompts ? 1 : kKeptShare));
  }
  // The earlier message from the same buffer.
  Channel::Pending sent = std::exchange(outgoing_[turn()], Channel::Pending{0, 0});
  if (sent.request) everyone().wait(sent, 0);
  pool_->run(active_, [this](int thread) { replay(thread); });
  count_step(double(now_ns() - start) * 1e-9);
}

void Inference::count_step(double seconds) {
  stats_.total += seconds;
  stats_.runs++;
  runs_++;
  for (ThreadBuffers& w : buffers_) stats_.moved += std::exchange(w.moved, 0);
  const int64_t experts = std::exchange(experts_read_, 0);
  if (batch.tokens != batch.sequences || batch.steps > 0) return;
  stats_.decode += seconds;
  stats_.decode_runs++;
  stats_.decode_read += traffic_.bytes(batch) + experts;
}

// Sets the members that steps read of the batch.
void Inference::begin(const BatchView& those) {
  batch = those;
  plan = &program.plans[batch.plan];
  list_ = &lists_[batch.plan];
  first_token = plan->tokens_sharded ? first_token_of(ranks->local_rank) : 0;
  local_tokens = plan->tokens_sharded ? first_token_of(ranks->local_rank + 1) - first_token : batch.tokens;
  const int32_t* const selected = batch.selected_tokens;
  first_selected = std::lower_bound(selected, selected + batch.selected, first_token) - selected;
  local_selected =
      std::lower_bound(selected, selected + batch.selected, first_token + local_tokens) - selected - first_selected;
  Start start{0, 0};
  for (int64_t s = 0; s < batch.sequences; s++) {
    starts[size_t(s)] = start;
    start.token += batch.chunks[s].tokens, start.block += batch.chunks[s].blocks;
  }
  if (batch.positions != nullptr) read_positions();
  if (batch.adapters != nullptr) read_adapters();
  if (plan->host_rows) host_rows->begin(local_tokens);
  active_ = std::min(std::max(batch.threads, 1), threads());
  for (Thread& thread : threads_) thread.ahead.step = -1;
  const auto clear = [this](int rows, std::atomic<int64_t>* at) {
    for (int row = 0; row < rows; row++)
      for (size_t i = 0; i < list_->steps.size(); i++) at[row * most_steps_ + i].store(0, std::memory_order_relaxed);
  };
  pool_->activate(active_);
  clear(batch.tokens > batch.sequences || batch.tokens >= kThreadRows ? active_ : groups(), counters_.get());
  clear(groups(), counters_.get() + threads() * most_steps_);
}

void Inference::read_positions() {
  for (size_t i = 0; i < std::size(axes_); i++) {
    const ckdist_rope& rope = program.ropes[i];
    if (rope.axes == nullptr) continue;
    const int64_t half = rope.dims / 2;
    float* row = axes_[i].data();
    for (int64_t t = 0; t < batch.tokens; t++, row += rope.dims)
      for (int64_t pair = 0; pair < half; pair++) {
        const int64_t at = batch.positions[3 * t + rope.axes[pair]] * half + pair;
        row[pair] = rope.cos[at], row[half + pair] = rope.sin[at];
      }
  }
}

void Inference::read_adapters() {
  for (int64_t list = 0; list < batch.adapter_lists; list++) {
    AdapterUse* at = &adapters_[size_t(list * program.max_tokens)];
    for (int64_t s = 0; s < batch.sequences; s++)
      at = std::fill_n(at, batch.chunks[s].tokens, batch.adapter(list * batch.sequences + s));
  }
}

ckdist_step_stats Inference::stats(bool reset) {
  ckdist_step_stats s = stats_;
  s.sent = ranks->sent() - sent_before_;
  s.packed = repacker_ ? repacker_->ready_bytes() : -1;
  if (reset) stats_ = {}, sent_before_ = ranks->sent();
  return s;
}

void Inference::expert_rows(int64_t* out) const {
  const int64_t count = int64_t{program.layer_count} * program.experts;
  std::fill(out, out + count, 0);
  for (int rank = 0; rank < ranks->local_size; rank++)
    for (int64_t i = 0; i < count; i++) out[i] += ranks->counters(rank)[i];
}

void Inference::replay(int thread) {
  const int all = int(list_->steps.size());
  const int steps = batch.steps > 0 ? batch.steps : batch.selected > 0 ? all : facts_[size_t(batch.plan)].token_steps;
  const int64_t begin = lane(thread) ? now_ns() : 0;
  walk(thread, steps);
  if (steps < all) meet(thread, steps - 1, true, [&](Idle) { end_batch(0, steps); });
  if (lane(thread)) trace_batch(thread, begin);
}

void Inference::trace_batch(int thread, int64_t begin) {
  TraceLane& lane = *this->lane(thread);
  const int64_t end = now_ns();
  const int32_t tokens = int32_t(batch.tokens), sequences = int32_t(batch.sequences);
  const bool decode = tokens == sequences;
  lane.add(decode ? ckdist_trace_decode : ckdist_trace_prefill, begin, end, tokens, sequences, batch.plan);
  if (thread != 0) return;
  if (decode && prefilled_ != 0) lane.add(ckdist_trace_transition, prefilled_, begin, tokens, sequences);
  prefilled_ = plan->tokens_sharded ? end : 0;
}

}  // namespace ckdist
