#include "comm/reach.h"

#include <algorithm>

namespace ckdist {

void Reach::mark() {
  if (due()) meeting_.mark();
}

void Reach::look() {
  if (!due()) return;
  for (int i = 0; i < meeting_.size; i++)
    if (const int64_t ns = i == meeting_.index ? -1 : meeting_.fetch_mark(i); ns >= 0) felt_[i][looks_ % kLooks] = ns;
  looks_++;
}

bool Reach::far(int i) const { return *std::min_element(felt_[i].begin(), felt_[i].end()) > kFarNs; }

bool Reach::any_far() const {
  for (int i = 0; i < meeting_.size; i++)
    if (far(i)) return true;
  return false;
}

}  // namespace ckdist
