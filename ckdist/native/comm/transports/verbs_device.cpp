#include "comm/transports/verbs_device.h"

#if CKDIST_HAVE_VERBS
#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/futex.h"

namespace ckdist {

namespace {

constexpr unsigned kAcknowledge = 64;  // completion events are acknowledged in batches, because it takes a lock

void make_nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

VerbsDevice::VerbsDevice(const char* name, int port, int gid_index)
    : name(name), port(port), gid_index(gid_index), verbs_(verbs_library()) {
  try {
    open(name);
  } catch (...) {
    close();
    throw;
  }
}

VerbsDevice::~VerbsDevice() { close(); }

void VerbsDevice::open(const char* wanted) {
  int count = 0;
  ibv_device** devices = verbs_.get_device_list(&count);
  ibv_device* found = nullptr;
  std::string names;
  for (int i = 0; i < count; i++) {
    const char* name = verbs_.get_device_name(devices[i]);
    if (!std::strcmp(name, wanted)) found = devices[i];
    names += (i ? ", " : "") + std::string(name);
  }
  if (found) context_ = verbs_.open_device(found);
  const int reason = errno;
  if (devices) verbs_.free_device_list(devices);
  if (!found)
    fail(Status::config, "there is no RDMA device %s; this machine has %s", wanted, count ? names.c_str() : "none");
  if (!context_) fail(Status::config, "RDMA device %s cannot be opened: %s", wanted, std::strerror(reason));

  if (verbs_.query_device(context_, &attributes))
    fail(Status::config, "RDMA device %s does not tell its limits", wanted);
  // The plain function fills the fields that all versions of the library have. Only those are used.
  if (port < 1 ||
      verbs_.query_port(context_, uint8_t(port), reinterpret_cast<_compat_ibv_port_attr*>(&port_attributes)))
    fail(Status::config, "RDMA device %s has no port %d; it has %d", wanted, port, attributes.phys_port_cnt);
  if (port_attributes.state != IBV_PORT_ACTIVE)
    fail(Status::config, "port %d of RDMA device %s is not active: bring its link up", port, wanted);
  if (gid_index < 0 || verbs_.query_gid(context_, uint8_t(port), gid_index, &gid))
    fail(Status::config, "port %d of RDMA device %s has no GID %d", port, wanted, gid_index);

  domain_ = verbs_.alloc_pd(context_);
  channel_ = verbs_.create_comp_channel(context_);
  if (!domain_ || !channel_)
    fail(Status::capacity, "RDMA device %s has no room for another process: %s", wanted, std::strerror(errno));
  make_nonblocking(context_->async_fd);
  make_nonblocking(channel_->fd);
}

void VerbsDevice::close() {
  for (ibv_mr* region : regions_) verbs_.dereg_mr(region);
  if (queue_) {
    if (unacknowledged_) verbs_.ack_cq_events(queue_, unacknowledged_);
    verbs_.destroy_cq(queue_);
  }
  if (channel_) verbs_.destroy_comp_channel(channel_);
  if (domain_) verbs_.dealloc_pd(domain_);
  if (context_) verbs_.close_device(context_);
}

VerbsHost VerbsDevice::host() const {
  VerbsHost host{{'c', 'k', 'v', 'e', 'r', 'b', 's', '1'},
                 0,
                 kVerbsSlotBytes,
                 port_attributes.lid,
                 uint8_t(port_attributes.active_mtu),
                 ethernet(),
                 uint32_t(std::clamp(attributes.max_qp_rd_atom, 0, 16)),
                 {}};
  std::memcpy(host.gid, &gid, sizeof host.gid);
  return host;
}

void VerbsDevice::make_queue(int entries) {
  queue_ = verbs_.create_cq(context_, entries, nullptr, channel_, 0);
  if (!queue_)
    fail(Status::capacity, "RDMA device %s has no completion queue of %d entries: %s", name.c_str(), entries,
         std::strerror(errno));
}

ibv_mr* VerbsDevice::register_memory(const void* base, int64_t bytes, int access) {
  ibv_mr* region = verbs_.reg_mr(domain_, const_cast<void*>(base), size_t(bytes), access);
  if (!region) {
    const int reason = errno;
    fail(Status::capacity, "%lld bytes cannot be registered with RDMA device %s: %s%s", (long long)bytes, name.c_str(),
         std::strerror(reason),
         reason == ENOMEM || reason == EPERM ? "; raise the limit of locked memory (ulimit -l unlimited)" : "");
  }
  regions_.push_back(region);
  return region;
}

void VerbsDevice::release(ibv_mr* region) {
  const auto at = std::find(regions_.rbegin(), regions_.rend(), region);  // the newest are released first
  if (at == regions_.rend()) return;
  regions_.erase(std::next(at).base());
  verbs_.dereg_mr(region);
}

void VerbsDevice::arm() { ibv_req_notify_cq(queue_, 0); }

void VerbsDevice::sleep(int64_t ns) {
  pollfd fds[2] = {{channel_->fd, POLLIN, 0}, {context_->async_fd, POLLIN, 0}};
  const timespec most{ns / 1000000000, ns % 1000000000};
  if (ppoll(fds, 2, &most, nullptr) <= 0 || !(fds[0].revents & POLLIN)) return;
  ibv_cq* queue;
  void* unused;
  if (verbs_.get_cq_event(channel_, &queue, &unused) == 0 && ++unacknowledged_ == kAcknowledge) {
    verbs_.ack_cq_events(queue_, unacknowledged_);
    unacknowledged_ = 0;
  }
}

bool VerbsDevice::take_event(ibv_qp** failed) {
  *failed = nullptr;
  pollfd ready{context_->async_fd, POLLIN, 0};
  ibv_async_event event;
  if (poll(&ready, 1, 0) <= 0 || verbs_.get_async_event(context_, &event)) return false;
  switch (event.event_type) {
    case IBV_EVENT_PORT_ERR:
      if (event.element.port_num == port && !down_since_) down_since_ = now_ns();
      break;
    case IBV_EVENT_PORT_ACTIVE:
      if (event.element.port_num == port) down_since_ = 0;
      break;
    case IBV_EVENT_DEVICE_FATAL:
    case IBV_EVENT_CQ_ERR: lost_ = true; break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR: *failed = event.element.qp; break;
    default: break;
  }
  verbs_.ack_async_event(&event);
  return true;
}

}  // namespace ckdist
#endif
