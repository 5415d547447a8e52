// A set of any number of CPUs in the kernel's form. glibc's cpu_set_t ends at 1,024.
#pragma once
#include <errno.h>
#include <sched.h>

#include <vector>

namespace ckdist {

class CpuMask {
 public:
  static constexpr int kMaxCpus = 1 << 16;  // the kernel's limit is 8,192

  void add(int cpu) {
    if (cpu < 0 || cpu >= kMaxCpus) return;
    const size_t word = size_t(cpu) / kWordBits;
    if (word >= words_.size()) words_.resize(word + 1);
    words_[word] |= 1UL << (cpu % kWordBits);
  }
  bool has(int cpu) const {
    const size_t word = size_t(cpu) / kWordBits;
    return cpu >= 0 && word < words_.size() && (words_[word] >> (cpu % kWordBits) & 1);
  }

  // Replaces the set with the CPUs of the calling thread. The kernel refuses a mask that is shorter than its own.
  bool read() {
    for (int cpus = 1024; cpus <= kMaxCpus; cpus *= 2) {
      words_.assign(size_t(cpus) / kWordBits, 0);
      if (sched_getaffinity(0, bytes(), reinterpret_cast<cpu_set_t*>(words_.data())) == 0) return true;
      if (errno != EINVAL) break;
    }
    words_.clear();
    return false;
  }
  // Moves the calling thread to these CPUs. False if the kernel refuses.
  bool apply() const { return sched_setaffinity(0, bytes(), reinterpret_cast<const cpu_set_t*>(words_.data())) == 0; }

 private:
  static constexpr int kWordBits = 8 * sizeof(unsigned long);
  size_t bytes() const { return words_.size() * sizeof(unsigned long); }

  std::vector<unsigned long> words_;
};

}  // namespace ckdist
