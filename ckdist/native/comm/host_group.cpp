#include "comm/host_group.h"

#include <cstring>
#include <numeric>

#include "core/error.h"

namespace ckdist {

namespace {

constexpr int64_t kPage = 4096;

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

std::vector<int> numbered(int rank, int size) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
    fail(Status::config, "rank %d of %d ranks on one host; at most %d are supported", rank, size, kMaxRanks);
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

HostGroup::HostGroup(const std::string& path, int rank, int size, int spins, double timeout_s)
    : Group(rank, size), ranks_(path, rank, numbered(rank, size), spins, timeout_s) {}

void HostGroup::reserve(const GroupSizes& sizes) {
  sizes_ = sizes;
  partial_bytes_ = round_up(sizes.partial_floats * 4, kPage);
  const int64_t logits_offset = partial_bytes_ * kSlots * size;
  const int64_t bytes =
      logits_offset + round_up(sizes.logit_rows * sizes.vocab * 4, kPage) + round_up(sizes.message_ints * 4, kPage);
  data_ = ranks_.share(bytes, sizes.message_ints);
  logits_ = reinterpret_cast<float*>(data_ + logits_offset);
  std::memset(partial(0), 0, partial_bytes_ * kSlots);  // first touch by the owner
  ranks_.meet(kStart);
}

int HostGroup::parts(int slot, const float** out) {
  for (int r = 0; r < size; r++) out[r] = part(r, slot);
  return size;
}

float* HostGroup::logits(int64_t* stride) {
  *stride = sizes_.vocab;
  return logits_ + sizes_.first_column;
}

}  // namespace ckdist
