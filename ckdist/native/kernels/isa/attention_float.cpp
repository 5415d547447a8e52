// Attention in float32 over a cache of floats (f32, f16, bf16), with an online softmax inside a span.
//
// A span is processed in chunks of 64 positions. For each chunk and group of queries: scores (lanes are positions, one
// chain over head_dim each), softmax of each row against its running maximum, and the weighted sum of V (lanes are
// dimensions, one chain over positions each). A chunk that a query does not see changes none of its bits: the maximum
// stays, the correction is exactly 1, the weights are exactly 0.
//
// Usually K and V are read directly from the cache and converted in registers. In three cases the chunk is first
// converted to scratch memory, in the layout of an f32 block, and the same code reads it there: the ISA converts slowly
// and many queries share the chunk; a row of V ends in half a Vec; or K and V have different types (one may be
// integers).
#include "kernels/isa/attention_float.h"

#include "kernels/isa/attention_bias.h"
#include "kernels/isa/attention_parts.h"
#include "kernels/isa/attention_rotation.h"
#include "kernels/isa/exp.h"
#include "kernels/isa/integers.h"

namespace ckdist {
namespace CKDIST_ISA {
namespace {

constexpr int kChunkBlocks = 4;
constexpr int kChunk = kChunkBlocks * kBlockTokens;
static_assert(kBlockTokens == kLanes, "a lane is a position of a block");

// Accumulators, in Vecs, that fit in the registers with their operands; and the maximum number of queries that share
// one load of K or V.
#if defined(__AVX512F__)
constexpr int kAccumulators = 24, kGroup = 6;
// Converting in registers is always cheaper than copying to scratch memory.
constexpr int64_t kDirectQueries = INT64_MAX;
#elif defined(__AVX2__) || defined(CKDIST_NEON)
constexpr int kAccumulators = 6, kGroup = 6;
constexpr int64_t kDirectQueries = INT64_MAX;
#else
constexpr int kAccumulators = 3, kGroup = 3;
constexpr int64_t kDirectQueries = 2 * kGroup;  // a conversion takes several operations here
#endif

// Elements [index, index + 16) of a tile.
template <KvType type>
CKDIST_INLINE Vec load_codes(const uint8_t* tile, int64_t index) {
  if constexpr (type == KvType::f32) return load(reinterpret_cast<const float*>(tile) + index);
  if constexpr (type == KvType::f16) return load_f16(reinterpret_cast<const uint16_t*>(tile) + index);
  if constexpr (type == KvType::bf16) return load_bf16(reinterpret_cast<const uint16_t*>(tile) + index);
}

struct Workspace {
  int64_t queries, width, floats = 0;
  float* rotated;  // (key_width,)
  float* q;        // groups of queries: (key_width, queries of the group) each
  float* sum;      // (queries, 16): the softmax's denominator in each lane
  float* weights;  // (queries of a group, 64)
  float* factors;  // (2, lanes)
  float* keys;     // a chunk of K, (4, key_width, 16)
  float* values;   // a chunk of V, (64, width)
  float* part;
  float* state;

