// Transport through the byte pipes of a ShmRendezvous: messages and windows between ranks of one host, in addition to
// its collectives. The receiver copies long messages once, directly from an arena that it maps.
#pragma once
#include "comm/bootstrap/host_memory.h"
#include "comm/bootstrap/shm_rendezvous.h"
#include "comm/transports/stream_transport.h"

namespace ckdist {

class ShmTransport : public StreamTransport {
 public:
  // memory: of this host's ranks, or null. arenas: for each rank of the rendezvous the index of its arena.
  ShmTransport(ShmRendezvous& rendezvous, std::shared_ptr<HostMemory> memory, std::vector<int> arenas, double timeout_s)
      : StreamTransport(rendezvous.index, rendezvous.size, timeout_s),
        rendezvous_(rendezvous),
        memory_(std::move(memory)),
        arenas_(std::move(arenas)) {}

  void idle(int64_t ns) override { rendezvous_.sleep(ns); }
  const char* name() const override { return "shared memory"; }

 private:
  int name_of(int peer) const override { return rendezvous_.name(peer); }
  int64_t write(int peer, const void* data, int64_t bytes) override {
    return rendezvous_.pipe_write(peer, data, bytes);
  }
  int64_t read(int peer, void* data, int64_t bytes) override { return rendezvous_.pipe_read(peer, data, bytes); }
  int64_t placed(const void* data, int64_t bytes) const override { return memory_ ? memory_->offset(data, bytes) : -1; }
  const uint8_t* in_place(int peer, int64_t offset, int64_t bytes) const override {
    return memory_ && offset <= memory_->arena_bytes() - bytes ? memory_->arena(arenas_[peer]) + offset : nullptr;
  }

  ShmRendezvous& rendezvous_;
  std::shared_ptr<HostMemory> memory_;
  std::vector<int> arenas_;
};

}  // namespace ckdist
