#include "core/export.h"

#include "api/executable_api.h"
#include "bindings/communicator_handle.h"
#include "bindings/executable_handle.h"
#include "bindings/loader_handle.h"
#include "bindings/pool_handle.h"
#include "bindings/trace_handle.h"
#include "core/error.h"

using namespace ckdist;

extern "C" {

int ckdist_executable_new(const ckdist_program* program, ckdist_communicator* job, ckdist_communicator* stage,
                          ckdist_pool* pool, ckdist_executable** out) {
  return guard([&] {
    Repacker* const repacker = program->loader ? program->loader->loader.repacker() : nullptr;
    *out = new ckdist_executable(*program, *job->communicator, *stage->communicator, repacker, pool->pool);
  });
}
void ckdist_executable_free(ckdist_executable* executable) { delete executable; }
int ckdist_executable_make_store(ckdist_executable* executable, int64_t blocks) {
  return guard([&] { executable->make_store(blocks); });
}
const float* ckdist_executable_logits(ckdist_executable* executable) { return executable->logits(); }
const float* ckdist_executable_hidden(ckdist_executable* executable) { return executable->hidden(); }
const void* ckdist_executable_kv(ckdist_executable* executable) { return executable->kv_data(); }
int64_t ckdist_executable_kv_bytes(ckdist_executable* executable) { return executable->kv_bytes(); }
void ckdist_executable_stats(ckdist_executable* executable, ckdist_step_stats* out, int32_t reset) {
  *out = executable->stats(reset);
}
void ckdist_executable_expert_rows(const ckdist_executable* executable, int64_t* out) { executable->expert_rows(out); }
int ckdist_executable_trace(ckdist_executable* executable, ckdist_trace* trace) {
  return guard([&] { executable->trace(*trace); });
}
}
