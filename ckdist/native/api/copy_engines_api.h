#ifndef CKDIST_API_COPY_ENGINES_H
#define CKDIST_API_COPY_ENGINES_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Tests whether a thread of this process can copy with an Intel DSA queue, by copying a page. Returns 1 and writes
   the queue's name to `about`, or 0 and the reason. `about` has room for `bytes`. May take seconds if a device does
   not answer. */
CKDIST_EXPORT int ckdist_try_dsa(char* about, int32_t bytes);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
