// Output projection, log-softmax and both gradients in one step, over chunks of tokens: the logits of a whole batch
// never exist at once.
//
// The logits are computed in parts of the vocabulary. The thread that computes a part also computes exp(logit - largest
// logit of the part), while the logits are in the cache. When all parts are complete, they are scaled to a common
// maximum and by the token's weight. If many tokens have no target, as in chats, the tokens with a target are gathered
// first. Ranks that shard the vocabulary exchange three numbers per token (Shoeybi et al. 2019, arXiv:1909.08053,
// section 3).
#include <cmath>

#include "kernels/half.h"
#include "runtime/steps/packs.h"
#include "runtime/steps/products.h"

namespace ckdist {
namespace {

constexpr int64_t kLogitBytes = 64 << 20;  // bytes of gradients of logits that exist at once
// Bytes of the head's weights for one part of the logits. The bits of a loss depend on the parts, so this is
// independent of the tuning of products.
constexpr int64_t kPartBytes = 384 << 10;
constexpr int64_t kLogitTokens = 128;  // maximum tokens of a part's logits, which stay in the L2 cache
// Smallest probability of all tokens that are not a teacher's choices: 1 - the sum of the choices is rounding below.
constexpr double kLeastRest = 1e-6;

struct CrossEntropy : TrainingRun<ckdist_cross_entropy_step> {
  // For one token: the largest of its logits and its token, the sum of exp(logit - largest), and the logit of its
  // target (0 if another rank has it).
  struct TokenSums {
    double sum;
    float most, logit;
    int64_t best;
  };
  // Buffers of a chunk of tokens, and of the parts in which their logits are computed.
  struct Space {
    uint8_t *d, *x_transposed, *x, *dx;  // (tokens, vocab), tiles (hidden, tokens), (tokens, hidden) twice
    uint8_t *x_strips, *d_strips;        // of x and d, if the level has strips
    float *largest, *sums, *logits;      // (tokens, parts) twice, (tokens,)
    int32_t* best;                       // (tokens, parts): the token of the largest logit, if wanted
    TokenSums *own, *ranks;              // (tokens,) and (ranks, tokens), if ranks shard the vocabulary
    float *choices, *rank_choices;  // logits of a teacher's choices: (tokens, choices), and (ranks, tokens, choices)
  };
  static int64_t vocab_of(const Training& r, const Fields& step) { return r.packed(step.head).rows; }
  static int64_t part_tiles(const Training& r, const Matrix& head) { return Products::item_tiles(r, head, kPartBytes); }
  // Floats between the logits of one token and the next: one extra tile avoids conflicts in the cache.
  static int64_t part_row(const Training& r, const Matrix& head) { return (part_tiles(r, head) + 1) * kTileRows; }

  struct Heads {
    Matrix head, transposed;
  };
  static Heads heads(StepPacks& packs, Carver& c, const Training& r, const Fields& step) {
    return {packs.add(r, c, step.head), step.dx < 0 ? Matrix{} : packs.add(r, c, step.head_transposed)};
  }
  static int64_t thread_bytes(const Training& r, const Fields& step) {
    return std::max({kLogitTokens * part_row(r, r.packed(step.head)) * 4 + (r.product.strips ? kStripsSums * 4 : 0),
                     Products::thread_bytes(r), pack_thread_bytes(r, step.head), r.row_buffers_bytes()});
  }
  static int64_t workspace_bytes(const Training& r, const Fields& step) {
    StepPacks packs;
    return carved_bytes([&](Carver& c) { loss_space(c, r, step), heads(packs, c, r, step); });
  }

  // Tokens whose gradients of logits exist at once. It is the same on all ranks that shard the vocabulary.
  static int64_t loss_chunk(const Training& r) {
    const int64_t vocab = (r.program.vocab + r.tensor_ranks() - 1) / r.tensor_ranks();
    return std::min(std::max<int64_t>(kLogitBytes / Training::stride(vocab, r.element_bytes()) / Products::kTokens, 1) *
                        Products::kTokens,
                    r.program.max_tokens);
  }

