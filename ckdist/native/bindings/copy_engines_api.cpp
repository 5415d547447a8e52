#include "core/export.h"

#include "api/copy_engines_api.h"

#include <cstdio>

#include "copy_engines/copy_engine.h"
#include "core/error.h"

using namespace ckdist;

extern "C" int ckdist_try_dsa(char* about, int32_t bytes) {
  int works = 0;
  const int status = guard([&] {
    std::string reason;
    const std::unique_ptr<CopyEngine> engine = open_copy_engine(CopyEngineChoice::automatic, &reason);
    works = reason.empty();
    std::snprintf(about, static_cast<size_t>(bytes), "%s", works ? engine->name() : reason.c_str());
  });
  return status < 0 ? status : works;
}
