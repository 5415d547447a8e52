#include "api/commands_api.h"
#include "bindings/communicator_handles.h"
#include "bindings/executable_handle.h"
#include "bindings/trace_handle.h"
#include "core/error.h"
#include "runtime/worker.h"

using namespace ckdist;

struct ckdist_worker : Worker {
  using Worker::Worker;
};

int ckdist_worker_new(ckdist_communicator* job, ckdist_worker** out) {
  return guard([&] { *out = new ckdist_worker(*job->communicator); });
}
void ckdist_worker_free(ckdist_worker* worker) { delete worker; }
int ckdist_worker_add(ckdist_worker* worker, int32_t model, ckdist_executable* executable) {
  return guard([&] { worker->add(model, *executable); });
}
int ckdist_worker_publish(ckdist_worker* worker, const int32_t* message, int64_t ints) {
  return guard([&] { worker->publish(message, ints); });
}
int ckdist_worker_run(ckdist_worker* worker) {
  return guard([&] { worker->run(); });
}
int ckdist_worker_work(ckdist_worker* worker, ckdist_command* out) {
  return guard([&] { *out = worker->work(); });
}
int ckdist_worker_report(ckdist_worker* worker, int32_t model, ckdist_step_stats* out) {
  return guard([&] { worker->report(model, out); });
}
int ckdist_worker_copy_results(ckdist_worker* worker, ckdist_copy_results* out) {
  return guard([&] { worker->copy_results(out); });
}
int ckdist_worker_trace(ckdist_worker* worker, ckdist_trace* trace) {
  return guard([&] { worker->trace(*trace); });
}
