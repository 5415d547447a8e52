#include "core/export.h"

#include "api/movers.h"

#include <cstdio>

#include "core/error.h"
#include "movers/mover.h"

using namespace ckdist;

extern "C" int ckdist_try_dsa(char* about, int32_t bytes) {
  int works = 0;
  const int status = guard([&] {
    std::string reason;
    const std::unique_ptr<Mover> mover = open_mover(MoverChoice::automatic, &reason);
    works = reason.empty();
    std::snprintf(about, static_cast<size_t>(bytes), "%s", works ? mover->name() : reason.c_str());
  });
  return status < 0 ? status : works;
}
