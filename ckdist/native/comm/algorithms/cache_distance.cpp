#include "comm/algorithms/cache_distance.h"

#include <algorithm>

namespace ckdist {

void CacheDistance::write_probe() {
  if (due()) rendezvous_.write_probe();
}

void CacheDistance::measure() {
  if (!due()) return;
  for (int i = 0; i < rendezvous_.size; i++)
    if (const int64_t ns = i == rendezvous_.index ? -1 : rendezvous_.read_probe(i); ns >= 0)
      measured_[i][measurements_ % kKept] = ns;
  measurements_++;
}

bool CacheDistance::distant(int i) const {
  return *std::min_element(measured_[i].begin(), measured_[i].end()) > kDistantNs;
}

bool CacheDistance::any_distant() const {
  for (int i = 0; i < rendezvous_.size; i++)
    if (distant(i)) return true;
  return false;
}

}  // namespace ckdist