  static Space loss_space(Carver& c, const Training& r, const Fields& step) {
    const int64_t chunk = loss_chunk(r), hidden = r.width(step.x), vocab = vocab_of(r, step),
                  columns = part_tiles(r, r.packed(step.head)) * kTileRows;
    const int64_t parts = parts_of(vocab, columns);
    Space s{};
    if (step.dx >= 0 || step.gradient >= 0) s.d = c.bytes(chunk * Training::stride(vocab, r.element_bytes()));
    if (step.gradient >= 0) s.x_transposed = c.bytes(tiles_of(hidden) * r.tile_bytes(chunk));
    s.x = c.bytes(chunk * r.row_stride(step.x));
    if (step.dx >= 0) {
      s.dx = c.bytes(chunk * r.row_stride(step.dx));
      if (r.product.strips) s.d_strips = c.bytes(Products::strips_bytes(r, vocab, chunk));
    }
    if (r.product.strips) s.x_strips = c.bytes(Products::strips_bytes(r, hidden, chunk));
    s.choices = c.floats(chunk * step.choices);
    s.largest = c.floats(chunk * parts), s.sums = c.floats(chunk * parts), s.logits = c.floats(chunk);
    s.best = c.array<int32_t>(chunk * parts);
    if (r.tensor_ranks() > 1) {
      s.own = c.array<TokenSums>(chunk);
      s.ranks = c.array<TokenSums>(chunk * r.tensor_ranks());
      s.rank_choices = c.floats(chunk * step.choices * r.tensor_ranks());
    }
    return s;
  }

  const int32_t* choices(int64_t i) const { return r.batch.teacher_ids.data() + r.learned(i) * step.choices; }

  // Multiplies tokens [begin, end) by a part of the head: (tokens, columns).
  void multiply_part(const Matrix& part, const Space& s, const Operand& x, int64_t begin, int64_t end, float* out,
                     int64_t row) const {
    if (!r.product.strips)
      return r.product.multiply(part, 0, part.tile_count(), x.row(begin), x.stride, end - begin, out, row, false);
    for (int64_t tile = 0; tile < part.tile_count(); tile += kStripsTiles) {
      Matrix some = part;
      some.rows = std::min(kStripsTiles * kTileRows, part.rows - tile * kTileRows),
      some.tiles += tile * part.tile_bytes;
      r.product.strips->produce(some, s.x_strips + begin / kStripRows * strip_bytes(part.cols), end - begin, nullptr,
                                out + kLogitTokens * row,
                                {reinterpret_cast<uint8_t*>(out + tile * kTileRows), row * 4, false});
    }
  }

  // Computes for n tokens: s.largest and s.sums of every part of the logits, (tokens, parts); s.logits of the targets;
  // s.d relative to the largest logit of each part.
  void logits(const Matrix& head, const Space& s, const Operand& x, int64_t first, int64_t n) {
    const int64_t tiles = part_tiles(r, head), parts = parts_of(head.tile_count(), tiles),
                  tokens = r.product.strips ? kLogitTokens : Products::kTokens, token_parts = parts_of(n, tokens);
    if (r.product.strips) Products(r, thread, index).pack_strips(x, head.cols, n, s.x_strips);
    parallel_for(parts * token_parts, [&](int64_t item) {
      const int64_t part = item / token_parts, begin = item % token_parts * tokens, tile = part * tiles;
      Matrix some = head;
      some.rows = std::min(tiles * kTileRows, head.rows - tile * kTileRows), some.tiles += tile * head.tile_bytes;
      logits_of_part(some, part, parts, s, x, first, begin, std::min(begin + tokens, n));
    });
  }

  void logits_of_part(const Matrix& head, int64_t part, int64_t parts, const Space& s, const Operand& x, int64_t first,
                      int64_t begin, int64_t end) const {
    const Matrix& all = r.packed(step.head);
    const int64_t row = part_row(r, all), column = part * part_tiles(r, all) * kTileRows,
                  d_stride = Training::stride(all.rows, r.element_bytes());
    float* const sums = reinterpret_cast<float*>(r.memory(thread));  // (tokens, columns)
    multiply_part(head, s, x, begin, end, sums, row);
    for (int64_t t = begin; t < end; ++t) {
      const float* const of = sums + (t - begin) * row;
      const int64_t own_target = r.batch.targets[r.learned(first + t)], target = own_target - step.first_row - column;
      if (own_target < 0) continue;
      if (target >= 0 && target < head.rows) s.logits[t] = of[target];
      const int32_t *const ids = choices(first + t), *const end_of_ids = ids + step.choices;
      for (const int32_t* id = std::lower_bound(ids, end_of_ids, step.first_row + column); id < end_of_ids; ++id) {
        const int64_t place = *id - step.first_row - column;
        if (place >= head.rows) break;
        s.choices[t * step.choices + (id - ids)] = of[place];
      }
      if (!r.batch.best.empty())
        s.best[t * parts + part] = int32_t(step.first_row + column + (std::max_element(of, of + head.rows) - of));
      const Row d{s.d ? s.d + t * d_stride + column * r.element_bytes() : nullptr, r.narrow_values};
      s.sums[t * parts + part] = r.kernels.softmax.part(of, head.rows, step.soft_cap, s.largest + t * parts + part, d);
    }
  }

