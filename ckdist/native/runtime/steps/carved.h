// Buffers of one thread, for steps that carve them from the thread's memory.
#pragma once
#include "runtime/executor.h"

namespace ckdist {

// `Run` derives from Carved<Run, its other base> and has `static … room(Carver&, const Owner&, const Fields&)`.
template <class Run, class Base>
struct Carved : Base {
  static int64_t thread_bytes(const typename Base::Owner& r, const typename Base::Fields& step) {
    Carver c;
    Run::room(c, r, step);
    return c.used;
  }
  auto buffers() const {
    Carver c{this->r.memory(this->thread)};
    return Run::room(c, this->r, this->step);
  }
};

}  // namespace ckdist
