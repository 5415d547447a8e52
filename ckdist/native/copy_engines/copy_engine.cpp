#include "copy_engines/copy_engine.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "copy_engines/dsa_queue.h"
#include "copy_engines/stream_engine.h"
#include "core/error.h"
#include "core/numa.h"

namespace ckdist {
namespace {

int own_node() {
  const MemoryNodes wanted = memory_nodes();
  if (!wanted.nodes.empty()) return wanted.nodes[0];
  unsigned cpu = 0, node = 0;
  return syscall(SYS_getcpu, &cpu, &node, nullptr) == 0 ? static_cast<int>(node) : 0;
}

// The first queue that copies a test page correctly.
std::unique_ptr<CopyEngine> open_dsa(std::string* reason) {
  std::string reasons;
  for (const DsaQueue& queue : find_dsa_queues("", own_node(), reason)) {
    DsaQueueLimits limits = queue.limits;
    std::string why;
    if (std::unique_ptr<DsaPortal> portal = open_dsa_queue(queue, &limits, &why)) {
      auto engine = std::make_unique<DsaEngine>(std::move(portal), limits);
      try {
        if (engine->works()) {
          reason->clear();
          return engine;
        }
        why = engine->trouble() ? engine->trouble() : limits.name + " did not copy a page";
      } catch (const Error& e) { why = e.what(); }
    }
    reasons += (reasons.empty() ? "" : "; ") + why;
    *reason = reasons;
  }
  return nullptr;
}

}  // namespace

std::unique_ptr<CopyEngine> open_copy_engine(CopyEngineChoice choice, std::string* reason) {
  reason->clear();
  if (choice != CopyEngineChoice::threads)
    if (std::unique_ptr<CopyEngine> engine = open_dsa(reason)) return engine;
  if (choice == CopyEngineChoice::dsa)
    fail(Status::config, "no DSA queue can be used: %s; --repack threads copies without one", reason->c_str());
  return std::make_unique<StreamEngine>();
}

}  // namespace ckdist
