// The kernels of one level of instructions (ISA) as one table. The table is chosen at load by the CPU's features (or by
// CKDIST_ISA, for a lower level). A level is a combination of features that exists in CPUs: vectors, the dot product of
// bytes, that of bfloat16, tiles. Kernel files in isa/ are compiled once per level that has the features they need,
// into a namespace of the level's name. They include no STL: otherwise the linker could keep an AVX-512 copy of an
// inline function for all levels.
#pragma once
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/delta_rule.h"
#include "kernels/elementwise.h"
#include "kernels/gradient.h"
#include "kernels/linear.h"
#include "kernels/low_rank_rows.h"
#include "kernels/machine.h"
#include "kernels/optimizer.h"
#include "kernels/packing.h"
#include "kernels/product.h"
#include "kernels/quantize.h"
#include "kernels/reduce.h"
#include "kernels/row.h"
#include "kernels/softmax.h"
#include "kernels/state_gradient.h"

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
  DeltaRuleKernel delta_rule;
  StateGradientKernel state_gradient;
  LowRankKernel low_rank;
};

// A level of instructions, and the features that this CPU lacks for it, as in /proc/cpuinfo; "" if none is missing.
struct Level {
  const Kernels* kernels;
  std::string lacks;
};

const std::vector<Level>& levels();  // levels of this build, best first
// The kernels chosen at load. Throws Error if CKDIST_ISA names a level that is not available.
const Kernels& kernels();
const Kernels& kernels_named(const char* isa);  // throws Error if this build or this CPU lacks it
void use_kernels(const char* isa);              // from now on; an Error as of kernels_named

}  // namespace ckdist