  // Sums over this rank's logits of one token, which has a target.
  TokenSums own_sums(int64_t parts, const Space& s, int64_t target, int64_t token) const {
    const float *const largest = s.largest + token * parts, *const sums = s.sums + token * parts;
    const float* const where = std::max_element(largest, largest + parts);
    const float most = *where;
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += sums[part] * std::exp(double(largest[part]) - most);
    return {sum, most, target >= 0 && target < vocab_of(r, step) ? s.logits[token] : 0,
            s.best[token * parts + (where - largest)]};
  }
  // Sums over the logits of all ranks.
  TokenSums joined_sums(const Space& s, int64_t tokens, int64_t token) const {
    TokenSums all = s.ranks[token];
    for (int rank = 1; rank < r.tensor_ranks(); ++rank)
      if (const TokenSums& its = s.ranks[rank * tokens + token]; its.most > all.most)
        all.most = its.most, all.best = its.best;
    all.sum = all.logit = 0;
    for (int rank = 0; rank < r.tensor_ranks(); ++rank) {
      const TokenSums& its = s.ranks[rank * tokens + token];
      all.sum += its.sum * std::exp(double(its.most) - all.most), all.logit += its.logit;
    }
    return all;
  }
  void exchange_sums(int64_t parts, const Space& s, int64_t first, int64_t n) {
    parallel_for(n, [&](int64_t token) {
      const int64_t target = r.batch.targets[r.learned(first + token)];
      s.own[token] = target < 0 ? TokenSums{} : own_sums(parts, s, target - step.first_row, token);
      for (int64_t i = 0; i < step.choices; ++i)  // other ranks have the others
        if (const int64_t id = choices(first + token)[i] - step.first_row; id < 0 || id >= vocab_of(r, step))
          s.choices[token * step.choices + i] = 0;
    });
    r.meet(thread, index, true, [&](Idle) {
      r.gather_over_tensor(s.own, n * int64_t(sizeof(TokenSums)), s.ranks);
      if (step.choices) r.gather_over_tensor(s.choices, n * step.choices * 4, s.rank_choices);
    });
  }

  // A teacher's part of one token: the divergence, and p / q of all tokens that are no choices.
  struct Teacher {
    double divergence = 0, ratio = 0;
  };
  float capped(float logit) const {
    return step.soft_cap == 0 ? logit : step.soft_cap * std::tanh(logit / step.soft_cap);
  }
  float choice_logit(const Space& s, int64_t n, int64_t token, int64_t i) const {
    if (r.tensor_ranks() == 1) return s.choices[token * step.choices + i];
    float sum = 0;
    for (int64_t rank = 0; rank < r.tensor_ranks(); ++rank)
      sum += s.rank_choices[(rank * n + token) * step.choices + i];
    return sum;
  }
  Teacher teacher_of(const Space& s, int64_t of, int64_t n, int64_t token, double log_sum_exp) const {
    Teacher t;
    const float* const logprobs = r.batch.teacher_logprobs.data() + of * step.choices;
    double p_rest = 1, q_rest = 1;
    for (int64_t i = 0; i < step.choices; ++i) {
      const double q = capped(choice_logit(s, n, token, i)) - log_sum_exp, p = std::exp(double(logprobs[i]));
      p_rest -= p, q_rest -= std::exp(q);
      t.divergence += p * (logprobs[i] - q);
    }
    t.ratio = std::max(p_rest, 0.0) / std::max(q_rest, kLeastRest);
    if (t.ratio > 0) t.divergence += p_rest * std::log(t.ratio);
    return t;
  }
  void set(uint8_t* d, int64_t column, float x) const {
    if (r.narrow_values) reinterpret_cast<uint16_t*>(d)[column] = bf16_of_float(x);
    else reinterpret_cast<float*>(d)[column] = x;
  }

