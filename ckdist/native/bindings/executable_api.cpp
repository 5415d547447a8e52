#include <fcntl.h>

#include <cerrno>

#include "api/executable_api.h"
#include "bindings/communicator_handles.h"
#include "bindings/executable_handle.h"
#include "bindings/loader_handle.h"
#include "bindings/pool_handle.h"
#include "bindings/trace_handle.h"
#include "core/error.h"

using namespace ckdist;

int ckdist_executable_new(const ckdist_program* program, ckdist_communicator* job, ckdist_communicator* stage,
                          ckdist_pool* pool, ckdist_executable** out) {
  return guard([&] {
    Repacker* const repacker = program->loader ? program->loader->loader.repacker() : nullptr;
    *out = new ckdist_executable(*program, *job->communicator, *stage->communicator, repacker, pool->pool);
  });
}
void ckdist_executable_free(ckdist_executable* executable) { delete executable; }
int64_t ckdist_executable_slab_bytes(const ckdist_executable* executable, ckdist_slab_kind kind) {
  return executable->slab_bytes(kind);
}
int ckdist_executable_set_slab(ckdist_executable* executable, ckdist_slab_kind kind, int32_t headers_file,
                               int32_t data_file, int64_t slots) {
  return guard([&] { executable->set_slab(kind, headers_file, data_file, slots); });
}
int64_t ckdist_slab_stride(int64_t bytes) { return Slab::stride(bytes); }
int ckdist_slab_check(const ckdist_slab_header* header, const void* data, int64_t bytes) {
  return Slab::is_sound(*header, static_cast<const uint8_t*>(data), bytes);
}
int ckdist_slab_punch(int32_t file, int64_t at, int64_t bytes) {
  return fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, bytes) == 0 ? 0 : errno;
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
