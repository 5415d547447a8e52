#include "api/trace_api.h"
#include "bindings/trace_handle.h"
#include "core/error.h"

using namespace ckdist;

namespace {
TraceLane* lane_of(ckdist_trace_lane* lane) { return reinterpret_cast<TraceLane*>(lane); }
}  // namespace

int ckdist_trace_new(int64_t events, ckdist_trace** out) {
  return guard([&] {
    if (events < 1 || events > 1 << 24)
      fail(Status::config, "a lane of %lld events: from 1 to %d are possible", (long long)events, 1 << 24);
    *out = new ckdist_trace(events);
  });
}
void ckdist_trace_free(ckdist_trace* trace) { delete trace; }
int ckdist_trace_add_lane(ckdist_trace* trace, const char* name, ckdist_trace_lane** out) {
  return guard([&] { *out = reinterpret_cast<ckdist_trace_lane*>(trace->lane(name)); });
}
void ckdist_trace_add(ckdist_trace_lane* lane, int32_t kind, int64_t begin, int64_t end, int32_t first, int32_t second,
                      int32_t third) {
  lane_of(lane)->add(kind, begin, end, first, second, third);
}
int32_t ckdist_trace_lanes(ckdist_trace* trace) { return trace->lanes(); }
const char* ckdist_trace_lane_name(ckdist_trace* trace, int32_t lane) { return (*trace)[lane].name.c_str(); }
int64_t ckdist_trace_read(ckdist_trace* trace, int32_t lane, ckdist_trace_event* out, int64_t* dropped) {
  return (*trace)[lane].read(out, dropped);
}
