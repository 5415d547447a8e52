#include "movers/mover.h"

#include "core/error.h"
#include "movers/stream_mover.h"

namespace ckdist {

std::unique_ptr<Mover> open_mover(MoverChoice choice, std::string* reason) {
  *reason = choice == MoverChoice::threads ? "" : "this build has no DSA mover";
  if (choice == MoverChoice::dsa) fail(Status::config, "no DSA queue can be used: %s", reason->c_str());
  return std::make_unique<StreamMover>();
}

}  // namespace ckdist
