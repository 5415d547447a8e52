// Attention of a few queries over one kv-head's blocks, with the softmax taken online.
//
// Dao et al. 2022, arXiv:2205.14135. The context is walked in chunks of 64 positions at absolute multiples of 64. Per chunk and
// group of queries: scores (lanes are positions, one chain over head_dim each), softmax of each row against its running
// maximum, and the weighted sum of V (lanes are dimensions, one chain over positions each). A chunk that a query does not
// see changes none of its bits: the maximum stays, the correction is exactly 1, the weights are exactly 0.
//
// K and V are read straight from the cache and converted in registers. Where the ISA converts slowly and many queries share the
// chunk, or a row of V ends in half a Vec, the chunk's codes are converted once into scratch, in the layout of an f32 block, and
// the same code reads them there. Scales of q8_0 stay apart in both: those of K multiply a group's part of a score, those of V
// multiply the weights.
#include "kernels/attention.h"

#include "kernels/isa/attention_block.h"
#include "kernels/isa/attention_store.h"
#include "kernels/isa/exp.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kChunkBlocks = 4;
constexpr int kChunk = kChunkBlocks * kBlockTokens;
static_assert(kBlockTokens == kLanes, "a lane is a position of a block");

// Accumulators that fit in the registers beside their operands, in Vecs, and the most queries that share one load of K or V.
#if defined(__AVX512F__)
constexpr int kAccumulators = 24, kGroup = 6;
constexpr int64_t kDirectQueries = INT64_MAX;  // converting in registers is cheaper than a trip through scratch, however often
#elif defined(__AVX2__)
constexpr int kAccumulators = 6, kGroup = 6;
constexpr int64_t kDirectQueries = INT64_MAX;
#else
constexpr int kAccumulators = 3, kGroup = 3;
constexpr int64_t kDirectQueries = 2 * kGroup;  // a conversion takes several operations here
#endif

constexpr int64_t round_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The scratch of one task; with no base, only its size.
struct Workspace {
  int64_t queries, width, floats = 0;  // width: head_dim in whole Vecs
  float* q;            // groups of queries, each (head_dim, queries of the group)
  float* acc;          // (queries, width)
  float* sum;          // (queries, 16): the softmax's denominator, lane by lane
  float* running_max;  // (queries,)
  float* weights;      // (1 + groups, queries of a group, 64): the softmax's, then those times the scales of V
  float* k_scales;     // (groups, 64)
  float* v_scales;
  float* keys;         // a chunk of K, (4, head_dim, 16)
  float* values;       // a chunk of V, (64, width)

  Workspace(float* base, int tokens, int heads, int head_dim) : queries(int64_t{tokens} * heads), width(round_lanes(head_dim)) {
    const auto take = [&](int64_t n) {
      float* start = base ? base + floats : nullptr;
      floats += round_lanes(n);
      return start;
    };
    q = take(queries * head_dim);
    acc = take(queries * width);
    sum = take(queries * kLanes);
    running_max = take(queries);
    weights = take((head_dim / 32 + 2) * kGroup * kChunk);
    k_scales = take((head_dim / 32 + 1) * kChunk);
    v_scales = take((head_dim / 32 + 1) * kChunk);
    keys = take(int64_t{kChunk} * head_dim);
    values = take(kChunk * width);
  }
};

// The blocks [first, last) of one chunk.
struct Chunk {
  int first, last;
  const uint8_t* k[kChunkBlocks];
  const uint8_t* v[kChunkBlocks];
  int64_t ahead[kChunkBlocks];  // bytes from a block to the one four further on, which is fetched meanwhile
  int positions[kChunkBlocks];  // how many of the block's are in the cache
  int64_t v_row;                // elements from one position's V to the next
  int group;                    // dimensions that share a scale
  const float* k_scales;        // (groups, 64), only where there are scales
  const float* v_scales;
};

// How the numbers of a chunk are stored: codes of a type, with or without scales.
template <KvType codes, bool with_scales>
struct Stored {
  static constexpr KvType type = codes;
  static constexpr bool scaled = with_scales;
};

