#include "copy_engines/dsa_queue.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "copy_engines/intrinsics.h"
#include "core/number_file.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ckdist {
namespace {

constexpr size_t kPortalBytes = 4096;
constexpr size_t kMostListed = 4;  // maximum reasons in one line

std::string word_of(const std::string& path) {
  char text[64] = "";
  if (std::FILE* file = std::fopen(path.c_str(), "re")) {
    if (!std::fgets(text, sizeof text, file)) text[0] = 0;
    std::fclose(file);
  }
  text[std::strcspn(text, " \t\n")] = 0;
  return text;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  if (DIR* open = opendir(folder.c_str())) {
    while (const dirent* entry = readdir(open)) names.push_back(entry->d_name);
    closedir(open);
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The number in a name such as dsa0, or -1. With `dot`, the device number in a name such as wq0.1.
int number_in(const std::string& name, const char* prefix, bool dot) {
  const size_t begin = std::strlen(prefix), dot_at = dot ? name.find('.') : name.size();
  const auto is_number = [&name](size_t from, size_t to) {
    return to <= name.size() && from < to && to - from <= 4 &&
           std::all_of(name.begin() + from, name.begin() + to, [](char c) { return c >= '0' && c <= '9'; });
  };
  if (name.compare(0, begin, prefix) != 0 || !is_number(begin, dot_at) || (dot && !is_number(dot_at + 1, name.size())))
    return -1;
  return std::atoi(name.c_str() + begin);
}

std::string joined(const std::vector<std::string>& parts) {
  std::string all;
  for (size_t i = 0; i < parts.size() && i < kMostListed; ++i) all += (i ? "; " : "") + parts[i];
  return parts.size() > kMostListed ? all + "; and " + std::to_string(parts.size() - kMostListed) + " more" : all;
}

// CPUID.7.0:ECX. The kernel enables ENQCMD if it allows shared queues.
bool cpu_submits([[maybe_unused]] bool shared) {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> (shared ? 29 : 28) & 1);
#else
  return false;
#endif
}

#if defined(__x86_64__)
__attribute__((target("enqcmd"))) bool enqueue(void* portal, const void* descriptor) {
  return _enqcmd(portal, descriptor) == 0;
}
__attribute__((target("movdir64b"))) void store_directly(void* portal, const void* descriptor) {
  _movdir64b(portal, descriptor);
}
#endif

class KernelPortal final : public DsaPortal {
 public:
  // `page`: null if the kernel accepts descriptors only by write().
  KernelPortal(int descriptor, uint8_t* page, bool shared) : file_(descriptor), page_(page), shared_(shared) {}
  ~KernelPortal() override {
    if (file_ >= 0) close(0);
  }

  bool submit(const void* descriptor) override {
#if defined(__x86_64__)
    if (page_) {
      _mm_sfence();  // neither instruction is ordered after older stores
      uint8_t* const place = page_ + offset_;
      offset_ = (offset_ + sizeof(DsaDescriptor)) % kPortalBytes;  // stores to one address would wait for each other
      if (shared_) return enqueue(place, descriptor);
      store_directly(place, descriptor);
      return true;
    }
#endif
    return write(file_, descriptor, sizeof(DsaDescriptor)) == static_cast<ssize_t>(sizeof(DsaDescriptor));
  }

  // When the last reference is released, the kernel waits until the device has completed all work of this process. A
  // child from fork() without exec() would hold a reference; an executed program does not.
  bool close(int64_t ns) override {
    struct Ending {
      std::mutex lock;
      std::condition_variable changed;
      bool over = false;
    };
    const auto ending = std::make_shared<Ending>();
    const auto end = [ending, file = file_, page = page_] {
      if (page) munmap(page, kPortalBytes);
      ::close(file);
      const std::lock_guard<std::mutex> hold(ending->lock);
      ending->over = true;
      ending->changed.notify_all();
    };
    file_ = -1;
    page_ = nullptr;
    try {
      std::thread(end).detach();  // it may wait forever
    } catch (const std::exception&) { end(); }
    std::unique_lock<std::mutex> hold(ending->lock);
    return ending->changed.wait_for(hold, std::chrono::nanoseconds(ns), [&] { return ending->over; });
  }

 private:
  int file_;
  uint8_t* page_;
  size_t offset_ = 0;
  const bool shared_;
};

}  // namespace

std::vector<DsaQueue> find_dsa_queues(const std::string& root, int node, std::string* missing) {
  const std::string bus = root + "/sys/bus/dsa/devices/";
  const std::vector<std::string> names = names_in(bus);
  std::vector<std::string> obstacles;
  std::vector<DsaQueue> found;
  int devices = 0;
  for (const std::string& name : names)
    if (number_in(name, "dsa", false) >= 0) {
      ++devices;
      if (const std::string state = word_of(bus + name + "/state"); state != "enabled")
        obstacles.push_back(name + " is " + (state.empty() ? "in no state" : state));
    }
  for (const std::string& name : names) {
    const int device = number_in(name, "wq", true);
    const std::string of = bus + "dsa" + std::to_string(device) + "/", queue = bus + name + "/";
    if (device < 0 || access(of.c_str(), F_OK) != 0) continue;  // a queue of another kind of device on the same bus
    if (word_of(queue + "type") != "user") continue;
    const std::string mode = word_of(queue + "mode");
    if (const std::string state = word_of(queue + "state"); state != "enabled") {
      obstacles.push_back(name + " is " + (state.empty() ? "in no state" : state));
    } else if (mode != "shared" && mode != "dedicated") {
      obstacles.push_back(name + " is neither shared nor dedicated");
    } else if (read_number(of + "pasid_enabled", "", 0) != 1) {
      obstacles.push_back("dsa" + std::to_string(device) +
                          " has no shared virtual memory (kernel parameters intel_iommu=on,sm_on)");
    } else if (read_number(queue + "ats_disable", "", 0) == 1) {
      obstacles.push_back(
          name + " has address translation (ATS) off, so that writes to absent pages would be lost");  // 3.13.1
    } else {
      DsaQueueLimits limits;
      limits.name = name;
      limits.max_transfer = read_number(queue + "max_transfer_size", "", read_number(of + "max_transfer_size", "", 0));
      limits.max_batch = read_number(queue + "max_batch_size", "", read_number(of + "max_batch_size", "", 1));
      limits.credits = mode == "dedicated" ? std::max<int64_t>(1, read_number(queue + "size", "", 1)) : 0;
      limits.block_on_fault = read_number(queue + "block_on_fault", "", 0) == 1;
      const int of_node = static_cast<int>(read_number(of + "numa_node", "", -1));  // "-1" reads as absent
      if (limits.max_transfer > 0) found.push_back({limits, root + "/dev/dsa/" + name, of_node, mode == "shared"});
      else obstacles.push_back(name + " has no max_transfer_size");
    }
  }
  std::stable_sort(found.begin(), found.end(), [node](const DsaQueue& a, const DsaQueue& b) {
    const auto distance = [node](int of_node) { return of_node == node ? 0 : of_node < 0 ? 1 : 2; };
    return distance(a.node) < distance(b.node);
  });
  if (!found.empty()) missing->clear();
  else if (!devices) *missing = "no DSA device that the idxd driver knows";
  else if (!obstacles.empty()) *missing = joined(obstacles);
  else
    *missing = std::to_string(devices) +
               " DSA device(s) without a work queue of type user: accel-config config-wq, then enable-wq";
  return found;
}

std::unique_ptr<DsaPortal> open_dsa_queue(const DsaQueue& queue, DsaQueueLimits* limits, std::string* reason) {
  const int file = open(queue.path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) {
    const int error = errno;
    *reason = queue.path + (error == EBUSY ? " is in use, and dedicated to one program"
                                           : std::string(" cannot be opened: ") + std::strerror(error));
    if (error == EACCES) *reason += " (chmod or chown it for this user)";
    return nullptr;
  }
  struct stat status;
  const char* why = fstat(file, &status) != 0 || !S_ISCHR(status.st_mode) ? " is no character device" : nullptr;
  if (!why && !cpu_submits(queue.shared))
    why = queue.shared ? ": this CPU has no ENQCMD" : ": this CPU has no MOVDIR64B";
  if (why) {
    ::close(file);
    *reason = queue.path + why;
    return nullptr;
  }
  void* const page = mmap(nullptr, kPortalBytes, PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (page != MAP_FAILED) return std::make_unique<KernelPortal>(file, static_cast<uint8_t*>(page), queue.shared);
  // Only CAP_SYS_RAWIO may map the portals of these devices (INTEL-SA-01084). Newer kernels accept single descriptors
  // by write().
  if (errno == EPERM) {
    limits->max_batch = 1;
    return std::make_unique<KernelPortal>(file, nullptr, queue.shared);
  }
  *reason = queue.path + " cannot be mapped: " + std::strerror(errno);
  ::close(file);
  return nullptr;
}

}  // namespace ckdist
