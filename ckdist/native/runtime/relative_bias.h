// Relative position biases by distance, in the form that attention kernels read. Built once from the bucketed weights.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "api/executable_api.h"

namespace ckdist {

// Biases of a rank's heads: (heads, 2 * reach + 1), from distance -reach on.
struct RelativeBias {
  int64_t reach = 0;
  std::vector<float> rows;

  const float* of(int64_t head) const { return rows.data() + head * (2 * reach + 1); }
};
using RelativeBiases = std::map<const float*, RelativeBias>;  // by the weights that a step of a plan reads

// Builds the biases of all steps of a plan.
void read_biases(const ckdist_program& program, const ckdist_execution_plan& plan, RelativeBiases& biases);

}  // namespace ckdist
