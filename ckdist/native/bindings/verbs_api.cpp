#include "api/verbs_api.h"
#include "bindings/communicator_handles.h"
#include "core/error.h"

using ckdist::guard;
using ckdist::Verbs;

namespace {

template <class F>
int with(ckdist_verbs* verbs, F&& body) {
  return guard([&] {
    if (!verbs || !verbs->transport) ckdist::fail(ckdist::Status::native, "the verbs transport is closed");
    body(*verbs->transport);
  });
}

}  // namespace

int ckdist_verbs_available(void) {
  return guard([] { Verbs::check_available(); });
}
int ckdist_verbs_try(const char* device, int32_t port, int32_t gid_index, double seconds) {
  return guard([&] { Verbs::try_port(device, port, gid_index, seconds); });
}

int ckdist_verbs_open(const char* device, int32_t port, int32_t gid_index, int32_t rank, int32_t size, double timeout,
                      ckdist_verbs** out) {
  return guard([&] { *out = new ckdist_verbs{Verbs::open(device, port, gid_index, rank, size, timeout)}; });
}
int64_t ckdist_verbs_address_bytes(int32_t size) { return Verbs::address_bytes(size); }
int ckdist_verbs_address(ckdist_verbs* verbs, uint8_t* out) {
  return with(verbs, [&](Verbs& v) { v.address(out); });
}
int ckdist_verbs_connect(ckdist_verbs* verbs, const uint8_t* addresses) {
  return with(verbs, [&](Verbs& v) { v.connect(addresses); });
}
void ckdist_verbs_free(ckdist_verbs* verbs) { delete verbs; }

int ckdist_verbs_register(ckdist_verbs* verbs, void* base, int64_t bytes) {
  return with(verbs, [&](Verbs& v) { v.register_memory(base, bytes); });
}
int ckdist_verbs_isend(ckdist_verbs* verbs, int32_t peer, int32_t tag, const void* data, int64_t bytes,
                       uint64_t* request) {
  return with(verbs, [&](Verbs& v) { *request = v.isend(peer, tag, data, bytes); });
}
int ckdist_verbs_irecv(ckdist_verbs* verbs, int32_t peer, int32_t tag, void* data, int64_t bytes, uint64_t* request) {
  return with(verbs, [&](Verbs& v) { *request = v.irecv(peer, tag, data, bytes); });
}
int ckdist_verbs_expose(ckdist_verbs* verbs, int32_t window, void* base, int64_t bytes) {
  return with(verbs, [&](Verbs& v) { v.expose(window, base, bytes); });
}
int ckdist_verbs_iput(ckdist_verbs* verbs, int32_t peer, int32_t window, int64_t offset, const void* data,
                      int64_t bytes, uint64_t* request) {
  return with(verbs, [&](Verbs& v) { *request = v.iput(peer, window, offset, data, bytes); });
}
int ckdist_verbs_iget(ckdist_verbs* verbs, int32_t peer, int32_t window, int64_t offset, void* data, int64_t bytes,
                      uint64_t* request) {
  return with(verbs, [&](Verbs& v) { *request = v.iget(peer, window, offset, data, bytes); });
}
int ckdist_verbs_inotify(ckdist_verbs* verbs, int32_t peer, int32_t window, int32_t slot, uint64_t* request) {
  return with(verbs, [&](Verbs& v) { *request = v.inotify(peer, window, slot); });
}
int ckdist_verbs_notified(ckdist_verbs* verbs, int32_t window, int32_t slot, uint64_t* count) {
  return with(verbs, [&](Verbs& v) { *count = v.notified(window, slot); });
}
int ckdist_verbs_wait(ckdist_verbs* verbs, uint64_t request, int32_t peer, const char* what) {
  return with(verbs, [&](Verbs& v) { v.wait(request, peer, what); });
}
int ckdist_verbs_abandon(ckdist_verbs* verbs, const char* reason) {
  return with(verbs, [&](Verbs& v) { v.abandon(reason); });
}
