#include "core/error.h"

namespace ckdist {
namespace {
thread_local std::string last_error = "no error";
}
void set_last_error(const char* message) { last_error = message; }
const char* last_error_message() { return last_error.c_str(); }
}  // namespace ckdist
