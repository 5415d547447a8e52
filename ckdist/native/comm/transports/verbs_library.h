// libibverbs, loaded at run time: the same binary runs where the library, the driver or the device is missing.
//
// What the library's headers do inline (posting, polling) goes through the device's own table of functions; everything
// else is looked up by name here. Without the headers at build time CKDIST_HAVE_VERBS is 0 and nothing below exists.
#pragma once
#if __has_include(<infiniband/verbs.h>) && !defined(CKDIST_WITHOUT_VERBS)
#define CKDIST_HAVE_VERBS 1
#include <infiniband/verbs.h>
// Macros that would turn a field of this table into a call of a linked function.
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

// Error(config) with the reason when it cannot be loaded.
const VerbsLibrary& verbs_library();

}  // namespace ckdist
#else
#define CKDIST_HAVE_VERBS 0
#endif
