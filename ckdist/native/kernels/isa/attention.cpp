#include "kernels/attention.h"
#include <cmath>
namespace ckdist {
namespace CKDIST_ISA {
namespace {
int64_t block_bytes(KvType, int hd) { return 2 * 16 * hd * 4; }
void store(KvType, uint8_t* b, int slot, int hd, const float* k, const float* v) {
  float* f = reinterpret_cast<float*>(b);
  for (int d = 0; d < hd; d++) f[d * 16 + slot] = k[d], f[16 * hd + slot * hd + d] = v[d];
}
int64_t scratch_bytes(int, int, int) { return 1 << 20; }
void attend(const AttentionTask& t, uint8_t* scratch) {
  float* s = reinterpret_cast<float*>(scratch);
  for (int i = 0; i < t.tokens; i++)
    for (int h = 0; h < t.heads; h++) {
      const float* q = t.q + i * t.q_token_stride + h * t.q_head_stride;
      float* o = t.out + i * t.out_token_stride + h * t.out_head_stride;
      int64_t last = t.first_position + i, first = t.window && last + 1 > t.window ? last + 1 - t.window : 0;
      float m = -INFINITY, sum = 0;
      for (int64_t p = first; p <= last; p++) {
        const float* k = reinterpret_cast<const float*>(t.kv + t.block_table[p / 16] * t.block_stride);
        float x = 0;
        for (int d = 0; d < t.head_dim; d++) x += q[d] * k[d * 16 + p % 16];
        x *= t.scale;
        if (t.soft_cap != 0) x = t.soft_cap * std::tanh(x / t.soft_cap);
        s[p] = x;
        m = x > m ? x : m;
      }
      for (int d = 0; d < t.head_dim; d++) o[d] = 0;
      for (int64_t p = first; p <= last; p++) {
        const float* v = reinterpret_cast<const float*>(t.kv + t.block_table[p / 16] * t.block_stride) + 16 * t.head_dim + p % 16 * t.head_dim;
        float e = std::exp(s[p] - m);
        sum += e;
        for (int d = 0; d < t.head_dim; d++) o[d] += e * v[d];
      }
      for (int d = 0; d < t.head_dim; d++) o[d] /= sum;
    }
}
}
extern const AttentionKernel attention_kernel = {block_bytes, store, scratch_bytes, attend};
}
}
