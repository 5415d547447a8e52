// libibverbs, loaded at run time: the same binary also runs if the library, the driver or the device is missing.
//
// Functions that the library's headers define inline (posting, polling) use the device's own function table. All others
// are looked up by name here. Without the headers at build time, CKDIST_HAVE_VERBS is 0 and the rest of this file is
// empty.
#pragma once
#if __has_include(<infiniband/verbs.h>) && !defined(CKDIST_WITHOUT_VERBS)
#define CKDIST_HAVE_VERBS 1
#include <infiniband/verbs.h>
// These macros would replace a field of this table by a call of a linked function.
#undef ibv_query_port
#undef ibv_reg_mr

namespace ckdist {

// clang-format off
#define CKDIST_VERBS_CALLS(X) \
  X(get_device_list) X(free_device_list) X(get_device_name) X(open_device) X(close_device) \
  X(query_device) X(query_port) X(query_gid) \
  X(alloc_pd) X(dealloc_pd) X(reg_mr) X(dereg_mr) \
  X(create_comp_channel) X(destroy_comp_channel) X(create_cq) X(destroy_cq) X(get_cq_event) X(ack_cq_events) \
  X(create_qp) X(modify_qp) X(destroy_qp) X(get_async_event) X(ack_async_event) X(wc_status_str)
// clang-format on

struct VerbsLibrary {
#define CKDIST_VERBS_FIELD(name) decltype(&::ibv_##name) name;
  CKDIST_VERBS_CALLS(CKDIST_VERBS_FIELD)
#undef CKDIST_VERBS_FIELD
};

// Throws Error(config) with the reason if it cannot be loaded.
const VerbsLibrary& verbs_library();

}  // namespace ckdist
#else
#define CKDIST_HAVE_VERBS 0
#endif
