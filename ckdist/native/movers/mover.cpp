#include "movers/mover.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "core/error.h"
#include "core/numa.h"
#include "movers/dsa_queue.h"
#include "movers/stream_mover.h"

namespace ckdist {
namespace {

int own_node() {
  const MemoryNodes wanted = memory_nodes();
  if (!wanted.nodes.empty()) return wanted.nodes[0];
  unsigned cpu = 0, node = 0;
  return syscall(SYS_getcpu, &cpu, &node, nullptr) == 0 ? static_cast<int>(node) : 0;
}

// The first queue by which a page can really be copied.
std::unique_ptr<Mover> open_dsa(std::string* reason) {
  std::string reasons;
  for (const DsaQueue& queue : find_dsa_queues("", own_node(), reason)) {
    DsaQueueLimits limits = queue.limits;
    std::string why;
    if (std::unique_ptr<DsaPortal> portal = open_dsa_queue(queue, &limits, &why)) {
      auto mover = std::make_unique<DsaMover>(std::move(portal), limits);
      try {
        if (mover->works()) {
          reason->clear();
          return mover;
        }
        why = mover->trouble() ? mover->trouble() : limits.name + " did not copy a page";
      } catch (const Error& e) { why = e.what(); }
    }
    reasons += (reasons.empty() ? "" : "; ") + why;
    *reason = reasons;
  }
  return nullptr;
}

}  // namespace

std::unique_ptr<Mover> open_mover(MoverChoice choice, std::string* reason) {
  reason->clear();
  if (choice != MoverChoice::threads)
    if (std::unique_ptr<Mover> mover = open_dsa(reason)) return mover;
  if (choice == MoverChoice::dsa)
    fail(Status::config, "no DSA queue can be used: %s; --reorganize threads copies without one", reason->c_str());
  return std::make_unique<StreamMover>();
}

}  // namespace ckdist
