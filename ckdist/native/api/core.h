#ifndef CKDIST_API_CORE_H
#define CKDIST_API_CORE_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Calls that can fail return a negative status: -1 native, -2 model file, -3 capacity, -4 communication, -5
   configuration. The message of the calling thread's last failure: one line. */
CKDIST_EXPORT const char* ckdist_last_error(void);

/* Levels of instructions that this build has kernels for, best first: name of the i-th, null past the last, and what
   the CPU lacks for it, as /proc/cpuinfo names it ("" where nothing is missing). */
CKDIST_EXPORT const char* ckdist_isa_name(int32_t i);
CKDIST_EXPORT const char* ckdist_isa_lacks(int32_t i);
/* The one whose kernels were chosen at load; CKDIST_ISA in the environment forces another that the CPU has. */
CKDIST_EXPORT int ckdist_isa(const char** out);
/* Chooses another one that the CPU has. What was opened before keeps its kernels. */
CKDIST_EXPORT int ckdist_use_isa(const char* isa);

/* Numbers of weight types: those below ckdist_own_types are GGUF's (ggml_type), those of safetensors alone go on to
   ckdist_type_count. */
enum { ckdist_own_types = 64, ckdist_type_count = 68 };
/* Elements and bytes of one block; 0 where the type is not known. */
CKDIST_EXPORT int64_t ckdist_type_block_elements(int32_t type);
CKDIST_EXPORT int64_t ckdist_type_block_bytes(int32_t type);
/* Columns that stay together where a matrix is divided: of a block, or of a scale. */
CKDIST_EXPORT int64_t ckdist_type_undivided_columns(int32_t type);
CKDIST_EXPORT const char* ckdist_type_name(int32_t type);

/* Bytes that can still be allocated without swapping: of the machine, or of the control groups that this process is in.
 */
CKDIST_EXPORT int64_t ckdist_available_memory(void);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
