#include "api/topology_api.h"
#include "core/error.h"
#include "core/numa.h"

using namespace ckdist;

namespace {
constexpr int kMostSamples = 1 << 16;
}

int ckdist_place_memory(const int32_t* nodes, int32_t count, int32_t sharers) {
  return guard([&] {
    if (count < 0 || sharers < 1)
      fail(Status::config, "%d memory nodes shared by %d ranks: at least 0 and 1 are needed", count, sharers);
    set_memory_nodes({std::vector<int>(nodes, nodes + count), sharers});
  });
}
int32_t ckdist_page_nodes(const void* address, int64_t bytes, int32_t samples, int32_t touch, int32_t* nodes) {
  int32_t result = 0;
  const int status = guard([&] {
    if (!address || bytes <= 0 || samples < 1 || samples > kMostSamples)
      fail(Status::config, "%d samples of %lld bytes: 1 to %d samples of at least one byte are needed", samples,
           static_cast<long long>(bytes), kMostSamples);
    result = page_nodes(const_cast<uint8_t*>(static_cast<const uint8_t*>(address)), bytes, samples, touch != 0, nodes);
  });
  return status < 0 ? -22 : result;  // EINVAL
}
int32_t ckdist_memory_policy(const void* address) { return memory_policy(address); }
int32_t ckdist_request_amx(void) { return request_amx(); }
