#include "api/step_communicator_api.h"
#include "bindings/communicator_handles.h"
#include "core/error.h"

using namespace ckdist;

struct ckdist_steps {
  std::unique_ptr<StepCommunicator> steps;
};

int ckdist_steps_new(ckdist_communicator* c, int64_t partial_floats, int64_t logit_rows, int64_t vocab,
                     int64_t first_column, int64_t columns, int64_t batch_ints, ckdist_steps** out) {
  return guard([&] {
    *out = new ckdist_steps{
        c->communicator->steps({partial_floats, logit_rows, vocab, first_column, columns, batch_ints})};
  });
}
void ckdist_steps_free(ckdist_steps* s) { delete s; }
int ckdist_steps_publish(ckdist_steps* s, const int32_t* batch, int64_t ints) {
  return guard([&] { s->steps->publish(batch, ints, ints == 0); });
}
int ckdist_steps_receive(ckdist_steps* s, const int32_t** batch, int64_t* ints) {
  return guard([&] { *batch = s->steps->receive(ints); });
}
float* ckdist_steps_partial(ckdist_steps* s, int32_t slot) { return s->steps->partial(slot); }
int ckdist_steps_all_reduce(ckdist_steps* s, int32_t slot, int64_t floats, int32_t chunks, int32_t step) {
  return guard([&] {
    StepCommunicator& steps = *s->steps;
    if (chunks == 1 || steps.host_count() == 1) return steps.all_reduce(slot, floats, step);
    for (int chunk = 0; chunk < chunks; chunk++)
      steps.begin_chunk({slot, floats, false}, {floats * chunk / chunks, floats * (chunk + 1) / chunks}, step);
    while (steps.test_chunks() < chunks / 2) {}
    steps.wait_chunks(step);
  });
}
int ckdist_steps_summands(ckdist_steps* s, int32_t slot, const float** summands) {
  return s->steps->summands(slot, summands);
}
float* ckdist_steps_logits(ckdist_steps* s, int64_t* stride) { return s->steps->logits(stride); }
int ckdist_steps_gather_logits(ckdist_steps* s, int64_t rows, int32_t step) {
  return guard([&] { s->steps->gather_logits(rows, step); });
}
const float* ckdist_steps_gathered(ckdist_steps* s) { return s->steps->gathered(); }
int ckdist_steps_send(ckdist_steps* s, int32_t peer, const void* data, int64_t bytes, int32_t step) {
  return guard([&] { s->steps->send(peer, data, bytes, step); });
}
int ckdist_steps_recv(ckdist_steps* s, int32_t peer, void* data, int64_t bytes, int32_t step) {
  return guard([&] { s->steps->recv(peer, data, bytes, step); });
}
