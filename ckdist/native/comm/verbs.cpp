#include "comm/verbs.h"

#include <cmath>

#include "comm/verbs_transport.h"
#include "comm/verbs_wire.h"
#include "core/error.h"

namespace ckdist {

int64_t Verbs::address_bytes(int size) { return int64_t(sizeof(VerbsHost)) + int64_t(size) * int64_t(sizeof(VerbsPair)); }

#if CKDIST_HAVE_VERBS

void Verbs::check_available() {
  int count = 0;
  ibv_device** devices = verbs_library().get_device_list(&count);
  if (devices) verbs_library().free_device_list(devices);
  if (!count) fail(Status::config, "this machine has no RDMA device");
}

std::unique_ptr<Verbs> Verbs::open(const char* device, int port, int gid_index, int rank, int size, double timeout_s) {
  constexpr int kMaxSize = 4096;
  if (size < 1 || size > kMaxSize || rank < 0 || rank >= size) fail(Status::config, "rank %d of %d; verbs connects up to %d ranks", rank, size, kMaxSize);
  if (!std::isfinite(timeout_s) || timeout_s <= 0 || timeout_s > 1e6) fail(Status::config, "a timeout of %g s; use 1 to 1000000", timeout_s);
  return std::make_unique<VerbsTransport>(device, port, gid_index, rank, size, timeout_s);
}

#else

void Verbs::check_available() { fail(Status::config, "ckdist was built without RDMA verbs: install libibverbs-dev and build again"); }

std::unique_ptr<Verbs> Verbs::open(const char*, int, int, int, int, double) {
  check_available();
  return nullptr;
}

#endif

}  // namespace ckdist
