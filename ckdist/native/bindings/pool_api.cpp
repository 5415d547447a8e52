#include "api/pool_api.h"
#include "bindings/pool_handle.h"
#include "core/error.h"

using namespace ckdist;

int ckdist_pool_new(int32_t threads, const int32_t* cpus, const int32_t* caches, int32_t spins,
                    struct ckdist_pool** out) {
  return guard([&] {
    if (threads < 1) fail(Status::config, "%d threads: at least 1 is needed", threads);
    *out =
        new ckdist_pool{std::make_shared<Pool>(threads, of_threads(cpus, threads), of_threads(caches, threads), spins)};
  });
}
void ckdist_pool_free(struct ckdist_pool* pool) { delete pool; }
