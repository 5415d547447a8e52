// The kernel table for the ISA name of a call through the C API.
#pragma once
#include "core/error.h"
#include "kernels/kernels.h"

namespace ckdist {

inline const Kernels& kernels_by_name(const char* isa) { return isa ? kernels_named(isa) : kernels(); }

}  // namespace ckdist
