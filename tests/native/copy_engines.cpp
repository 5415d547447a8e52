// C functions for tests of the copy engines, called from Python.
#include <cstdio>

#include "copy_engines/dsa_queue.h"
#include "core/error.h"
#include "software_dsa.h"

using namespace ckdist;

namespace {

struct Bench {
  SoftwareDsa device;
  std::unique_ptr<CopyEngine> engine;
};
thread_local char text[1024];

const char* keep(const std::string& words) {
  std::snprintf(text, sizeof text, "%s", words.c_str());
  return text;
}

}  // namespace

extern "C" {

// Returns 0 if this CPU has no such vectors.
int stream_copy(int vector_bytes, uint8_t* to, const uint8_t* from, int64_t bytes) {
  const StreamCopy copy = stream_copy_of(vector_bytes);
  if (!copy) return 0;
  copy(to, from, bytes);
  stream_fence();
  return 1;
}
int widest_stream_bytes(void) { return widest_stream().vector_bytes; }

// An engine over a device in software. Its limits are those of the device, except that it uses `believed_transfer` if
// that is not 0.
Bench* bench_open(int64_t max_transfer, int64_t max_batch, int64_t credits, int block_on_fault,
                  int64_t believed_transfer, int64_t copy_ns) {
  Bench* bench = new Bench();
  bench->device.max_transfer = max_transfer;
  bench->device.max_batch = max_batch;
  bench->device.capacity = credits;
  bench->device.block_on_fault = block_on_fault != 0;
  const DsaQueueLimits limits{"wq0.1", believed_transfer ? believed_transfer : max_transfer, max_batch, credits,
                              block_on_fault != 0};
  bench->engine =
      std::make_unique<DsaEngine>(std::make_unique<SoftwarePortal>(&bench->device), limits, copy_ns, copy_ns);
  return bench;
}
void bench_close_engine(Bench* bench) { bench->engine.reset(); }
void bench_free(Bench* bench) { delete bench; }

// Returns 0 if there is no such setting.
int device_set(Bench* bench, const char* name, int64_t value) {
  SoftwareDsa& d = bench->device;
  const std::string key = name;
#define SET(field) \
  if (key == #field) return d.field = static_cast<decltype(d.field)>(value), 1
  SET(deferred);
  SET(backwards);
  SET(full);
  SET(errors);
  SET(error);
  SET(faults);
  SET(fault_after);
  SET(fault_info);
  SET(fault_address);
  SET(fault_from_end);
  SET(real_faults);
  SET(lost);
  SET(hangs);
  SET(batch_stops_at);
  SET(record_left_out);
#undef SET
  return 0;
}
void device_run(Bench* bench, int64_t most) { bench->device.run(most); }
int64_t device_submissions(Bench* bench) { return bench->device.submissions; }
int64_t device_dropped(Bench* bench) { return bench->device.dropped; }
int64_t device_moved(Bench* bench) { return bench->device.moved_bytes; }
int64_t device_page_faults(Bench* bench) { return bench->device.page_faults; }
const char* device_broken(Bench* bench) { return bench->device.broken; }
// Copies the bytes of descriptor number `index`. Returns 0 if there is none.
int device_seen(Bench* bench, int64_t index, uint8_t* out) {
  if (index >= static_cast<int64_t>(bench->device.seen.size())) return 0;
  std::memcpy(out, bench->device.seen[index].data(), 64);
  return 1;
}

const char* engine_name(Bench* bench) { return bench->engine->name(); }
const char* engine_trouble(Bench* bench) { return bench->engine->trouble() ? bench->engine->trouble() : ""; }
int64_t engine_submit(Bench* bench, const Copy* copies, int count) { return bench->engine->submit(copies, count); }
// Returns -1 if it threw; engine_error() has the message.
int engine_done(Bench* bench, int64_t ticket) {
  try {
    return bench->engine->done(ticket);
  } catch (const Error& e) {
    keep(e.what());
    return -1;
  }
}
const char* engine_error(void) { return text; }
int engine_works(Bench* bench) { return static_cast<DsaEngine*>(bench->engine.get())->works(); }

// Lines of "name node mode path max_transfer max_batch credits block_on_fault", or "!" and the reason why there are
// none.
const char* find_queues(const char* root, int node) {
  std::string missing, lines;
  for (const DsaQueue& q : find_dsa_queues(root, node, &missing)) {
    char line[400];
    std::snprintf(line, sizeof line, "%s %d %s %s %lld %lld %lld %d\n", q.limits.name.c_str(), q.node,
                  q.shared ? "shared" : "dedicated", q.path.c_str(), static_cast<long long>(q.limits.max_transfer),
                  static_cast<long long>(q.limits.max_batch), static_cast<long long>(q.limits.credits),
                  q.limits.block_on_fault);
    lines += line;
  }
  return keep(lines.empty() ? "!" + missing : lines);
}
// The reason why the first queue cannot be opened, or empty.
const char* open_queue(const char* root) {
  std::string missing, reason;
  std::vector<DsaQueue> queues = find_dsa_queues(root, 0, &missing);
  if (queues.empty()) return keep("!" + missing);
  DsaQueueLimits limits = queues[0].limits;
  return open_dsa_queue(queues[0], &limits, &reason) ? keep("") : keep(reason);
}

const char* open_copy_engine_of(int choice, char* reason_out, int bytes) {
  try {
    std::string reason;
    const std::unique_ptr<CopyEngine> engine = open_copy_engine(static_cast<CopyEngineChoice>(choice), &reason);
    std::snprintf(reason_out, bytes, "%s", reason.c_str());
    return keep(engine->name());
  } catch (const Error& e) { return keep("!" + std::string(e.what())); }
}
}
