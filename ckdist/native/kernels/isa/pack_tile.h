// Packs stored rows to a tile, at memory speed. Private to isa/.
#pragma once
#include <cstdint>

#include "core/dtype.h"

namespace ckdist {
namespace CKDIST_VECTORS {

// Implements LinearKernel::pack.
template <Type type>
void pack_tile(const uint8_t* const* source_rows, int rows, int64_t cols, uint8_t* tile);

}  // namespace CKDIST_VECTORS
}  // namespace ckdist
