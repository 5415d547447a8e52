// The kernel table that a call through the C boundary asks for by name.
#pragma once
#include "core/error.h"
#include "kernels/kernels.h"

namespace ckdist {

inline const Kernels& kernels_by_name(const char* isa) {
  if (!isa) return kernels();
  if (const Kernels* found = kernels_of(isa)) return *found;
  fail(Status::config, "ISA %.32s is not in this build or not on this CPU, which offers up to %s; use baseline, avx2, avx512 or amx", isa,
       kernels().name);
}

}  // namespace ckdist
