#include "runtime/cache_arrays.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/delta_rule.h"
#include "kernels/kernels.h"

namespace ckdist {

const ckdist_cache_array* CacheArrays::find(ckdist_array name) const {
  const auto* const found = std::find_if(arrays, arrays + count, [=](const auto& array) { return array.name == name; });
  return found == arrays + count ? nullptr : found;
}

const ckdist_cache_array& CacheArrays::at(ckdist_array name) const {
  const auto* const found = find(name);
  if (found == nullptr) fail(Status::native, "a layer's cache of %d arrays has no array %d", count, int(name));
  return *found;
}

std::optional<CacheShape> CacheArrays::shape() const {
  if (const auto* const keys = find(ckdist_array_keys)) {
    const ckdist_cache_array& values = at(ckdist_array_values);
    return CacheShape{KvType(keys->type), KvType(values.type), keys->width, values.width, false};
  }
  if (const auto* const latent = find(ckdist_array_latent)) {
    const auto type = KvType(latent->type);
    const auto* const rope = find(ckdist_array_rope);
    return CacheShape{type, type, latent->width + (rope ? rope->width : 0), latent->width, true};
  }
  return std::nullopt;
}

std::optional<CacheShape> CacheArrays::index() const {
  const auto* const index = find(ckdist_array_index);
  if (index == nullptr) return std::nullopt;
  const auto type = KvType(index->type);
  if (type != KvType::f32 && type != KvType::f16 && type != KvType::i16)
    fail(Status::native, "an index of keys has the type %d; f32, f16 and i16 are possible", index->type);
  return CacheShape{type, type, index->width, index->width, true};
}

int64_t CacheArrays::index_offset() const {
  const std::optional<CacheShape> head = shape();
  return head && arrays[0].lifetime == ckdist_lifetime_token ? kernels().attention.block_bytes(*head) * arrays[0].heads
                                                             : 0;
}

int64_t CacheArrays::plain_offset(ckdist_array end) const {
  const std::optional<CacheShape> keys = index();
  int64_t bytes = index_offset() + (keys ? kernels().attention.block_bytes(*keys) : 0);
  for (const auto* array = arrays; array != arrays + count; array++)
    if (array->name >= ckdist_array_rows && array->name < end && array->lifetime == ckdist_lifetime_token)
      bytes += (kBlockTokens * array->width * (KvType(array->type) == KvType::f32 ? 4 : 2) + 63) / 64 * 64;
  return bytes;
}

int64_t CacheArrays::block_bytes() const { return plain_offset(ckdist_array(ckdist_array_index_entries + 1)); }

int64_t CacheArrays::state_floats() const {
  const auto* const state = find(ckdist_array_state);
  return state ? state->rows * state_columns(state->width) : 0;
}

int64_t CacheArrays::head_floats() const {
  const ckdist_cache_array* const convolution = find(ckdist_array_convolution);
  if (convolution == nullptr) return ring_offset(ckdist_array(ckdist_array_index_entries + 1));
  return (state_floats() + int64_t{convolution->rows} * convolution->width + 15) / 16 * 16;
}

int64_t CacheArrays::ring_offset(ckdist_array end) const {
  int64_t floats = 0;
  for (const auto* array = arrays; array != arrays + count; array++)
    if (array->name < end && array->lifetime == ckdist_lifetime_sequence)
      floats += (int64_t{array->heads} * array->rows * array->width + 15) / 16 * 16;
  return floats;
}

int64_t CacheArrays::slot_bytes() const {
  const ckdist_cache_array* const convolution = find(ckdist_array_convolution);
  return head_floats() * (convolution ? convolution->heads : 1) * int64_t{sizeof(float)};
}

int64_t block_stride(int64_t bytes) {
  constexpr int64_t kSets = 64 << 10, kShift = 4096 + 64;
  return bytes % kSets < kShift && bytes >= kSets ? bytes + kShift : bytes;
}

}  // namespace ckdist
