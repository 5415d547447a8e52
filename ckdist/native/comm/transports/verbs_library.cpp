#include "comm/transports/verbs_library.h"

#if CKDIST_HAVE_VERBS
#include <dlfcn.h>

#include "core/error.h"

namespace ckdist {

const VerbsLibrary& verbs_library() {
  static const VerbsLibrary library = [] {
    void* handle = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!handle)
      fail(Status::config,
           "libibverbs does not load (%s); install it (Debian and Ubuntu: apt-get install ibverbs-providers)",
           dlerror());
    VerbsLibrary found;
#define CKDIST_VERBS_LOAD(name)                                                     \
  found.name = reinterpret_cast<decltype(found.name)>(dlsym(handle, "ibv_" #name)); \
  if (!found.name) fail(Status::config, "libibverbs.so.1 has no ibv_" #name ": it is too old");
    CKDIST_VERBS_CALLS(CKDIST_VERBS_LOAD)
#undef CKDIST_VERBS_LOAD
    return found;
  }();
  return library;
}

}  // namespace ckdist
#endif
