// One open port of an RDMA device: protection domain, completion queue with its channel, registered memory, events.
#pragma once
#include "comm/transports/verbs_frames.h"
#include "comm/transports/verbs_library.h"

#if CKDIST_HAVE_VERBS
#include <cstdint>
#include <string>
#include <vector>

namespace ckdist {

class VerbsDevice {
 public:
  // Throws Error(config) if there is no such device, or its port is not active or has no such GID.
  VerbsDevice(const char* name, int port, int gid_index);
  ~VerbsDevice();
  VerbsDevice(const VerbsDevice&) = delete;
  VerbsDevice& operator=(const VerbsDevice&) = delete;

  const std::string name;
  const int port, gid_index;
  ibv_device_attr attributes{};
  ibv_port_attr port_attributes{};
  ibv_gid gid{};
  bool ethernet() const { return port_attributes.link_layer == IBV_LINK_LAYER_ETHERNET; }
  VerbsHost host() const;  // for peers; without slots
  ibv_pd* domain() const { return domain_; }

  void make_queue(int entries);
  ibv_cq* queue() const { return queue_; }

  // Registers memory until release(), or until the device is closed. `access`: flags of ibv_access_flags.
  ibv_mr* register_memory(const void* base, int64_t bytes, int access);
  void release(ibv_mr* region);

  // Sleeps until a completion or an event arrives, at most `ns`. Order: arm(), poll the queue once more, then sleep.
  void arm();
  void sleep(int64_t ns);

  // Reads one event without waiting. Returns false if there is none. down_since() has the state of the port, lost()
  // that of the device. `failed`: the queue pair of an event about it.
  bool take_event(ibv_qp** failed);
  int64_t down_since() const { return down_since_; }  // 0 if the port is up
  bool lost() const { return lost_; }

 private:
  void open(const char* name);
  void close();

  const VerbsLibrary& verbs_;
  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* queue_ = nullptr;
  std::vector<ibv_mr*> regions_;
  unsigned unacknowledged_ = 0;
  int64_t down_since_ = 0;
  bool lost_ = false;
};

}  // namespace ckdist
#endif
