// The library's only exception type. guard() converts it to a status and a message at the C boundary.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <exception>
#include <new>
#include <string>

namespace ckdist {

enum class Status : int { native = -1, model_file = -2, capacity = -3, comm = -4, config = -5 };

class Error : public std::exception {
 public:
  Error(Status status, std::string message) : status_(status), message_(std::move(message)) {}
  Status status() const { return status_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  Status status_;
  std::string message_;
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(Status status, const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw Error(status, text);
}

// The calling thread's last failure, as ckdist_last_error() returns it.
void set_last_error(const char* message);

template <class F>
int guard(F&& body) noexcept {
  try {
    body();
    return 0;
  } catch (const Error& e) {
    set_last_error(e.what());
    return static_cast<int>(e.status());
  } catch (const std::bad_alloc&) {
    set_last_error("out of memory");
    return static_cast<int>(Status::capacity);
  } catch (const std::exception& e) {
    set_last_error(e.what());
    return static_cast<int>(Status::native);
  }
}

// Returns the result of `body`, or the negative status of its failure.
template <class F>
auto guard_value(F&& body) noexcept {
  decltype(body()) value{};
  const int status = guard([&] { value = body(); });
  return status < 0 ? status : value;
}

// A peer's text for a message: other bytes than printable ASCII are replaced.
inline std::string printable(std::string text) {
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text;
}

}  // namespace ckdist
