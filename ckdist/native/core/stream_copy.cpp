#include "core/stream_copy.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
// gcc 12 warns about its own headers.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace ckdist {
namespace {

void copy_plain(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

#if defined(__x86_64__)
constexpr int64_t kLine = 64;

// The part of a copy that is whole lines of `to`. The bytes before and after it are copied with plain stores.
struct Body {
  uint8_t* to;
  const uint8_t* from;
  int64_t lines;
};
Body copy_ends(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes <= 0) return {to, from, 0};
  const int64_t gap = -reinterpret_cast<int64_t>(to) & (kLine - 1), head = gap < bytes ? gap : bytes,
                lines = (bytes - head) / kLine;
  const int64_t tail = bytes - head - lines * kLine;
  std::memcpy(to, from, static_cast<size_t>(head));
  std::memcpy(to + bytes - tail, from + bytes - tail, static_cast<size_t>(tail));
  return {to + head, from + head, lines};
}

void copy_16(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const Body body = copy_ends(to, from, bytes);
  for (int64_t i = 0; i < body.lines * kLine; i += kLine) {
    const __m128i* in = reinterpret_cast<const __m128i*>(body.from + i);
    __m128i* out = reinterpret_cast<__m128i*>(body.to + i);
    const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2),
                  d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
}

__attribute__((target("avx2"))) void copy_32(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const Body body = copy_ends(to, from, bytes);
  for (int64_t i = 0; i < body.lines * kLine; i += kLine) {
    const __m256i* in = reinterpret_cast<const __m256i*>(body.from + i);
    __m256i* out = reinterpret_cast<__m256i*>(body.to + i);
    const __m256i a = _mm256_loadu_si256(in), b = _mm256_loadu_si256(in + 1);
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
  }
}

__attribute__((target("avx512f"))) void copy_64(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const Body body = copy_ends(to, from, bytes);
  for (int64_t i = 0; i < body.lines * kLine; i += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(body.to + i), _mm512_loadu_si512(body.from + i));
}
#endif

StreamCopy choose() {
  const char* isa = std::getenv("CKDIST_ISA");
  const int most = !isa ? 64 : !std::strcmp(isa, "baseline") ? 16 : !std::strncmp(isa, "avx2", 4) ? 32 : 64;
  for (int bytes = most; bytes >= 16; bytes /= 2)
    if (const StreamCopy copy = stream_copy_of(bytes)) return copy;
  return copy_plain;
}

}  // namespace

StreamCopy stream_copy_of([[maybe_unused]] int vector_bytes) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (vector_bytes == 16) return copy_16;
  if (vector_bytes == 32 && __builtin_cpu_supports("avx2")) return copy_32;
  if (vector_bytes == 64 && __builtin_cpu_supports("avx512f")) return copy_64;
#endif
  return nullptr;
}

StreamCopy widest_stream_copy() {
  static const StreamCopy chosen = choose();
  return chosen;
}

void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace ckdist
