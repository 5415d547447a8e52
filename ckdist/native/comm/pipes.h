// Transport through the byte pipes of a Meeting: messages and windows between ranks of one host, beside its collectives.
#pragma once
#include "comm/meeting.h"
#include "comm/stream_transport.h"

namespace ckdist {

class Pipes : public StreamTransport {
 public:
  Pipes(Meeting& meeting, double timeout_s) : StreamTransport(meeting.index, meeting.size, 1, timeout_s), meeting_(meeting) {}

  void idle(int64_t ns) override { meeting_.sleep(ns); }
  const char* name() const override { return "shared memory"; }

 private:
  int name_of(int peer) const override { return meeting_.name(peer); }
  int64_t write(int peer, int, const void* data, int64_t bytes) override { return meeting_.pipe_write(peer, data, bytes); }
  int64_t read(int peer, int, void* data, int64_t bytes) override { return meeting_.pipe_read(peer, data, bytes); }

  Meeting& meeting_;
};

}  // namespace ckdist