  Workspace(float* base, const CacheShape& cache, int tokens, int heads)
      : queries(int64_t{tokens} * heads), width(round_lanes(cache.value_width)) {
    const auto take = [&](int64_t n) {
      float* start = base ? base + floats : nullptr;
      floats += round_lanes(n);
      return start;
    };
    rotated = take(cache.key_width);
    q = take(queries * cache.key_width);
    sum = take(queries * kLanes);
    weights = take(kGroup * kChunk);
    factors = take(2 * round_lanes(queries));
    keys = take(int64_t{kChunk} * cache.key_width);
    values = take(kChunk * width);
    const int64_t most = 3 * round_lanes(queries) + queries * width;
    part = take(most);
    state = take(most);
  }
};

// Blocks [first, last) of one chunk.
struct Chunk {
  int first, last;
  const uint8_t* k[kChunkBlocks];
  const uint8_t* v[kChunkBlocks];
  const uint8_t* k_scales[kChunkBlocks];  // only for integers
  const uint8_t* v_scales[kChunkBlocks];
  // Bytes from a block to the block four positions later, which is prefetched.
  int64_t ahead[kChunkBlocks];
  int positions[kChunkBlocks];  // number of the block's positions that are in the cache
  int64_t v_row;                // elements from one position's V to the next one's
};

// To L2: the tiles of four blocks begin a page apart, and eight of them would evict each other from L1.
CKDIST_INLINE void fetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// A block is at most a page, so the hardware prefetcher restarts in each. Many queries on floats do not need it.
template <KvType type, int R>
constexpr bool kFetchAhead = type != KvType::f32 || R <= 3;

// Scores of R queries against B blocks from `first` on: out (R, 64) = scale * q.k
template <KvType type, int R, int B>
__attribute__((noinline)) void score(const Chunk& chunk, int first, const float* q, int head_dim, float scale,
                                     float* out) {
  const uint8_t* k[B];
  for (int b = 0; b < B; ++b) k[b] = chunk.k[first + b];
  Vec sum[R][B];
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) sum[r][b] = set(0.0f);
  for (int i = 0; i < head_dim; ++i) {
    Vec key[B];
    for (int b = 0; b < B; ++b) {
      const int64_t element = int64_t{i} * kLanes;
      key[b] = load_codes<type>(k[b], element);
      if constexpr (kFetchAhead<type, R>) fetch(k[b] + code_bytes(type, element) + chunk.ahead[first + b]);
    }
    for (int r = 0; r < R; ++r) {
      const Vec x = set(q[int64_t{i} * R + r]);
      for (int b = 0; b < B; ++b) sum[r][b] = fma(x, key[b], sum[r][b]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) store(out + r * kChunk + (first + b) * kLanes, sum[r][b] * set(scale));
}

template <KvType type, int R, int B>
void score_chunk(const Chunk& chunk, int first, const float* q, int head_dim, float scale, float* out) {
  for (; chunk.last - first >= B; first += B) score<type, R, B>(chunk, first, q, head_dim, scale, out);
  if constexpr (B > 1) score_chunk<type, R, B - 1>(chunk, first, q, head_dim, scale, out);
}

// Converts one query's scores (64) to weights; only positions [low, high) count. Returns the factor of the earlier
// sums.
__attribute__((noinline)) float soften(float* scores, int low, int high, float soft_cap, float* running_max,
                                       float* sum) {
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
  const Vec shift = set(now == -__builtin_inff() ? 0.0f : now);  // no score yet: all weights are exp(-inf)
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

// acc (R, width) columns [column, column + 16 D) = acc * correction + weights (R, 64) times the chunk's V.
template <KvType type, int R, int D>
__attribute__((noinline)) void accumulate(const Chunk& chunk, const float* weights, const float* correction,
                                          int64_t column, float* acc, int64_t width) {
  Vec sum[R][D];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < D; ++c) sum[r][c] = load(acc + r * width + column + c * kLanes) * set(correction[r]);
  for (int b = chunk.first; b < chunk.last; ++b) {
    for (int j = 0; j < chunk.positions[b]; ++j) {
      Vec value[D];
      for (int c = 0; c < D; ++c) {
        const int64_t element = j * chunk.v_row + column + c * kLanes;
        value[c] = load_codes<type>(chunk.v[b], element);
        if constexpr (kFetchAhead<type, R>) fetch(chunk.v[b] + code_bytes(type, element) + chunk.ahead[b]);
      }
      for (int r = 0; r < R; ++r) {
        const Vec weight = set(weights[r * kChunk + b * kLanes + j]);
        for (int c = 0; c < D; ++c) sum[r][c] = fma(weight, value[c], sum[r][c]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < D; ++c) store(acc + r * width + column + c * kLanes, sum[r][c]);
}

template <KvType type, int R, int D>
void accumulate_row(const Chunk& chunk, const float* weights, const float* correction, int64_t column, float* acc,
                    int64_t width) {
  if constexpr (R * D <= kAccumulators)
    for (; width - column >= D * kLanes; column += D * kLanes)
      accumulate<type, R, D>(chunk, weights, correction, column, acc, width);
  if constexpr (D > 1) accumulate_row<type, R, D / 2>(chunk, weights, correction, column, acc, width);
}

// One group of R queries, beginning with query `row`, over one chunk that begins at position `start`.
template <KvType type, int R>
void attend_group(const AttentionTask& task, const Workspace& work, const SpanPart& part, const Chunk& chunk,
                  int64_t start, int64_t row) {
  constexpr int kBlocks = kAccumulators / R < kChunkBlocks ? kAccumulators / R : kChunkBlocks;
  int low[R], high[R];
  bool seen = false;
  for (int r = 0; r < R; ++r) {
    const int64_t position = task.first_position + (row + r) / task.heads;
    const int64_t from = task.from(position) - start, to = task.to(position) - start;
    low[r] = static_cast<int>(from < 0 ? 0 : from > kChunk ? kChunk : from);
    high[r] = static_cast<int>(to < 0 ? 0 : to > kChunk ? kChunk : to);
    seen = seen || low[r] < high[r];
  }
  if (!seen) return;

  score_chunk<type, R, kBlocks>(chunk, chunk.first, work.q + row * task.key_width, task.key_width, task.scale,
                                work.weights);
  if (task.bias)
    for (int r = 0; r < R; ++r) {
      const ScoreBias bias(task, row + r);
      for (int j = low[r]; j < high[r]; ++j) work.weights[r * kChunk + j] += bias.of(start + j);
    }
  float correction[R];
  for (int r = 0; r < R; ++r)
    correction[r] = soften(work.weights + r * kChunk, low[r], high[r], task.soft_cap, part.largest + row + r,
                           work.sum + (row + r) * kLanes);
  accumulate_row<type, R, 8>(chunk, work.weights, correction, 0, part.values + row * work.width, work.width);
}

template <KvType type>
void attend_rows(const AttentionTask& task, const Workspace& work, const SpanPart& part, const Chunk& chunk,
                 int64_t start, int64_t row, int rows) {
  switch (rows) {
    case 1: return attend_group<type, 1>(task, work, part, chunk, start, row);
    case 2: return attend_group<type, 2>(task, work, part, chunk, start, row);
    case 3: return attend_group<type, 3>(task, work, part, chunk, start, row);
#if defined(__AVX2__) || defined(CKDIST_NEON)
    case 4: return attend_group<type, 4>(task, work, part, chunk, start, row);
    case 5: return attend_group<type, 5>(task, work, part, chunk, start, row);
    case 6: return attend_group<type, 6>(task, work, part, chunk, start, row);
#endif
  }
}

// A block's keys as floats (key_width, 16).
template <KvType type>
void convert_keys(const uint8_t* k, int width, int64_t ahead, float* key) {
  for (int i = 0; i < width; ++i) {
    const int64_t element = int64_t{i} * kLanes;
    store(key + element, load_codes<type>(k, element));
    fetch(k + code_bytes(type, element) + ahead);
  }
}

// The values of a block as floats: (positions, width), `row` floats apart.
template <KvType type>
void convert_values(const uint8_t* v, int width, int positions, int64_t ahead, float* value, int64_t row) {
  for (int j = 0; j < positions; ++j) {
    int i = 0;
    for (; width - i >= kLanes; i += kLanes) {
      const int64_t element = int64_t{j} * width + i;
      store(value + j * row + i, load_codes<type>(v, element));
      fetch(v + code_bytes(type, element) + ahead);
    }
    if (i < width) {  // half a Vec, perhaps the last bytes of the cache
      uint8_t half[4 * kLanes] = {};
      std::memcpy(half, v + code_bytes(type, int64_t{j} * width + i), code_bytes(type, width - i));
      store(value + j * row + i, load_codes<type>(half, 0));
    }
  }
}

// Scale `group` of a position in an integer cache.
template <class Code>
CKDIST_INLINE float scale_at(const uint8_t* scales, int group, int position) {
  const int64_t at = int64_t{group} * kBlockTokens + position;
  if constexpr (sizeof(Code) == 1) return from_f16(reinterpret_cast<const uint16_t*>(scales)[at]);
  else return reinterpret_cast<const float*>(scales)[at];
}

// The same for integers: for dimension i and position j, codes[at(i, j)] times its scale.
template <class Code, class At, class Put>
void convert_codes(const uint8_t* codes, const uint8_t* scales, int width, int group, int positions, At&& at,
                   Put&& put) {
  const Code* code = reinterpret_cast<const Code*>(codes);
  for (int g = 0; g < width / group; ++g)
    for (int j = 0; j < positions; ++j) {
      const float scale = scale_at<Code>(scales, g, j);
      for (int i = g * group; i < (g + 1) * group; ++i) put(i, j, static_cast<float>(code_of(code, at(i, j))) * scale);
    }
}

template <class Code>
void convert_key_codes(const uint8_t* k, const uint8_t* scales, int width, int group, int positions, float* key) {
  convert_codes<Code>(
      k, scales, width, group, positions, [](int i, int j) { return (int64_t{i} / 2 * kBlockTokens + j) * 2 + i % 2; },
      [&](int i, int j, float x) { key[int64_t{i} * kLanes + j] = x; });
}

template <class Code>
void convert_value_codes(const uint8_t* v, const uint8_t* scales, int width, int group, int positions, float* value,
                         int64_t row) {
  convert_codes<Code>(
      v, scales, width, group, positions, [&](int i, int j) { return (int64_t{j} / 2 * width + i) * 2 + j % 2; },
      [&](int i, int j, float x) { value[j * row + i] = x; });
}

// A block's values (16, width), `row` floats apart: the first elements of its keys (key_width, 16).
void values_of_keys(const float* key, int width, float* value, int64_t row) {
  for (int i = 0; i < width; i += kLanes) {
    Vec tile[kLanes];
    for (int d = 0; d < kLanes; ++d) tile[d] = i + d < width ? load(key + (i + d) * kLanes) : set(0.0f);
    transpose(tile);
    for (int j = 0; j < kBlockTokens; ++j) store(value + j * row + i, tile[j]);
  }
}

// Converts the chunk's codes to floats in scratch memory, in the layout of f32 blocks, with V's rows padded to whole
// Vecs.
__attribute__((noinline)) Chunk convert(const AttentionTask& task, const Chunk& chunk, const Workspace& work) {
  Chunk out = chunk;
  out.v_row = work.width;
  const int k_width = task.key_width, v_width = task.value_width;
  const int k_group = key_group(task.cache()), v_group = group_of(task.value_type, v_width);
  for (int b = chunk.first; b < chunk.last; ++b) {
    float* key = work.keys + int64_t{b} * kLanes * k_width;
    float* value = work.values + int64_t{b} * kLanes * work.width;
    const uint8_t *k = chunk.k[b], *v = chunk.v[b];
    const int64_t ahead = chunk.ahead[b];
    const int positions = chunk.positions[b];
    out.k[b] = reinterpret_cast<const uint8_t*>(key);
    out.v[b] = reinterpret_cast<const uint8_t*>(value);
    out.ahead[b] = 0;
    switch (task.key_type) {
      case KvType::f32: convert_keys<KvType::f32>(k, k_width, ahead, key); break;
      case KvType::f16: convert_keys<KvType::f16>(k, k_width, ahead, key); break;
      case KvType::bf16: convert_keys<KvType::bf16>(k, k_width, ahead, key); break;
      case KvType::i16: convert_key_codes<int16_t>(k, chunk.k_scales[b], k_width, k_group, positions, key); break;
      case KvType::q8_0: convert_key_codes<int8_t>(k, chunk.k_scales[b], k_width, k_group, positions, key); break;
      case KvType::q4_0: convert_key_codes<Nibbles>(k, chunk.k_scales[b], k_width, k_group, positions, key); break;
    }
    if (task.latent) {
      values_of_keys(key, v_width, value, work.width);
      continue;
    }
    switch (task.value_type) {
      case KvType::f32: convert_values<KvType::f32>(v, v_width, positions, ahead, value, work.width); break;
      case KvType::f16: convert_values<KvType::f16>(v, v_width, positions, ahead, value, work.width); break;
      case KvType::bf16: convert_values<KvType::bf16>(v, v_width, positions, ahead, value, work.width); break;
      case KvType::i16:
        convert_value_codes<int16_t>(v, chunk.v_scales[b], v_width, v_group, positions, value, work.width);
        break;
      case KvType::q8_0:
        convert_value_codes<int8_t>(v, chunk.v_scales[b], v_width, v_group, positions, value, work.width);
        break;
      case KvType::q4_0:
        convert_value_codes<Nibbles>(v, chunk.v_scales[b], v_width, v_group, positions, value, work.width);
        break;
    }
  }
  return out;
}

// Packs the queries in groups of `rows`, so that the innermost loop reads them through one pointer.
void prepare_queries(const AttentionTask& task, const Workspace& work, int rows) {
  for (int64_t row = 0; row < work.queries; row += rows) {
    const int64_t count = work.queries - row < rows ? work.queries - row : rows;
    float* packed = work.q + row * task.key_width;  // (key_width, count)
    for (int64_t r = 0; r < count; ++r) {
      const float* q =
          task.q + (row + r) / task.heads * task.q_token_stride + (row + r) % task.heads * task.q_head_stride;
      if (is_rotated(task.key_type)) {
        std::memcpy(work.rotated, q, 4 * task.key_width);
        rotate_key(task.cache(), work.rotated);
        q = work.rotated;
      }
      for (int i = 0; i < task.key_width; ++i) packed[i * count + r] = q[i];
    }
  }
}

// The blocks of the chunk at `start`. The cache holds the positions [begin, end).
Chunk open_chunk(const AttentionTask& task, const BlockLayout& layout, int64_t start, int64_t begin, int64_t end) {
  Chunk chunk = {};
  chunk.first = start < begin ? static_cast<int>((begin - start) / kBlockTokens) : 0;
  chunk.last = end - start < kChunk ? static_cast<int>((end - start + kBlockTokens - 1) / kBlockTokens) : kChunkBlocks;
  chunk.v_row = task.value_width;
  for (int b = chunk.first; b < chunk.last; ++b) {
    const int32_t* entry = task.block_table + start / kBlockTokens + b;
    const uint8_t* block = task.kv + entry[0] * task.block_stride;
    const int64_t left = end - start - b * kBlockTokens;
    chunk.k[b] = block;
    chunk.v[b] = block + layout.v_offset;
    chunk.k_scales[b] = block + layout.k_scales_offset;
    chunk.v_scales[b] = block + layout.v_scales_offset;
    chunk.ahead[b] = left > kChunk ? (int64_t{entry[kChunkBlocks]} - entry[0]) * task.block_stride : 0;
    chunk.positions[b] = static_cast<int>(left < kBlockTokens ? left : kBlockTokens);
  }
  return chunk;
}

int rows_of_group(const Shape& shape) {
  const int64_t groups = (shape.queries + kGroup - 1) / kGroup;
  return static_cast<int>((shape.queries + groups - 1) / groups);
}

// `type`: of both keys and values, if they are read directly from the cache.
template <KvType type>
void attend_span(const AttentionTask& task, const Shape& shape, const Workspace& work, const SpanPart& part,
                 int64_t span, bool direct) {
  const BlockLayout layout(task.cache());
  const int rows = rows_of_group(shape);
  clear(shape, part);
  std::memset(work.sum, 0, 4 * work.queries * kLanes);
  const int64_t begin = task.begin(), end = task.end() < (span + 1) * kSpan ? task.end() : (span + 1) * kSpan;
  const int64_t from = begin > span * kSpan ? begin : span * kSpan;
  for (int64_t start = from / kChunk * kChunk; start < end; start += kChunk) {
    const Chunk chunk = open_chunk(task, layout, start, begin, task.end());
    const Chunk chunk_in_use = direct ? chunk : convert(task, chunk, work);
    for (int64_t row = 0; row < work.queries; row += rows) {
      const int count = static_cast<int>(work.queries - row < rows ? work.queries - row : rows);
      if (direct) attend_rows<type>(task, work, part, chunk_in_use, start, row, count);
      else attend_rows<KvType::f32>(task, work, part, chunk_in_use, start, row, count);
    }
  }
  for (int64_t row = 0; row < work.queries; ++row) {
    part.sum[row] = reduce_sum(load(work.sum + row * kLanes));
    part.unit[row] = 1.0f;
  }
}

void attend_span_of_type(const AttentionTask& task, const Shape& shape, const Workspace& work, const SpanPart& part,
                         int64_t span) {
  const KvType type = task.key_type;
  const bool whole = task.value_width % kLanes == 0;  // else a row of V ends in half a Vec
  const bool direct =
      whole && !task.latent && type == task.value_type && (type == KvType::f32 || work.queries <= kDirectQueries);
  if (!direct || type == KvType::f32) return attend_span<KvType::f32>(task, shape, work, part, span, direct);
  if (type == KvType::f16) return attend_span<KvType::f16>(task, shape, work, part, span, direct);
  attend_span<KvType::bf16>(task, shape, work, part, span, direct);
}

}  // namespace

int64_t float_scratch_floats(const CacheShape& cache, int tokens, int heads) {
  return Workspace(nullptr, cache, tokens, heads).floats;
}

void attend_float(const AttentionTask& task, float* scratch) {
  const Workspace work(scratch, task.cache(), task.tokens, task.heads);
  const Shape shape = shape_of(task);
  const SpanPart part(work.part, shape), state(work.state, shape);
  prepare_queries(task, work, rows_of_group(shape));
  clear(shape, state);
  for (int64_t span = task.first_span(); span < task.last_span(); ++span) {
    attend_span_of_type(task, shape, work, part, span);
    merge_part(shape, part, state, work.factors, 0, shape.lanes);
  }
  finish(task, shape, state);
}

void attend_float_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch) {
  const Workspace work(scratch, task.cache(), task.tokens, task.heads);
  const Shape shape = shape_of(task);
  prepare_queries(task, work, rows_of_group(shape));
  for (int64_t span = first; span < last; ++span)
    attend_span_of_type(task, shape, work, SpanPart(parts + (span - first) * shape.part_floats(), shape), span);
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