// Into L2: the tiles of four blocks start a page apart, and twice four of them would evict each other from L1.
CKDIST_INLINE void fetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// Blocks are a page or less, so the hardware's prefetch starts anew in each; many queries on floats have no need of it.
template <class S, int R>
constexpr bool kFetchAhead = S::type != KvType::f32 || R <= 3;

// Scores of R queries against B blocks from `first` on: out (R, 64) = scale * q.k
template <class S, int R, int B>
__attribute__((noinline)) void score(const Chunk& chunk, int first, const float* q, int head_dim, float scale, float* out) {
  const uint8_t* k[B];
  for (int b = 0; b < B; ++b) k[b] = chunk.k[first + b];
  out += first * kLanes;
  for (int start = 0; start < head_dim; start += chunk.group) {
    Vec sum[R][B];
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) sum[r][b] = set(0.0f);
    for (int i = start; i < start + chunk.group; ++i) {
      Vec key[B];
      for (int b = 0; b < B; ++b) {
        const int64_t element = int64_t{i} * kLanes;
        key[b] = load_codes<S::type>(k[b], element);
        if constexpr (kFetchAhead<S, R>) fetch(k[b] + code_bytes(S::type) * element + chunk.ahead[first + b]);
      }
      for (int r = 0; r < R; ++r) {
        const Vec x = set(q[int64_t{i} * R + r]);
        for (int b = 0; b < B; ++b) sum[r][b] = fma(x, key[b], sum[r][b]);
      }
    }
    const bool last = start + chunk.group == head_dim;
    for (int r = 0; r < R; ++r) {
      for (int b = 0; b < B; ++b) {
        float* at = out + r * kChunk + b * kLanes;
        if constexpr (S::scaled) {
          const Vec before = start > 0 ? load(at) : set(0.0f);
          sum[r][b] = fma(sum[r][b], load(chunk.k_scales + start / chunk.group * kChunk + (first + b) * kLanes), before);
        }
        store(at, last ? sum[r][b] * set(scale) : sum[r][b]);
      }
    }
  }
}

template <class S, int R, int B>
void score_chunk(const Chunk& chunk, int first, const float* q, int head_dim, float scale, float* out) {
  for (; chunk.last - first >= B; first += B) score<S, R, B>(chunk, first, q, head_dim, scale, out);
  if constexpr (B > 1) score_chunk<S, R, B - 1>(chunk, first, q, head_dim, scale, out);
}

// One query's scores (64) into weights, of which only positions [low, high) count. Returns the factor for what was summed before.
__attribute__((noinline)) float soften(float* scores, int low, int high, float soft_cap, float* running_max, float* sum) {
  const Vec minus_infinity = set(-__builtin_inff());
  Vec s[kChunkBlocks];
  for (int b = 0; b < kChunkBlocks; ++b) {
    s[b] = load(scores + b * kLanes);
    if (soft_cap > 0.0f) s[b] = set(soft_cap) * tanh(s[b] / set(soft_cap));
  }
  if (low > 0 || high < kChunk) {
    static const float lanes[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int b = 0; b < kChunkBlocks; ++b) {
      const Vec position = load(lanes) + set(static_cast<float>(b * kLanes));
      s[b] = select(less(position, set(static_cast<float>(high))), s[b], minus_infinity);
      s[b] = select(less(position, set(static_cast<float>(low))), minus_infinity, s[b]);
    }
  }
  const float before = *running_max;
  const float largest = reduce_max(max(max(s[0], s[1]), max(s[2], s[3])));
  const float now = largest > before ? largest : before;
  const Vec shift = set(now == -__builtin_inff() ? 0.0f : now);  // nothing seen yet: all weights are exp(-inf)
  for (int b = 0; b < kChunkBlocks; ++b) {
    s[b] = exp(s[b] - shift);
    store(scores + b * kLanes, s[b]);
  }
  const Vec correction = exp(set(before) - shift);
  store(sum, fma(load(sum), correction, (s[0] + s[1]) + (s[2] + s[3])));
  *running_max = now;
  float lanes_of_correction[kLanes];
  store(lanes_of_correction, correction);
  return lanes_of_correction[0];
}

