#ifndef CKDIST_API_COPY_ENGINES_H
#define CKDIST_API_COPY_ENGINES_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Whether a thread of this process can copy by an Intel DSA queue, with a page copied on trial: 1, and `about` names
   the queue; or 0, and it says what is missing. `about` has room for `bytes`. May take seconds on a device that does
   not answer. */
CKDIST_EXPORT int ckdist_try_dsa(char* about, int32_t bytes);

#ifdef __cplusplus
}  // extern "C"
#endif
#endif
