// The kernels of one ISA as one table, and the choice of it at load by CPUID (or CKDIST_ISA, for a lower one).
// Kernel files under isa/ are compiled once per ISA into a namespace of that name and include no STL, or the linker may
// keep an AVX-512 copy of an inline function for everybody.
#pragma once
#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/gradient.h"
#include "kernels/linear.h"
#include "kernels/machine.h"
#include "kernels/optimizer.h"
#include "kernels/packing.h"
#include "kernels/product.h"
#include "kernels/quantize.h"
#include "kernels/reduce.h"
#include "kernels/row.h"
#include "kernels/softmax.h"

namespace ckdist {

struct Kernels {
  const char* name;
  LinearKernel linear[kTypeCount];  // indexed by Type; entries of unknown types are empty
  AttentionKernel attention;
  ElementwiseKernel elementwise;
  MachineKernel machine;
  ReduceKernel reduce;
  OptimizerKernel optimizer;
  PackKernels pack;
  ProductKernels product;
  GradientKernel gradient;
  RowKernel row;
  SoftmaxKernel softmax;
  QuantizeKernel quantize;
};

const Kernels& kernels();
const Kernels* kernels_of(const char* isa);  // null where this build or this CPU lacks it

}  // namespace ckdist
