#include "comm/transports/verbs.h"

#include <sched.h>

#include <cmath>
#include <vector>

#include "comm/transports/verbs_frames.h"
#include "comm/transports/verbs_transport.h"
#include "core/error.h"

namespace ckdist {

int64_t Verbs::address_bytes(int size) {
  return int64_t(sizeof(VerbsHost)) + int64_t(size) * int64_t(sizeof(VerbsPair));
}

#if CKDIST_HAVE_VERBS

void Verbs::check_available() {
  int count = 0;
  ibv_device** devices = verbs_library().get_device_list(&count);
  if (devices) verbs_library().free_device_list(devices);
  if (!count) fail(Status::config, "this machine has no RDMA device");
}

std::unique_ptr<Verbs> Verbs::open(const char* device, int port, int gid_index, int rank, int size, double timeout_s) {
  constexpr int kMaxSize = 4096;
  if (size < 1 || size > kMaxSize || rank < 0 || rank >= size)
    fail(Status::config, "rank %d of %d; verbs connects up to %d ranks", rank, size, kMaxSize);
  if (!std::isfinite(timeout_s) || timeout_s <= 0 || timeout_s > 1e6)
    fail(Status::config, "a timeout of %g s; use 1 to 1000000", timeout_s);
  return std::make_unique<VerbsTransport>(device, port, gid_index, rank, size, timeout_s);
}

void Verbs::try_port(const char* name, int port, int gid_index, double seconds) {
  constexpr uint32_t kBytes = 1000;
  std::vector<uint8_t> from(kBytes), to(kBytes);
  VerbsDevice device(name, port, gid_index);
  for (uint32_t i = 0; i < kBytes; i++) from[i] = uint8_t(i * 7 + 1);
  const uint32_t local = device.register_memory(from.data(), kBytes, 0)->lkey;
  const uint32_t remote =
      device.register_memory(to.data(), kBytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)->rkey;
  device.make_queue(16);
  VerbsQueuePair near(device, 0, 4, 1), far(device, 1, 4, 1);
  const VerbsHost here = device.host();
  constexpr int kAckExponent = 14;  // acknowledgement within 67 ms
  near.connect(here, {uint64_t(to.data()), remote, far.number(), far.sequence(), 0}, kAckExponent);
  far.connect(here, {0, 0, near.number(), near.sequence(), 0}, kAckExponent);
  far.post_receive();
  near.write_frame(from.data(), kBytes, local, {uint64_t(to.data()), remote}, 5);
  const int64_t end = now_ns() + int64_t(seconds * 1e9);
  for (ibv_wc entry{};;) {
    const int count = ibv_poll_cq(device.queue(), 1, &entry);
    if (count < 0 || (count && entry.status != IBV_WC_SUCCESS))
      fail(Status::comm, "port %d of RDMA device %s carries no data: %s", port, name,
           count < 0 ? "its completion queue failed" : verbs_library().wc_status_str(entry.status));
    if (count && entry.opcode == IBV_WC_RECV_RDMA_WITH_IMM) break;
    if (now_ns() > end)
      fail(Status::comm, "port %d of RDMA device %s carries no data: nothing arrived within %.1f s", port, name,
           seconds);
    sched_yield();
  }
  if (from != to)
    fail(Status::comm, "port %d of RDMA device %s carries data wrongly: what was written is not what arrived", port,
         name);
}

#else

void Verbs::try_port(const char*, int, int, double) { check_available(); }

void Verbs::check_available() {
  fail(Status::config, "ckdist was built without RDMA verbs: install libibverbs-dev and build again");
}

std::unique_ptr<Verbs> Verbs::open(const char*, int, int, int, int, double) {
  check_available();
  return nullptr;
}

#endif

}  // namespace ckdist
