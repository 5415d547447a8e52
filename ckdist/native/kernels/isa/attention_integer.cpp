// Attention over an integer cache (i16, q8_0, q4_0): both products are dot products of 16-bit integers in pairs.
//
// On every ISA, one instruction does twice the products of a float multiplication, and it reads the cache without
// conversion. Queries become 16-bit codes with one scale each. Weights become integers in units of 2^-16 of the span's
// largest weight, and then codes. The rounding error is less than the error of float16 keys and values
// (tests/kernels/test_attention.py has both numbers). Integer sums are exact, so two shapes of the same work give the
// same bits. For few queries a lane is a position (scores) or a dimension (values), and each load of the cache serves
// all queries. For many queries a lane is a query, and the inner loop reads only broadcasts of the cache.
//
// Per span: scores, their largest, weights = round(2^16 exp(score - largest)), whose sum is exact in a float too, codes
// of weight times scale of V, and the weighted sums.
#include "kernels/isa/attention_typed.h"

namespace ckdist {
#ifdef __AMX_INT8__  // caches of fewer bits take vectors, in a part of the scratch memory that tiles have
namespace avx512_vnni {
void attend_bytes(const AttentionTask& task, float* scratch);
void attend_bytes_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch);
}  // namespace avx512_vnni
namespace bytes = avx512_vnni;
#else
namespace bytes = CKDIST_ISA;
#endif

namespace CKDIST_ISA {
namespace {

bool is_words(const AttentionTask& task) { return task.key_type == KvType::i16 && task.value_type == KvType::i16; }

}  // namespace

Shape shape_of_integers(const AttentionTask& task) {
  Shape shape = shape_of(task);
  shape.by_lane = shape.by_lane && !in_tiles(task);
  return shape;
}

int64_t integer_scratch_floats(const CacheShape& cache, int tokens, int heads) {
  return Workspace(nullptr, cache, tokens, heads).floats;
}

void attend_integer(const AttentionTask& task, float* scratch) {
  if (is_words(task)) attend_typed<int16_t, int16_t>(task, scratch);
  else bytes::attend_bytes(task, scratch);
}

void attend_integer_spans(const AttentionTask& task, int64_t first, int64_t last, float* parts, float* scratch) {
  if (is_words(task)) attend_spans<int16_t, int16_t>(task, first, last, parts, scratch);
  else bytes::attend_bytes_spans(task, first, last, parts, scratch);
}

}  // namespace CKDIST_ISA
}  // namespace ckdist
