// C functions for tests of the AMX products, compiled with the model of tiles, called from Python. Products of few
// tokens, which the level below computes, leave y unchanged.
#include <vector>

#include "core/dtype.h"
#include "kernels/interleaved.h"
#include "kernels/linear.h"
#include "kernels/machine.h"
#include "kernels/prefetch.h"

namespace ckdist {
const bool weights_fetched = true;

const char* tile_fault = nullptr;
int64_t tile_rows = 0, tile_live = 0;

namespace avx512_vnni {  // computes products of few tokens
static void leave(const Matrix&, int64_t, int64_t, const uint8_t*, int64_t, int64_t, float*, int64_t) {}
static KernelTable all_left() {
  KernelTable table;
  for (LinearKernel& kernel : table.of)
    kernel = {ActivationFormat::f32, nullptr, nullptr, nullptr, leave, ActivationFormat::f32, nullptr};
  return table;
}
extern const KernelTable ordered_kernels = all_left(), interleaved_kernels = all_left();
}  // namespace avx512_vnni

namespace amx {
extern const KernelTable ordered_kernels, interleaved_kernels;
extern const LinearKernel bf16_kernel;
extern const KernelTable float8_kernels;
extern const MachineKernel machine_kernel;
}  // namespace amx

}  // namespace ckdist

using namespace ckdist;

extern "C" {

void tile_multiply(int type, int64_t rows, int64_t cols, const uint8_t* tiles, int64_t begin, int64_t end,
                   const uint8_t* x, int64_t x_stride, int64_t tokens, float* y) {
  const LinearKernel& kernel = static_cast<Type>(type) == Type::bf16     ? amx::bf16_kernel
                               : is_float8(static_cast<Type>(type))      ? amx::float8_kernels.of[type]
                               : is_interleaved(static_cast<Type>(type)) ? amx::interleaved_kernels.of[type]
                                                                         : amx::ordered_kernels.of[type];
  kernel.multiply({static_cast<Type>(type), rows, cols, kernel.tile_bytes(cols), tiles}, begin, end, x, x_stride,
                  tokens, y, rows);
}

void tile_multiply_prompt(int type, int64_t rows, int64_t cols, const uint8_t* tiles, int64_t begin, int64_t end,
                          const uint8_t* x, int64_t x_stride, int64_t tokens, float* y) {
  static std::vector<uint8_t> room(kPromptBytes + 64);
  const KernelTable& table = is_interleaved(static_cast<Type>(type)) ? amx::interleaved_kernels : amx::ordered_kernels;
  const LinearKernel& kernel = table.of[type];
  kernel.multiply_prompt({static_cast<Type>(type), rows, cols, kernel.tile_bytes(cols), tiles}, begin, end, x, x_stride,
                         tokens, y, rows, room.data() + (-reinterpret_cast<uintptr_t>(room.data()) & 63));
}

int64_t tile_peak(int format, int64_t rounds) {
  uint64_t sink = 0;
  return amx::machine_kernel.multiply_add(static_cast<ActivationFormat>(format), rounds, &sink);
}

const char* tile_faults(void) { return tile_fault ? tile_fault : ""; }
int64_t tile_row_products(void) { return tile_rows; }
int64_t tile_is_live(void) { return tile_live; }
}
