#pragma once
#include "api/export.h"

/* Calls that can fail return a negative status: -1 native, -2 model file, -3 capacity, -4 communication, -5
   configuration. ckdist_last_error: one line with the calling thread's last failure. */
CKDIST_EXPORT const char* ckdist_last_error(void);

/* Instruction levels with kernels in this build, best first. name: of the i-th level, or null after the last. lacks:
   the CPU features that are missing, as in /proc/cpuinfo ("" if none is missing). */
CKDIST_EXPORT const char* ckdist_isa_name(int32_t i);
CKDIST_EXPORT const char* ckdist_isa_lacks(int32_t i);
/* The level whose kernels were chosen at load. The environment variable CKDIST_ISA selects another level that the
   CPU supports. */
CKDIST_EXPORT int ckdist_isa(const char** out);
/* Chooses another one that the CPU has. What was opened before keeps its kernels. */
CKDIST_EXPORT int ckdist_use_isa(const char* isa);

/* Numbers of weight types. Those below ckdist_own_types are GGUF's (ggml_type). Types only of safetensors go up to
   ckdist_type_count. */
enum { ckdist_own_types = 64, ckdist_type_count = 70 };
/* Elements and bytes of one block; 0 for an unknown type. */
CKDIST_EXPORT int64_t ckdist_type_block_elements(int32_t type);
CKDIST_EXPORT int64_t ckdist_type_block_bytes(int32_t type);
/* Columns that stay together when a matrix is divided: those of a block or of a scale. */
CKDIST_EXPORT int64_t ckdist_type_undivided_columns(int32_t type);
CKDIST_EXPORT const char* ckdist_type_name(int32_t type);

/* Bytes that can be allocated without swapping: the minimum over the machine and the control groups of this process. */
CKDIST_EXPORT int64_t ckdist_available_memory(void);
/* Bytes that this process will still touch: of weights that are not packed and of caches. */
CKDIST_EXPORT int64_t ckdist_promised_memory(void);
