// Common parts of the attention kernels: a span's part of the result, and merging parts one after another. Private to
// isa/.
//
// Dao et al. 2022, arXiv:2205.14135: for each span and query, the largest score, the sum of the weights relative to it,
// and the values' weighted sum. Merging rescales by exp(largest so far - new largest). A span that a query does not see
// changes none of its bits: the largest stays, earlier sums are multiplied by exactly 1, and zeros are added.
#pragma once
#include "kernels/attention.h"
#include "kernels/isa/attention_block.h"

namespace ckdist {
namespace CKDIST_VECTORS {

constexpr int kFew = 8;  // maximum number of queries by row over an integer cache

constexpr int64_t round_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Many queries are in lanes from start to end. If there are few, each has a row.
struct Shape {
  int64_t queries, lanes;  // lanes: queries in whole Vecs
  int columns, group;      // columns of values; columns that share a unit
  int64_t width;           // columns in whole Vecs
  bool by_lane;            // values are (Vecs of queries, columns, 16), else (queries, width)
  float whole;             // the weight of the largest score in the units of sums

  int groups() const { return columns / group; }
  int64_t values() const { return by_lane ? lanes * columns : queries * width; }
  int64_t part_floats() const { return lanes * (2 + groups()) + round_lanes(values()); }
};

// The part of a span, or of all spans so far. All except values are in lanes of queries.
struct SpanPart {
  float* largest;  // (lanes,)
  float* sum;      // (lanes,): sum of weights exp(score - largest) * Shape::whole
  float* unit;     // (groups, lanes): a weighted sum is value * unit
  float* values;   // layout as in Shape

  SpanPart(float* base, const Shape& shape)
      : largest(base),
        sum(base + shape.lanes),
        unit(base + 2 * shape.lanes),
        values(base + (2 + shape.groups()) * shape.lanes) {}
};

Shape shape_of(const AttentionTask& task);
void clear(const Shape& shape, const SpanPart& state);
void clear_lanes(const Shape& shape, const SpanPart& state);  // everything except the values
// Merges everything except the values of lanes [first, last) of a part into the state. factors: (1 + groups, lanes), of
// the state's values and of the part's.
void merge_lanes(const Shape& shape, const SpanPart& part, const SpanPart& state, float* factors, int64_t first,
                 int64_t last);
// Merges lanes [first, last) of a part into the state. The state's units are all 1 and not stored. factors: scratch
// memory, (1 + groups, lanes).
void merge_part(const Shape& shape, const SpanPart& part, const SpanPart& state, float* factors, int64_t first,
                int64_t last);
// 1 / sum for the sixteen queries from `at` on, where the sum includes the task's sinks: scores without a value.
Vec inverse_sums(const AttentionTask& task, const Shape& shape, const SpanPart& state, int64_t at);
// out = values / sum, where the sum includes the task's sinks.
void finish(const AttentionTask& task, const Shape& shape, const SpanPart& state);

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
