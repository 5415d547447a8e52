// The kernels of one level of instructions (ISA) as one table, and the choice of it at load by what the CPU says of
// itself (or CKDIST_ISA, for a lower one). A level is a set of capabilities that CPUs come in: vectors, the dot product
// of bytes, that of bfloat16, tiles. Kernel files under isa/ are compiled once per level that has what they ask for,
// into a namespace of its name, and include no STL, or the linker may keep an AVX-512 copy of an inline function for
// everybody.
#pragma once
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/delta_rule.h"
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
  DeltaRuleKernel delta_rule;
};

// A level of instructions, and what this CPU lacks for it: its flags as /proc/cpuinfo names them, or "" where nothing
// is missing.
struct Level {
  const Kernels* kernels;
  std::string lacks;
};

const std::vector<Level>& levels();  // of this build, best first
const Kernels& kernels();            // those chosen at load; an Error where CKDIST_ISA names what is not available
const Kernels& kernels_named(const char* isa);  // an Error where this build or this CPU lacks it
void use_kernels(const char* isa);              // from now on; an Error as of kernels_named

}  // namespace ckdist
