// The kernel table that a call through the C boundary asks for by name.
#pragma once
#include "core/error.h"
#include "kernels/kernels.h"

namespace ckdist {

inline const Kernels& kernels_by_name(const char* isa) { return isa ? kernels_named(isa) : kernels(); }

}  // namespace ckdist
