#include "core/export.h"

#include "api/group.h"
#include "bindings/group_handle.h"
#include "bindings/wire_handle.h"
#include "comm/host_group.h"
#include "comm/wire_group.h"
#include "comm/wire_time.h"
#include "core/error.h"

using namespace ckdist;

extern "C" {

int ckdist_host_group(const char* path, int32_t rank, int32_t size, int32_t spins, double timeout_s,
                      ckdist_group** out) {
  return guard([&] {
    auto host = std::make_unique<HostGroup>(path ? path : "", rank, size, spins, timeout_s);
    const std::string own = host->path();
    *out = new ckdist_group{std::move(host), own};
  });
}
int ckdist_wire_group(ckdist_wire* wire, const char* path, int32_t rank, int32_t size, const int32_t* host_of,
                      int64_t direct_bytes, int64_t leaders_bytes, int32_t spins, double timeout_s,
                      ckdist_group** out) {
  return guard([&] {
    if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
      fail(Status::config, "rank %d of %d ranks; at most %d are supported", rank, size, kMaxRanks);
    if (wire->wire->transport->size != size || wire->wire->transport->rank != rank)
      fail(Status::config, "rank %d of %d over a wire of rank %d of %d", rank, size, wire->wire->transport->rank,
           wire->wire->transport->size);
    auto group = std::make_unique<WireGroup>(
        path ? path : "",
        WireGroup::Settings{
            wire->wire, rank, {host_of, host_of + size}, direct_bytes, leaders_bytes, spins, timeout_s});
    const std::string own = group->path();
    *out = new ckdist_group{std::move(group), own};
  });
}
int ckdist_wire_time(ckdist_wire* wire, int32_t peer, int64_t bytes, int32_t calls, double* out) {
  return guard([&] { *out = time_exchange(*wire->wire->transport, peer, bytes, calls); });
}
const char* ckdist_group_path(ckdist_group* group) { return group->path.c_str(); }
void ckdist_group_free(ckdist_group* group) { delete group; }
int ckdist_group_check_peers(ckdist_group* group) {
  return guard([&] { group->group->check_peers(); });
}

int ckdist_group_reserve(ckdist_group* group, int64_t partial_floats, int64_t logit_rows, int64_t vocab,
                         int64_t first_column, int64_t columns, int64_t message_ints) {
  return guard(
      [&] { group->group->reserve({partial_floats, logit_rows, vocab, first_column, columns, message_ints}); });
}
int ckdist_group_publish(ckdist_group* group, const int32_t* message, int64_t ints) {
  return guard([&] { group->group->publish(message, ints); });
}
int ckdist_group_receive(ckdist_group* group, const int32_t** message, int64_t* ints) {
  return guard([&] { *message = group->group->receive(ints); });
}
float* ckdist_group_partial(ckdist_group* group, int32_t slot) { return group->group->partial(slot); }
int ckdist_group_reduce(ckdist_group* group, int32_t slot, int64_t floats, int32_t step) {
  return guard([&] { group->group->reduce(slot, floats, step, {}); });
}
int ckdist_group_parts(ckdist_group* group, int32_t slot, const float** parts) {
  return group->group->parts(slot, parts);
}
float* ckdist_group_logits(ckdist_group* group, int64_t* stride) { return group->group->logits(stride); }
int ckdist_group_gather(ckdist_group* group, int64_t rows, int32_t step) {
  return guard([&] { group->group->gather(rows, step); });
}
const float* ckdist_group_gathered(ckdist_group* group) { return group->group->gathered(); }
int ckdist_group_leave(ckdist_group* group) {
  return guard([&] { group->group->leave(); });
}
void ckdist_group_abandon(ckdist_group* group, const char* reason) { group->group->abandon(reason); }
}
