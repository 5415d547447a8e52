#include "core/export.h"

#include "api/executable_api.h"
#include "bindings/communicator_handle.h"
#include "bindings/loader_handle.h"
#include "bindings/pool_handle.h"
#include "bindings/trace_handle.h"
#include "core/error.h"
#include "runtime/inference.h"

using namespace ckdist;

struct ckdist_executable : Inference {
  using Inference::Inference;
};

extern "C" {

int ckdist_executable_new(const ckdist_program* program, ckdist_communicator* job, ckdist_communicator* stage,
                          ckdist_pool* pool, ckdist_executable** out) {
  return guard([&] {
    Repacker* const repacker = program->loader ? program->loader->loader.repacker() : nullptr;
    *out = new ckdist_executable(*program, *job->communicator, *stage->communicator, repacker, pool->pool);
  });
}
void ckdist_executable_free(ckdist_executable* executable) { delete executable; }
int ckdist_executable_publish(ckdist_executable* executable, const int32_t* message, int64_t ints) {
  return guard([&] { executable->publish(message, ints); });
}
int ckdist_executable_run(ckdist_executable* executable) {
  return guard([&] { executable->run(); });
}
int ckdist_executable_work(ckdist_executable* executable) {
  return guard([&] { executable->work(); });
}
int ckdist_executable_stop(ckdist_executable* executable) {
  return guard([&] { executable->stop(); });
}
const float* ckdist_executable_logits(ckdist_executable* executable) { return executable->logits(); }
const float* ckdist_executable_hidden(ckdist_executable* executable) { return executable->hidden(); }
const void* ckdist_executable_kv(ckdist_executable* executable) { return executable->kv_data(); }
int64_t ckdist_executable_kv_bytes(ckdist_executable* executable) { return executable->kv_bytes(); }
void ckdist_executable_stats(ckdist_executable* executable, ckdist_step_stats* out, int32_t reset) {
  *out = executable->stats(reset);
}
void ckdist_executable_expert_rows(const ckdist_executable* executable, int64_t* out) { executable->expert_rows(out); }
int ckdist_executable_reports(ckdist_executable* executable, ckdist_step_stats* out) {
  return guard([&] { executable->reports(out); });
}
int ckdist_executable_trace(ckdist_executable* executable, ckdist_trace* trace) {
  return guard([&] { executable->trace(*trace); });
}
}