// acc (R, width) columns [column, column + 16 D) = acc * correction + weights (groups, R, 64) times the chunk's V.
template <class S, int R, int D>
__attribute__((noinline)) void accumulate(const Chunk& chunk, const float* weights, const float* correction, int64_t column,
                                          float* acc, int64_t width) {
  constexpr int kShare = S::scaled ? (D < 2 ? D : 2) : D;  // Vecs that share weights: a group of scales is two, or all
  Vec sum[R][D];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < D; ++c) sum[r][c] = load(acc + r * width + column + c * kLanes) * set(correction[r]);
  const float* w[D / kShare];
  for (int s = 0; s < D / kShare; ++s) w[s] = weights + (column + s * kShare * kLanes) / chunk.group * R * kChunk;
  for (int b = chunk.first; b < chunk.last; ++b) {
    for (int j = 0; j < chunk.positions[b]; ++j) {
      Vec value[D];
      for (int c = 0; c < D; ++c) {
        const int64_t element = j * chunk.v_row + column + c * kLanes;
        value[c] = load_codes<S::type>(chunk.v[b], element);
        if constexpr (kFetchAhead<S, R>) fetch(chunk.v[b] + code_bytes(S::type) * element + chunk.ahead[b]);
      }
      for (int r = 0; r < R; ++r) {
        for (int s = 0; s < D / kShare; ++s) {
          const Vec weight = set(w[s][r * kChunk + b * kLanes + j]);
          for (int c = s * kShare; c < (s + 1) * kShare; ++c) sum[r][c] = fma(weight, value[c], sum[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < D; ++c) store(acc + r * width + column + c * kLanes, sum[r][c]);
}

template <class S, int R, int D>
void accumulate_row(const Chunk& chunk, const float* weights, const float* correction, int64_t column, float* acc, int64_t width) {
  if constexpr (R * D <= kAccumulators)
    for (; width - column >= D * kLanes; column += D * kLanes)
      accumulate<S, R, D>(chunk, weights, correction, column, acc, width);
  if constexpr (D > 1) accumulate_row<S, R, D / 2>(chunk, weights, correction, column, acc, width);
}

// (groups, R, 64): the weights times the scales of V, from the weights (R, 64).
template <int R>
void scale_weights(const Chunk& chunk, const float* weights, int groups, float* out) {
  for (int g = 0; g < groups; ++g)
    for (int r = 0; r < R; ++r)
      for (int i = chunk.first * kLanes; i < chunk.last * kLanes; i += kLanes)
        store(out + (g * R + r) * kChunk + i, load(weights + r * kChunk + i) * load(chunk.v_scales + g * kChunk + i));
}

// One group of R queries, the first of which is query `row`, over one chunk that starts at position `start`.
template <class S, int R>
void attend_group(const AttentionTask& task, const Workspace& work, const Chunk& chunk, int64_t start, int64_t row) {
  constexpr int kBlocks = kAccumulators / R < kChunkBlocks ? kAccumulators / R : kChunkBlocks;
  int low[R], high[R];
  bool seen = false;
  for (int r = 0; r < R; ++r) {
    const int64_t position = task.first_position + (row + r) / task.heads;
    const int64_t from = task.window > 0 ? position + 1 - task.window - start : 0;
    const int64_t to = position + 1 - start;
    low[r] = static_cast<int>(from < 0 ? 0 : from > kChunk ? kChunk : from);
    high[r] = static_cast<int>(to < 0 ? 0 : to > kChunk ? kChunk : to);
    seen = seen || low[r] < high[r];
  }
  if (!seen) return;

  score_chunk<S, R, kBlocks>(chunk, chunk.first, work.q + row * task.head_dim, task.head_dim, task.scale, work.weights);
  float correction[R];
  for (int r = 0; r < R; ++r)
    correction[r] = soften(work.weights + r * kChunk, low[r], high[r], task.soft_cap, work.running_max + row + r,
                           work.sum + (row + r) * kLanes);
  const float* weights = work.weights;  // (R, 64)
  if constexpr (S::scaled) {
    float* scaled = work.weights + R * kChunk;
    scale_weights<R>(chunk, weights, task.head_dim / chunk.group, scaled);
    weights = scaled;
  }
  accumulate_row<S, R, 8>(chunk, weights, correction, 0, work.acc + row * work.width, work.width);
}

template <class S>
void attend_rows(const AttentionTask& task, const Workspace& work, const Chunk& chunk, int64_t start, int64_t row, int rows) {
  switch (rows) {
    case 1: return attend_group<S, 1>(task, work, chunk, start, row);
    case 2: return attend_group<S, 2>(task, work, chunk, start, row);
    case 3: return attend_group<S, 3>(task, work, chunk, start, row);
#if defined(__AVX2__)
    case 4: return attend_group<S, 4>(task, work, chunk, start, row);
    case 5: return attend_group<S, 5>(task, work, chunk, start, row);
    case 6: return attend_group<S, 6>(task, work, chunk, start, row);
#endif
  }
}

// The chunk's codes as floats in scratch, laid out as f32 blocks are, with V's rows padded to whole Vecs.
template <KvType type>
__attribute__((noinline)) Chunk convert(const Chunk& chunk, const Workspace& work, int head_dim) {
  Chunk out = chunk;
  out.v_row = work.width;
  for (int b = chunk.first; b < chunk.last; ++b) {
    float* key = work.keys + int64_t{b} * kLanes * head_dim;
    float* value = work.values + int64_t{b} * kLanes * work.width;
    out.k[b] = reinterpret_cast<const uint8_t*>(key);
    out.v[b] = reinterpret_cast<const uint8_t*>(value);
    out.ahead[b] = 0;
    for (int i = 0; i < head_dim; ++i) {
      const int64_t element = int64_t{i} * kLanes;
      store(key + element, load_codes<type>(chunk.k[b], element));
      fetch(chunk.k[b] + code_bytes(type) * element + chunk.ahead[b]);
    }
    for (int j = 0; j < chunk.positions[b]; ++j) {
      int i = 0;
      for (; head_dim - i >= kLanes; i += kLanes) {
        const int64_t element = j * chunk.v_row + i;
        store(value + j * work.width + i, load_codes<type>(chunk.v[b], element));
        fetch(chunk.v[b] + code_bytes(type) * element + chunk.ahead[b]);
      }
      if (i < head_dim) {  // half a Vec, and perhaps the cache's last bytes
        uint8_t half[4 * kLanes] = {};
        std::memcpy(half, chunk.v[b] + code_bytes(type) * (j * chunk.v_row + i), code_bytes(type) * (head_dim - i));
        store(value + j * work.width + i, load_codes<type>(half, 0));
      }
    }
  }
  return out;
}

// Packs the queries by groups of `rows`, so that the innermost loop reads them through one pointer, and clears the sums.
void prepare_queries(const AttentionTask& task, const Workspace& work, int rows) {
  for (int64_t row = 0; row < work.queries; row += rows) {
    const int64_t count = work.queries - row < rows ? work.queries - row : rows;
    float* packed = work.q + row * task.head_dim;  // (head_dim, count)
    for (int64_t r = 0; r < count; ++r) {
      const float* q = task.q + (row + r) / task.heads * task.q_token_stride + (row + r) % task.heads * task.q_head_stride;
      for (int i = 0; i < task.head_dim; ++i) packed[i * count + r] = q[i];
    }
  }
  std::memset(work.acc, 0, 4 * work.queries * work.width);
  std::memset(work.sum, 0, 4 * work.queries * kLanes);
  for (int64_t row = 0; row < work.queries; ++row) work.running_max[row] = -__builtin_inff();
}

void finish(const AttentionTask& task, const Workspace& work) {
  for (int64_t row = 0; row < work.queries; ++row) {
    const Vec sum = set(reduce_sum(load(work.sum + row * kLanes)));
    float* out = task.out + row / task.heads * task.out_token_stride + row % task.heads * task.out_head_stride;
    for (int i = 0; i < task.head_dim; i += kLanes) {
      const Vec mean = load(work.acc + row * work.width + i) / sum + set(0.0f);  // adding 0 leaves one zero: +0
      store_n(out + i, mean, task.head_dim - i < kLanes ? task.head_dim - i : kLanes);
    }
  }
}

// The blocks of the chunk at `start`, of which the cache holds the positions [begin, end).
template <KvType type>
Chunk open_chunk(const AttentionTask& task, const Workspace& work, const BlockLayout& layout, int64_t start, int64_t begin,
                 int64_t end) {
  Chunk chunk = {};
  chunk.first = start < begin ? static_cast<int>((begin - start) / kBlockTokens) : 0;
  chunk.last = end - start < kChunk ? static_cast<int>((end - start + kBlockTokens - 1) / kBlockTokens) : kChunkBlocks;
  chunk.v_row = task.head_dim;
  chunk.group = layout.group;
  chunk.k_scales = work.k_scales;
  chunk.v_scales = work.v_scales;
  for (int b = chunk.first; b < chunk.last; ++b) {
    const int32_t* entry = task.block_table + start / kBlockTokens + b;
    const uint8_t* block = task.kv + entry[0] * task.block_stride;
    const int64_t left = end - start - b * kBlockTokens;
    chunk.k[b] = block;
    chunk.v[b] = block + layout.v_offset;
    chunk.ahead[b] = left > kChunk ? (int64_t{entry[kChunkBlocks]} - entry[0]) * task.block_stride : 0;
    chunk.positions[b] = static_cast<int>(left < kBlockTokens ? left : kBlockTokens);
    if constexpr (type == KvType::q8_0) {
      for (int g = 0; g < task.head_dim / layout.group; ++g) {
        const int64_t offset = 2 * g * kLanes;
        store(work.k_scales + g * kChunk + b * kLanes, load_codes<KvType::f16>(block + layout.k_scales_offset + offset, 0));
        store(work.v_scales + g * kChunk + b * kLanes, load_codes<KvType::f16>(block + layout.v_scales_offset + offset, 0));
      }
    }
  }
  return chunk;
}

template <KvType type>
void attend_typed(const AttentionTask& task, const Workspace& work) {
  constexpr bool scaled = type == KvType::q8_0;
  const BlockLayout layout(type, task.head_dim);
  const int64_t parts = (work.queries + kGroup - 1) / kGroup;
  const int rows = static_cast<int>((work.queries + parts - 1) / parts);
  const bool whole = task.head_dim % kLanes == 0;  // else a row of V ends in half a Vec
  const bool direct = whole && (type == KvType::f32 || work.queries <= kDirectQueries);
  prepare_queries(task, work, rows);

  const int64_t end = task.first_position + task.tokens;
  const int64_t begin = task.window > 0 && task.first_position >= task.window ? task.first_position + 1 - task.window : 0;
  for (int64_t start = begin / kChunk * kChunk; start < end; start += kChunk) {
    const Chunk chunk = open_chunk<type>(task, work, layout, start, begin, end);
    const Chunk chunk_in_use = direct ? chunk : convert<type>(chunk, work, task.head_dim);
    for (int64_t row = 0; row < work.queries; row += rows) {
      const int count = static_cast<int>(work.queries - row < rows ? work.queries - row : rows);
      if (direct)
        attend_rows<Stored<type, scaled>>(task, work, chunk_in_use, start, row, count);
      else
        attend_rows<Stored<KvType::f32, scaled>>(task, work, chunk_in_use, start, row, count);
    }
  }
  finish(task, work);
}

int64_t scratch_bytes(int tokens, int heads, int head_dim) {
  return 4 * Workspace(nullptr, tokens, heads, head_dim).floats;
}

void attend(const AttentionTask& task, uint8_t* scratch) {
  const Workspace work(reinterpret_cast<float*>(scratch), task.tokens, task.heads, task.head_dim);
  switch (task.kv_type) {
    case KvType::f32: return attend_typed<KvType::f32>(task, work);
    case KvType::f16: return attend_typed<KvType::f16>(task, work);
    case KvType::bf16: return attend_typed<KvType::bf16>(task, work);
    case KvType::q8_0: return attend_typed<KvType::q8_0>(task, work);
  }
}

}  // namespace

extern const AttentionKernel attention_kernel = {attention_block_bytes, attention_store, scratch_bytes, attend};

}  // namespace CKDIST_ISA
}  // namespace ckdist
