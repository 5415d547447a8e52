// Attention of level amx, compiled with the model of tiles. Python calls it like the library's.
#include "kernels/kernels.h"

namespace ckdist {

const char* tile_fault = nullptr;
int64_t tile_rows = 0, tile_live = 0;

namespace amx {
extern const AttentionKernel attention_kernel;
}

const Kernels& kernels() {
  static const Kernels of_amx = [] {
    Kernels k = {};
    k.attention = amx::attention_kernel;
    return k;
  }();
  return of_amx;
}
const Kernels& kernels_named(const char*) { return kernels(); }

}  // namespace ckdist

extern "C" {
const char* tile_faults(void) { return ckdist::tile_fault ? ckdist::tile_fault : ""; }
int64_t tile_row_products(void) { return ckdist::tile_rows; }
int64_t tile_is_live(void) { return ckdist::tile_live; }
}