  // Computes the loss of one of n tokens, and its row of s.d.
  void loss_of(int64_t parts, int64_t columns, const Space& s, int64_t first, int64_t n, int64_t token) {
    const int64_t vocab = vocab_of(r, step), of = r.learned(first + token), target = r.batch.targets[of];
    const Row d{s.d ? s.d + token * Training::stride(vocab, r.element_bytes()) : nullptr, r.narrow_values};
    if (target < 0) {
      if (d.at) std::fill_n(d.at, Training::stride(vocab, r.element_bytes()), uint8_t{0});
      return;
    }
    const int64_t local = target - step.first_row;
    const TokenSums all = r.tensor_ranks() > 1 ? joined_sums(s, n, token) : own_sums(parts, s, local, token);
    const float cap = step.soft_cap, logit = capped(all.logit);
    const double log_sum_exp = all.most + std::log(all.sum);
    Teacher teacher;
    if (!r.batch.best.empty()) r.batch.best[of] = int32_t(all.best);
    r.losses[of] += step.target_weight * (log_sum_exp - logit);
    if (step.teacher_weight != 0) {
      teacher = teacher_of(s, of, n, token, log_sum_exp);
      r.losses[of] += step.teacher_weight * teacher.divergence;
    }
    if (!d.at) return;
    const float weight = r.weight(of), others = float(step.teacher_weight * (1 - teacher.ratio));
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t column = part * columns;
      const Row some{d.at + column * r.element_bytes(), d.narrow};
      const double largest = s.largest[token * parts + part];
      r.kernels.row.scale(some, weight * (step.target_weight + others) * float(std::exp(largest - log_sum_exp)),
                          std::min(columns, vocab - column), some);
    }
    const auto slope = [&](float of_logit) { return cap == 0 ? 1 : 1 - of_logit / cap * (of_logit / cap); };
    if (local >= 0 && local < vocab) {
      const double x = logit - log_sum_exp;
      set(d.at, local,
          weight * float(step.target_weight * std::expm1(x) + (others != 0 ? others * std::exp(x) : 0)) * slope(logit));
    }
    if (step.teacher_weight != 0) {
      const float* const logprobs = r.batch.teacher_logprobs.data() + of * step.choices;
      for (int64_t i = 0; i < step.choices; ++i) {
        const int64_t id = r.batch.teacher_ids[of * step.choices + i], column = id - step.first_row;
        if (column < 0 || column >= vocab) continue;
        const float z = capped(choice_logit(s, n, token, i));
        const double q = std::exp(z - log_sum_exp), its = q - std::exp(double(logprobs[i]));
        const double own = step.target_weight * (id == target ? std::expm1(z - log_sum_exp) : q);
        set(d.at, column, weight * float(own + step.teacher_weight * its) * slope(z));
      }
    }
    std::fill_n(d.at + vocab * r.element_bytes(), (Training::padded(vocab) - vocab) * r.element_bytes(), uint8_t{0});
  }

  void run() {
    Carver c{r.workspace()};
    const Space s = loss_space(c, r, step);
    StepPacks packs;
    const auto [head, transposed] = heads(packs, c, r, step);
    make_packs(r, thread, index, packs);
    const int64_t chunk = loss_chunk(r), hidden = r.width(step.x), vocab = vocab_of(r, step);
    const int64_t columns = part_tiles(r, head) * kTileRows, parts = parts_of(vocab, columns);
    const Operand d{s.d, Training::stride(vocab, r.element_bytes())};
    const int64_t count = int64_t(r.batch.learned.size());
    const bool all = r.all_learned();
    Products products(r, thread, index);
    if (step.dx >= 0 && !all)
      each_token([&](int64_t t) {
        if (r.batch.targets[t] < 0) std::fill_n(r.operand(step.dx, t).at, r.row_bytes(step.dx), uint8_t{0});
      });
    for (int64_t first = 0; first < count; first += chunk) {
      const int64_t n = std::min(chunk, count - first);
      const Operand x = all ? r.operand(step.x, first) : Operand{s.x, r.row_stride(step.x)};
      if (!all)
        parallel_for(n, [&](int64_t token) {
          std::copy_n(r.operand(step.x, r.learned(first + token)).at, r.row_bytes(step.x), x.row(token));
        });
      logits(head, s, x, first, n);
      if (r.tensor_ranks() > 1) exchange_sums(parts, s, first, n);
      parallel_for(n, [&](int64_t token) { loss_of(parts, columns, s, first, n, token); });
      if (step.dx >= 0) {
        Product dx{transposed, d, n, step.dx, nullptr, -1, first};
        dx.strips = s.d_strips;
        if (!all) dx.to = {s.dx, r.row_stride(step.dx)};
        products.multiply(&dx, 1);
        if (!all)
          parallel_for(n, [&](int64_t token) {
            std::copy_n(dx.to.row(token), r.row_bytes(step.dx), r.operand(step.dx, r.learned(first + token)).at);
          });
      }
      if (step.gradient >= 0) {
        products.transpose_all(x, hidden, n, s.x_transposed);
        const Outer outer{d, vocab, r.gradient(step.gradient), first > 0 || r.adds(step.fresh)};
        products.add_outer(r.matrix(hidden, n, s.x_transposed), n, &outer, 1);
      }
    }
  }
};

const RegisteredKind<CrossEntropy> kCrossEntropy(ckdist_step_cross_entropy);

}  // namespace
}  // namespace ckdist
