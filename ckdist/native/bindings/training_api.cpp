#include "api/training_api.h"
#include "bindings/communicator_handles.h"
#include "bindings/pool_handle.h"
#include "bindings/trace_handle.h"
#include "core/error.h"
#include "runtime/training.h"

using namespace ckdist;

struct ckdist_training : Training {
  using Training::Training;
};

int ckdist_training_new(const ckdist_program* program, ckdist_communicator* data, ckdist_communicator* tensor,
                        ckdist_communicator* stages, ckdist_communicator* sequence, ckdist_pool* pool,
                        ckdist_training** out) {
  const auto of = [](ckdist_communicator* handle) { return handle ? handle->communicator.get() : nullptr; };
  return guard(
      [&] { *out = new ckdist_training(*program, of(data), of(tensor), of(stages), of(sequence), pool->pool); });
}
void ckdist_training_free(ckdist_training* training) { delete training; }
int ckdist_training_run(ckdist_training* training, const ckdist_training_batch* batch, const ckdist_training_pass* pass,
                        double* losses) {
  return guard([&] {
    losses[0] = training->run(*batch, *pass);
    losses[1] = training->balance;
  });
}
int ckdist_training_trace(ckdist_training* training, ckdist_trace* trace) {
  return guard([&] { training->trace(*trace); });
}
int ckdist_training_flush(ckdist_training* training) {
  return guard([&] { training->flush(); });
}
void ckdist_training_times(ckdist_training* training, double* out) {
  for (const double seconds : training->times()) *out++ = seconds;
}
void ckdist_training_bytes(ckdist_training* training, int64_t* out) {
  for (const int64_t bytes : training->bytes()) *out++ = bytes;
}
